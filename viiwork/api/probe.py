"""`POST /v1/kv/paths` and `POST /v1/kv/probe`: where else a node is, and the proof that it is."""

from __future__ import annotations

from aiohttp import web

from viiwork.api.ports import Links
from viiwork.api.routes import POST, AnyRoute, Route
from viiwork.api.small_body import Questions
from viiwork.limits import LINK_BODY_MAX_BYTES
from viiwork.wire.probe import PATHS_PATH, PROBE_PATH


class Probes:
    """Answers peers' questions about this node's addresses."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._questions = Questions(LINK_BODY_MAX_BYTES)

    def routes(self) -> list[AnyRoute]:
        return [
            Route(PATHS_PATH, POST, self._told),
            Route(PROBE_PATH, POST, self._probed),
        ]

    async def _told(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        body = await self._questions.read(request)
        answer = self._links.told(request.raw_path, request.headers, body, request.remote or "")
        return web.Response(body=answer, content_type="application/json")

    async def _probed(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        body = await self._questions.read(request)
        transport = request.transport
        name = transport.get_extra_info("sockname") if transport is not None else None
        local_ip = name[0] if name else ""
        answer = self._links.probed(request.raw_path, request.headers, body, request.remote or "", local_ip)
        return web.Response(body=answer, content_type="application/json")
