"""`GET /v1/why/<request id>`: why a request ran where it ran."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from aiohttp import web

from viiwork.api.routes import GET, AnyRoute, Route
from viiwork.api.server import json_answer
from viiwork.core.choice import Policy
from viiwork.core.receipts import Receipts
from viiwork.errors import NotFound
from viiwork.wire.why import receipt_json

PATH = "/v1/why/"
_ID = re.compile("[0-9a-f]{16}")


class Why:
    """Shows the receipts of the last requests decided here."""

    def __init__(
        self, node: str, receipts: Receipts, policy: Policy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is the one the receipts were written by."""
        self._node = node
        self._receipts = receipts
        self._policy = policy
        self._clock = clock

    def routes(self) -> list[AnyRoute]:
        return [Route(PATH + "*", GET, self.handle)]

    async def handle(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        request_id = path.removeprefix(PATH)
        if _ID.fullmatch(request_id) is None:
            raise NotFound("a request id is 16 hex digits, as in the answer's X-Viiwork-Request")
        receipt = self._receipts.get(request_id)
        if receipt is None:
            raise NotFound(f"{self._node} keeps no receipt of request {request_id}")
        at_unix_ms = round((time.time() - (self._clock() - receipt.at)) * 1000)
        return json_answer(200, receipt_json(self._node, self._policy, receipt, at_unix_ms))
