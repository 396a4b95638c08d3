"""`POST /v1/kv/pull`: a peer asks for a session's state."""

from __future__ import annotations

from aiohttp import web

from viiwork.api.ports import Pulls
from viiwork.api.routes import POST, AnyRoute, Route
from viiwork.api.small_body import Questions
from viiwork.limits import KV_PULL_BODY_MAX_BYTES
from viiwork.wire.kvpull import PULL_PATH


class PullRoutes:
    """Answers when the state is there."""

    def __init__(self, pulls: Pulls) -> None:
        self._pulls = pulls
        self._questions = Questions(KV_PULL_BODY_MAX_BYTES)

    def routes(self) -> list[AnyRoute]:
        return [Route(PULL_PATH, POST, self._pulled)]

    async def _pulled(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        body = await self._questions.read(request)
        answer = await self._pulls.pulled(request.raw_path, request.headers, body, request.remote or "")
        return web.Response(body=answer, content_type="application/json")
