"""Reads the bodies of requests that are not inference: small ones, and soon."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web

from viiwork.api.body import check_declared, expects_continue
from viiwork.api.server import ClientConnection
from viiwork.errors import BodyTimeout, BodyTooLarge, KvRefused, RequestError
from viiwork.limits import LINK_BODY_S, LINK_QUESTIONS_AT_ONCE


class Questions:
    """Reads what peers ask of kv_share; only so many at once, because no proof can be checked before."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._n_reading = 0

    async def read(self, request: web.BaseRequest) -> bytes:
        """The whole body. Raises as `read_small` does, or `KvRefused`."""
        if self._n_reading >= LINK_QUESTIONS_AT_ONCE:
            raise KvRefused(f"{LINK_QUESTIONS_AT_ONCE} such questions are being read already")
        self._n_reading += 1
        try:
            return await read_small(request, self._most_bytes, LINK_BODY_S)
        finally:
            self._n_reading -= 1


async def read_small(request: web.BaseRequest, most_bytes: int, within_s: float) -> bytes:
    """The whole body. Raises `BodyTooLarge`, `BodyTimeout`, or `RequestError` when it broke off."""
    check_declared(request, most_bytes)
    content = request.content
    if content.at_eof():
        return b""
    if expects_continue(request):
        cast(asyncio.Transport, request.transport).write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            while not content.at_eof():
                body += await content.readany()
                if len(body) > most_bytes:
                    raise BodyTooLarge(f"the body is larger than {most_bytes} bytes")
    except TimeoutError:
        raise BodyTimeout(f"the body did not come within {within_s:g} s") from None
    if cast(ClientConnection, request.protocol).broken:
        raise RequestError("the body is not framed as HTTP demands")
    return bytes(body)
