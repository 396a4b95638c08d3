"""`GET /v1/kv`: which states this node holds, and over which links they travel."""

from __future__ import annotations

from aiohttp import web

from viiwork.api.ports import KvFacts
from viiwork.api.routes import GET, AnyRoute, Route
from viiwork.api.server import json_answer


class Kv:
    """Shows what kv_share has."""

    def __init__(self, facts: KvFacts) -> None:
        self._facts = facts

    def routes(self) -> list[AnyRoute]:
        return [Route("/v1/kv", GET, self.show)]

    async def show(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        return json_answer(200, self._facts.listing())
