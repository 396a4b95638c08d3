"""The answer as its client gets it: one head, a framed body, and comments while there is nothing to say.

It outlives the routes that are tried for a request. As long as nothing but comments followed the head of an
event stream, another route may still give the answer; a client skips comments, as they carry nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
from collections.abc import Iterable
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.http_writer import HttpVersion11

from viiwork.api.server import ClientRequest
from viiwork.errors import ViiworkError
from viiwork.limits import COMMENT_EVERY_S, WRITE_STALL_S
from viiwork.wire.openai import error_body
from viiwork.wire.sse import StreamScanner

log = logging.getLogger("viiwork.api")

_STREAMED_PATHS = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/infill")
)
_COMMENT = b":\n\n"
_STREAM_HEAD = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nServer: viiwork\r\n"
_PATIENCE_LOCAL = 10  # looks of the ticker without a byte before a comment
_PATIENCE_FORWARD = 15  # the executor's own comments come first


class ClientAnswer:
    """What was sent of one request's answer, and how the rest is framed."""

    __slots__ = (
        "_chunked",
        "_head",
        "_n_silent",
        "_patience",
        "_request",
        "_said",
        "_transport",
        "_wrote",
        "began",
        "client_left",
        "comments_fit",
        "has_end",
        "head_sent",
        "http11",
        "path",
        "watch",
    )

    def __init__(self, request: web.BaseRequest, path: str) -> None:
        self.path = path
        self.http11 = request.version >= HttpVersion11
        self.head_sent = False
        self.began = False  # more than comments was sent: no other route may answer
        self.comments_fit = True  # what stands between the events of this answer may be ours
        self.client_left = False
        self.has_end = False  # the framing shows a client whether the body is whole
        self.watch: StreamScanner | None = None  # of the upstream's events, while they pass
        self._request = cast(ClientRequest, request)
        self._transport = request.transport
        self._head = b""  # to be sent with the next bytes
        self._chunked = False
        self._said = b""  # our own header lines, once the request was granted a place
        self._patience = 0
        self._n_silent = 0
        self._wrote = False

    # -- head ----------------------------------------------------------------------------------------
    def granted(self, said: bytes, patience: int) -> None:
        """A place has the request now; silence counts anew, and is borne for `patience` looks."""
        self._said = said
        self._patience = patience
        self._wrote = True
        if self.head_sent:
            # The head named another place; whoever looks closer finds the new one here.
            lines = said.split(b"\r\n")[:-1]
            self._send(self._framed(b"".join(b": %b\n" % line for line in lines) + b"\n"))

    def say(self, said: bytes) -> None:
        """Other header lines of our own, as long as the head has not left."""
        self._said = said

    def start(self, lines: Iterable[bytes], *, chunked: bool, length: bytes = b"") -> None:
        """Set the head, which leaves together with the first bytes or with an empty `write`."""
        self._chunked, self.has_end = chunked, chunked or bool(length)
        page = (f"{name}: {value}\r\n".encode() for name, value in self._request.cross_origin)
        self._head = b"".join((*lines, *page, self._said, b"\r\n"))

    # -- body ----------------------------------------------------------------------------------------
    def write(self, chunk: bytes) -> None:
        self._send(self._framed(chunk) if chunk else b"")

    def end(self, chunk: bytes) -> None:
        """Write the last piece and the end of the body."""
        if self._chunked:
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk) if chunk else b"0\r\n\r\n"
        self._send(chunk)

    async def drain(self) -> None:
        """Wait while the client reads too slowly; raises `TimeoutError` when it reads nothing."""
        if self._request.protocol.writing_paused:
            async with asyncio.timeout(WRITE_STALL_S):
                try:
                    await self._request.writer.drain()
                except ConnectionError:
                    self.client_left = True
                    raise

    # -- silence -------------------------------------------------------------------------------------
    def look(self) -> None:
        """Called a few times for each interval of comments: break a silence that has lasted one."""
        if self._wrote:
            self._wrote, self._n_silent = False, 0
            return
        self._n_silent += 1
        if self._n_silent < self._patience or not self._may_comment():
            return
        self._patience = min(self._patience, _PATIENCE_FORWARD)
        if not self.head_sent:
            framing = b"Transfer-Encoding: chunked\r\n" if self.http11 else b""
            ending = b"" if self.keeps_alive else b"Connection: close\r\n"
            lines = (b"HTTP/1.%d 200 OK\r\n" % self.http11, _STREAM_HEAD, framing, ending)
            self.start(lines, chunked=self.http11)
        self._send(self._framed(_COMMENT))

    def _may_comment(self) -> bool:
        """Whether a comment harms nobody: the request has a place, and no event is half sent."""
        transport = self._transport
        return (
            bool(self._said)
            and self.comments_fit
            and (self.watch is None or self.watch.at_boundary)
            and transport is not None
            and not transport.is_closing()
            and not self._request.protocol.writing_paused
        )

    # -- ends that are none --------------------------------------------------------------------------
    def tell(self, message: str, error_type: str, code: str) -> None:
        """Write an error as the endpoint's clients know it, without an end marker after it."""
        self.began = True
        self.write(_error_event(self.path, message, error_type, code))

    def fail(self, error: ViiworkError) -> None:
        """End a stream of nothing but comments, for which no route is left."""
        text = str(error) or error.code.replace("_", " ")
        try:
            self.tell(text.encode("utf-8", "replace").decode(), error.type, error.code)
        except ConnectionError:
            log.debug("the client left before it could be told")
        self.cut()

    def separate(self) -> None:
        """End a comment that broke off in its middle."""
        if self.watch is not None and not self.watch.at_boundary:
            self.write(b"\n\n")
        self.watch = None

    def cut(self, *, reset: bool = False) -> None:
        """Close the connection of an answer that is not whole.

        What is written goes out first, and framing shows that the end is missing. A body framed by the
        close alone is `reset`, or it would look whole.
        """
        transport = self._request.transport
        if transport is None:
            return
        if not reset and (self.has_end or not self.head_sent):
            transport.close()
            return
        sock = transport.get_extra_info("socket")
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            log.debug("the client's socket is closed already")
        transport.abort()

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can carry another request after a body of unknown length."""
        return bool(self._request.keep_alive) and self.http11

    def _framed(self, chunk: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk

    def _send(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            self.client_left = True
            raise ConnectionResetError("the client left")
        if self._head:
            data, self._head = self._head + data, b""
            self.head_sent = True
        if data:
            self._wrote = True
            transport.write(data)


class Silences:
    """Looks after the answers of streamed requests; costs nothing while there are none."""

    def __init__(self, comment_every_s: float = COMMENT_EVERY_S) -> None:
        self._tick_s = comment_every_s / _PATIENCE_LOCAL
        self._answers: set[ClientAnswer] = set()
        self._timer: asyncio.TimerHandle | None = None

    def patience(self, *, forward: bool, wait_s: float) -> int:
        """Looks before the first comment; a forward that may wait at its peer may also be refused there."""
        return (_PATIENCE_FORWARD if forward else _PATIENCE_LOCAL) + math.ceil(wait_s / self._tick_s)

    def enter(self, answer: ClientAnswer) -> None:
        self._answers.add(answer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._look)

    def leave(self, answer: ClientAnswer) -> None:
        self._answers.discard(answer)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        for answer in list(self._answers):
            answer.look()
        if self._answers:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._look)


def has_stream(path: str) -> bool:
    """Whether the endpoint answers with an event stream when it is asked to."""
    return path in _STREAMED_PATHS


def _error_event(path: str, message: str, error_type: str, code: str) -> bytes:
    if path == "/v1/messages":
        value = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(value)
    if path == "/v1/responses":
        event = {"type": "error", "code": code, "message": message}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
    return b"data: %b\n\n" % msgspec.json.encode(error_body(message, error_type, code))
