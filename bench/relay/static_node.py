"""The API of one node over one fixed backend: the relay alone, without engine, mesh or queue."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Collection, Mapping
from typing import Any

import uvloop

from viiwork.api.app import ApiServer
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.errors import ViiworkError


class StaticNode:
    """Dispatcher, origins and facts with one answer each."""

    name = "bench"

    def __init__(self, url: str) -> None:
        self._url = url

    async def acquire(self, ask: Ask, exclude: Collection[str] = ()) -> Grant:
        return Grant(ask, "bench", self._url, "m/0", 0)

    def finish(self, grant: Grant, outcome: Outcome) -> None:
        return None

    def granted(self, grant: Grant) -> None:
        return None

    def ended(self, grant: Grant, outcome: Outcome, since: float) -> None:
        return None

    def unserved(self, ask: Ask, error: ViiworkError, since: float) -> None:
        return None

    def left(self, ask: Ask, since: float) -> None:
        return None

    def forwarded_by(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str | None:
        return None

    def forward_headers(self, method: str, path_qs: str, body: bytes) -> dict[str, str]:
        return {}

    def health(self) -> tuple[int, dict[str, Any]]:
        return 200, {"status": "ok"}

    def model_for(self, name: str) -> str | None:
        return None

    def models(self) -> list[dict[str, Any]]:
        return []

    def model_info(self) -> list[dict[str, Any]]:
        return []

    def capacity(self, holdings_known: int | None) -> bytes:
        return b"{}"

    def fleet_capacity(self, model: str | None) -> dict[str, Any]:
        return {}

    def status(self) -> dict[str, Any]:
        return {}


async def serve(port: int, backend: str) -> None:
    node = StaticNode(backend)
    server = ApiServer(node, node, node, requests=node)
    await server.listen("127.0.0.1", port)
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.backend))
