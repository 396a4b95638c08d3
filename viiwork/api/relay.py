"""Passes one upstream answer to the client: bytes unchanged, as they come, and honest about its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from dataclasses import dataclass
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.http_writer import HttpVersion11

from viiwork.api.connection import Connection
from viiwork.api.headers import answer_headers, header
from viiwork.api.server import ClientRequest
from viiwork.core.turn import Result, Usage
from viiwork.limits import ANSWER_TAIL_BYTES, WRITE_STALL_S
from viiwork.wire.openai import error_body
from viiwork.wire.sse import StreamScanner, usage_of_body, usage_of_tail

log = logging.getLogger("viiwork.api")

_NO_BODY = frozenset((204, 304))


@dataclass(slots=True)
class Passed:
    """What became of an answer; filled while it passes, so that it is true at any moment."""

    result: Result = "broken"
    first_byte_sent: bool = False
    first_content_at: float | None = None
    streamed: bool = False
    usage: Usage | None = None
    detail: str = ""
    keep_alive: bool = False


async def relay(
    request: web.BaseRequest, answer: Connection, extra: list[bytes], path: str, passed: Passed, *, peer: bool
) -> None:
    """Send `answer` to the client and tell in `passed` how far it came.

    Returns for every fault of either side; only cancellation passes through. The upstream connection
    is left to the caller: read to its end exactly when `passed.result` is "done".
    """
    head = answer.head
    raw = head.headers
    http11 = request.version >= HttpVersion11
    length = b"" if head.chunked else header(raw, b"content-length")
    has_body = head.status not in _NO_BODY
    chunked = has_body and not length and http11
    keep_alive = request.keep_alive and (http11 or bool(length) or not has_body)
    lines = [
        b"HTTP/1.%d %d %b\r\n" % (http11, head.status, head.reason),
        *answer_headers(raw, peer=peer),
        *extra,
    ]
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    elif has_body and length:
        lines.append(b"Content-Length: %b\r\n" % length)
    for name, value in cast(ClientRequest, request).cross_origin:
        lines.append(f"{name}: {value}\r\n".encode())
    if not keep_alive:
        lines.append(b"Connection: close\r\n")
    elif not http11:
        lines.append(b"Connection: keep-alive\r\n")
    lines.append(b"\r\n")
    streamed = passed.streamed = header(raw, b"content-type").lower().startswith(b"text/event-stream")
    writer = _Writer(request, b"".join(lines), chunked, passed)
    watch: StreamScanner | _BodyWatch = StreamScanner() if streamed else _BodyWatch()
    whole = False
    try:
        chunk = answer.take()
        while True:
            if chunk:
                watch.feed(chunk)
                if passed.first_content_at is None and watch.content_seen:
                    passed.first_content_at = time.monotonic()
            if answer.at_end:
                writer.end(chunk)
                whole = True
                break
            writer.write(chunk)  # also without a piece at first: the head must not wait for the body
            await writer.drain()
            chunk = await answer.read()
    except OSError as error:
        if writer.client_left:
            passed.result, passed.detail = "client_gone", "the client left"
        elif isinstance(error, TimeoutError):
            passed.result, passed.detail = "client_gone", "the client stopped reading"
            cut(request, reset=True)
        else:
            passed.detail = f"{error or type(error).__name__}".partition("\n")[0]
            _break_off(request, writer, watch, path, passed, framed=chunked or bool(length))
    finally:
        passed.usage = watch.usage
    if whole:
        passed.result, passed.keep_alive = "done", keep_alive


def _break_off(
    request: web.BaseRequest,
    writer: _Writer,
    watch: StreamScanner | _BodyWatch,
    path: str,
    passed: Passed,
    *,
    framed: bool,
) -> None:
    """The upstream broke in its body: the client must not take what it has for the whole."""
    try:
        if isinstance(watch, StreamScanner):
            if watch.finished:
                passed.result = "done"
            elif watch.at_boundary and not watch.error_seen and framed:
                writer.write(_error_event(path))
    except ConnectionError:
        passed.result = "client_gone"
    cut(request, reset=not framed)


class _Writer:
    """Frames a body for the client and writes it at once."""

    __slots__ = ("_chunked", "_head", "_passed", "_request", "_transport", "client_left")

    def __init__(self, request: web.BaseRequest, head: bytes, chunked: bool, passed: Passed) -> None:
        self._request = request
        self._transport = request.transport
        self._head = head  # not sent yet when not empty
        self._chunked = chunked
        self._passed = passed
        self.client_left = False

    def write(self, chunk: bytes) -> None:
        if self._chunked and chunk:
            chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        self._send(chunk)

    def end(self, chunk: bytes) -> None:
        """Write the last piece and the end of the body."""
        if self._chunked:
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk) if chunk else b"0\r\n\r\n"
        self._send(chunk)

    def _send(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            self.client_left = True
            raise ConnectionResetError("the client left")
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self._passed.first_byte_sent = True
            transport.write(data)

    async def drain(self) -> None:
        """Wait while the client reads too slowly; raises `TimeoutError` when it reads nothing."""
        if self._request.protocol.writing_paused:
            async with asyncio.timeout(WRITE_STALL_S):
                try:
                    await self._request.writer.drain()
                except ConnectionError:
                    self.client_left = True
                    raise


class _BodyWatch:
    """Keeps what is needed of a plain answer to find its token counts at the end."""

    __slots__ = ("_cut", "_tail", "content_seen")

    def __init__(self) -> None:
        self.content_seen = False
        self._tail = b""
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        self.content_seen = True
        self._tail = self._tail + chunk if self._tail else chunk
        if len(self._tail) > ANSWER_TAIL_BYTES:
            self._tail = self._tail[-ANSWER_TAIL_BYTES // 2 :]
            self._cut = True

    @property
    def usage(self) -> Usage | None:
        return usage_of_tail(self._tail) if self._cut else usage_of_body(self._tail)


def cut(request: web.BaseRequest, *, reset: bool) -> None:
    """Close a connection whose answer is not whole.

    What is written goes out first, and framing shows that the end is missing. A body framed by the
    close alone needs a `reset`, or it would look whole.
    """
    transport = request.transport
    if transport is None:
        return
    if not reset:
        transport.close()
        return
    sock = transport.get_extra_info("socket")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        log.debug("the client's socket is closed already")
    transport.abort()


def _error_event(path: str) -> bytes:
    """An error as the endpoint's clients know it, without an end marker after it."""
    message = "the upstream broke off in the middle of its answer"
    if path == "/v1/messages":
        value = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(value)
    if path == "/v1/responses":
        event = {"type": "error", "code": "upstream_broken", "message": message}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
    return b"data: %b\n\n" % msgspec.json.encode(error_body(message, "server_error", "upstream_broken"))
