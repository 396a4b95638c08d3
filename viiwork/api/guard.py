"""Who may do what over HTTP: pages of other origins, and control writes. Judges requests, routes none."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import cast

from aiohttp import web

from viiwork.api.ports import Origins
from viiwork.api.server import ClientRequest
from viiwork.api.small_body import read_small
from viiwork.core.cross_origin import is_same_place
from viiwork.errors import Forbidden, TooManyBodies, UnsupportedBody
from viiwork.limits import CONTROL_BODY_MAX_BYTES, CONTROL_BODY_S, CONTROLS_AT_ONCE, PREFLIGHT_AGE_S

log = logging.getLogger("viiwork.api")

ORIGIN = "Origin"
_WRITES = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-]+(?:[ \t]*,[ \t]*[A-Za-z0-9_\-]+)*", re.ASCII)


class PageGuard:
    """Judges requests that carry an `Origin`: a web page makes them, perhaps not the user's own."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows

    def judge(self, request: web.BaseRequest) -> web.StreamResponse | None:
        """The answer to a preflight, None for a request that may go on. Raises `Forbidden`.

        Whatever answers the request then, also with an error, says to the browser what the page may read.
        """
        headers, method = request.headers, request.method
        origin = ", ".join(headers.getall(ORIGIN))  # of several none fits
        allowed = self._allows(origin)
        said = [("Vary", ORIGIN)]
        if allowed:
            said += [("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", "*")]
        cast(ClientRequest, request).cross_origin = tuple(said)
        if method == "OPTIONS" and "Access-Control-Request-Method" in headers:
            if not allowed:
                raise _foreign(origin)
            return _preflight(headers.get("Access-Control-Request-Headers", ""))
        if method in _WRITES and not allowed and not is_same_place(origin, headers.get("Host", "")):
            raise _foreign(origin)
        return None


class ControlGuard:
    """Lets control writes through that are proven to be the operator's."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._n_reading = 0

    async def admit(self, request: web.BaseRequest) -> bytes:
        """The whole body of an admitted write. Raises a `RequestError`, or `TooManyBodies`."""
        if self._n_reading >= CONTROLS_AT_ONCE:
            raise TooManyBodies("too many changes at once")
        self._n_reading += 1
        try:
            body = await read_small(request, CONTROL_BODY_MAX_BYTES, CONTROL_BODY_S)
        finally:
            self._n_reading -= 1
        _check_type(request, body)
        who = self._origins.control(
            request.method, request.raw_path, request.headers, body, request.remote or ""
        )
        log.info("control.admitted method=%s path=%s by=%s", request.method, request.raw_path[:200], who)
        return body


def _foreign(origin: str) -> Forbidden:
    return Forbidden(f"pages of {origin[:200]!r} may not use this node; see api.cors.allow_origins")


def _preflight(wanted: str) -> web.StreamResponse:
    headers = {
        "Server": "viiwork",
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
    }
    if _HEADER_NAMES.fullmatch(wanted):
        headers["Access-Control-Allow-Headers"] = wanted  # `*` would leave out Authorization
    return web.Response(status=204, headers=headers)


def _check_type(request: web.BaseRequest, body: bytes) -> None:
    """A form of a foreign page cannot send JSON's type, so an older browser's page fails here too."""
    kind = request.headers.get("Content-Type")
    if kind is None and not body:
        return
    if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedBody("a change must be sent with the header Content-Type: application/json")
