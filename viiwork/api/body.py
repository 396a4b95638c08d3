"""Reading a request's body: whole, bounded, and refused by its head alone where that is enough."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web
from aiohttp.http_writer import HttpVersion11

from viiwork.api.server import ClientConnection
from viiwork.errors import BodyTimeout, BodyTooLarge, RequestError, TooManyBodies, UnsupportedBody
from viiwork.limits import BODIES_MAX_BYTES, BODY_MAX_BYTES, BODY_SILENCE_S


class Bodies:
    """Reads bodies, and counts the bytes of all that are held; `free` what `read` gave."""

    def __init__(
        self,
        *,
        body_max_bytes: int = BODY_MAX_BYTES,
        bodies_max_bytes: int = BODIES_MAX_BYTES,
        body_silence_s: float = BODY_SILENCE_S,
    ) -> None:
        self._body_max_bytes = body_max_bytes
        self._bodies_max_bytes = bodies_max_bytes
        self._body_silence_s = body_silence_s
        self._n_bytes = 0

    async def read(self, request: web.BaseRequest) -> bytes:
        """The whole body, which counts as held from now on."""
        check_encoding(request)
        if request.content.is_eof():
            body = request.content.read_nowait()
            if len(body) > self._body_max_bytes:
                raise BodyTooLarge(f"the body is larger than {self._body_max_bytes} bytes")
        else:
            body = await self._in_pieces(request)
        if cast(ClientConnection, request.protocol).broken:
            raise RequestError("the body is not framed as HTTP demands")
        try:
            self._count(len(body))
        except TooManyBodies:
            self.free(body)
            raise
        return body

    def free(self, body: bytes) -> None:
        self._n_bytes -= len(body)

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._n_bytes > self._bodies_max_bytes:
            raise TooManyBodies("too many large requests at once")

    async def _in_pieces(self, request: web.BaseRequest) -> bytes:
        check_declared(request, self._body_max_bytes)
        if expects_continue(request):
            cast(asyncio.Transport, request.transport).write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = request.content
        pieces: list[bytes] = []
        n_bytes = n_counted = 0
        try:
            while not content.at_eof():
                async with asyncio.timeout(self._body_silence_s):
                    piece = await content.readany()
                n_bytes += len(piece)
                if n_bytes > self._body_max_bytes:
                    raise BodyTooLarge(f"the body is larger than {self._body_max_bytes} bytes")
                n_counted += len(piece)
                self._count(len(piece))
                pieces.append(piece)
        except TimeoutError:
            raise BodyTimeout(f"no piece of the body came for {self._body_silence_s:.0f} s") from None
        finally:
            self._n_bytes -= n_counted
        return b"".join(pieces)


def check_declared(request: web.BaseRequest, most_bytes: int) -> None:
    """Refuse by the head alone what would be refused after reading."""
    length = request.content_length
    if length is not None and length > most_bytes:
        raise BodyTooLarge(f"the body is larger than {most_bytes} bytes")


def check_encoding(request: web.BaseRequest) -> None:
    """Refuse what can be known not to be JSON; any other label is ignored, as the engine ignores it."""
    headers = request.headers
    if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise UnsupportedBody("compressed request bodies are not supported")
    if headers.get("Content-Type", "").lstrip().lower().startswith("multipart/"):
        raise UnsupportedBody("multipart bodies are not supported; send JSON")


def expects_continue(request: web.BaseRequest) -> bool:
    expect = request.headers.get("Expect", "")
    return expect.lower() == "100-continue" and request.version >= HttpVersion11
