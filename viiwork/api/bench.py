"""`POST /v1/bench/kvshare`: let this machine be the other end of a measurement, for one host."""

from __future__ import annotations

from aiohttp import web

from viiwork.api.ports import BenchEnds
from viiwork.api.routes import POST, AnyRoute, ControlRoute
from viiwork.api.server import json_answer

BENCH_PATH = "/v1/bench/kvshare"


class Bench:
    """Handler of the control write."""

    def __init__(self, ends: BenchEnds) -> None:
        self._ends = ends

    def routes(self) -> list[AnyRoute]:
        return [ControlRoute(BENCH_PATH, POST, self.begin)]

    async def begin(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        return json_answer(200, {"port": await self._ends.begin()})
