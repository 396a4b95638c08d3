"""`POST /v1/models/down` and `/v1/models/up`: park models of this node, and start them again."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from viiwork.api.ports import Parking
from viiwork.api.routes import POST, AnyRoute, ControlRoute
from viiwork.api.server import json_answer
from viiwork.errors import RequestError

DOWN_PATH, UP_PATH = "/v1/models/down", "/v1/models/up"
_EXPECTED = 'the body must be {"models": [names]}, or {} or nothing for all of them'


class Park:
    """Handlers of the two control writes."""

    def __init__(self, parking: Parking) -> None:
        self._parking = parking

    def routes(self) -> list[AnyRoute]:
        return [ControlRoute(DOWN_PATH, POST, self.down), ControlRoute(UP_PATH, POST, self.up)]

    async def down(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        return json_answer(200, self._parking.park(wanted_models(body), True))

    async def up(self, request: web.BaseRequest, path: str, body: bytes) -> web.StreamResponse:
        return json_answer(200, self._parking.park(wanted_models(body), False))


def wanted_models(body: bytes) -> list[str] | None:
    """The names in the body, None for all. Raises `RequestError`, for a slip like `{"model": "x"}` must not
    mean all.
    """
    if not body.strip():
        return None
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestError(f"{_EXPECTED}; this is not JSON") from None
    if found == {}:
        return None
    names = found.get("models") if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestError(_EXPECTED)
    return names
