"""Routes of the alias table: reads for everybody, writes for those who prove that they may."""

from __future__ import annotations

from urllib.parse import unquote

from aiohttp import web

from viiwork.api.ports import AliasTable
from viiwork.api.routes import GET, AnyRoute, ControlRoute, Route
from viiwork.api.server import json_answer
from viiwork.errors import BodyTooLarge, NotFound
from viiwork.limits import ALIAS_BODY_MAX_BYTES
from viiwork.wire.aliases import decode_put

PATH = "/v1/aliases"
_REVERT = "/revert"


class AliasApi:
    """Handlers of `/v1/aliases`."""

    def __init__(self, table: AliasTable) -> None:
        self._table = table

    def routes(self) -> list[AnyRoute]:
        return [
            Route(PATH, GET, self.listed),
            ControlRoute(f"{PATH}/*", ("PUT",), self.put),
            ControlRoute(f"{PATH}/*", ("DELETE",), self.delete),
            ControlRoute(f"{PATH}/*", ("POST",), self.revert),
        ]

    async def listed(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        if request.query.get("table") == "1":
            return json_answer(200, self._table.table_json())
        return json_answer(200, {"aliases": self._table.listing()})

    async def put(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        if len(body) > ALIAS_BODY_MAX_BYTES:
            raise BodyTooLarge(f"the body is larger than {ALIAS_BODY_MAX_BYTES} bytes")
        wanted = decode_put(body)
        return json_answer(
            200, await self._table.put(_name(path), wanted.target, wanted.fallbacks, wanted.force)
        )

    async def delete(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        return json_answer(200, await self._table.delete(_name(path)))

    async def revert(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        if not path.endswith(_REVERT):
            raise NotFound(f"a POST goes to {PATH}/<name>{_REVERT}")
        return json_answer(200, await self._table.revert(_name(path[: -len(_REVERT)])))


def _name(path: str) -> str:
    return unquote(path[len(PATH) + 1 :], errors="replace")
