"""Passes one upstream answer to the client: bytes unchanged, as they come, and honest about its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from dataclasses import dataclass

import msgspec
from aiohttp import web
from aiohttp.client_exceptions import ClientError
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_writer import HttpVersion11

from viiwork.api.headers import RawHeaders, answer_headers, header
from viiwork.api.upstream import Answer
from viiwork.core.turn import Result, Usage
from viiwork.limits import ANSWER_TAIL_BYTES, WRITE_STALL_S
from viiwork.wire.openai import error_body
from viiwork.wire.sse import StreamScanner, usage_of_body, usage_of_tail

log = logging.getLogger("viiwork.api")

_NO_BODY = frozenset((204, 205, 304))


@dataclass(slots=True)
class Passed:
    """What became of an answer; filled while it passes, so that it is true at any moment."""

    result: Result = "broken"
    first_byte_sent: bool = False
    first_content_at: float | None = None
    usage: Usage | None = None
    detail: str = ""
    keep_alive: bool = False


async def relay(
    request: web.BaseRequest, answer: Answer, extra: list[bytes], path: str, passed: Passed, *, peer: bool
) -> None:
    """Send `answer` to the client and tell in `passed` how far it came.

    Returns for every fault of either side; only cancellation passes through. The upstream connection
    is left to the caller: read to its end exactly when `passed.result` is "done".
    """
    head = answer.head
    raw: RawHeaders = head.raw_headers
    http11 = request.version >= HttpVersion11
    length = b"" if head.chunked else header(raw, b"content-length")
    has_body = answer.status not in _NO_BODY
    chunked = has_body and not length and http11
    keep_alive = request.keep_alive and (http11 or bool(length) or not has_body)
    lines = [
        f"HTTP/1.{1 if http11 else 0} {answer.status} {head.reason}\r\n".encode("utf-8", "surrogateescape"),
        *answer_headers(raw, peer=peer),
        *extra,
    ]
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    elif has_body and length:
        lines.append(b"Content-Length: %b\r\n" % length)
    if not keep_alive:
        lines.append(b"Connection: close\r\n")
    elif not http11:
        lines.append(b"Connection: keep-alive\r\n")
    lines.append(b"\r\n")
    streamed = header(raw, b"content-type").lower().startswith(b"text/event-stream")
    writer = _Writer(request, b"".join(lines), chunked, passed)
    watch: StreamScanner | _BodyWatch = StreamScanner() if streamed else _BodyWatch()
    body = answer.body
    now = asyncio.get_running_loop().time
    try:
        if has_body and not body.is_eof() and not body._buffer:
            # Nothing of the body is there yet: the head must not wait for it.
            writer.write(b"")
        while True:
            try:
                chunk = await body.readany()
            except (OSError, ClientError, HttpProcessingError) as error:
                passed.detail = f"the upstream broke off: {error or type(error).__name__}"
                break
            if chunk:
                watch.feed(chunk)
                if passed.first_content_at is None and watch.content_seen:
                    passed.first_content_at = now()
            if body.at_eof():
                if body.exception() is not None:
                    writer.write(chunk)
                    continue
                writer.end(chunk)
                passed.result, passed.keep_alive = "done", keep_alive
                passed.usage = watch.usage
                return
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        passed.result, passed.detail = "client_gone", "the client left"
        return
    except TimeoutError:
        passed.result, passed.detail = "client_gone", "the client stopped reading"
        abort(request)
        return
    finally:
        passed.usage = watch.usage
    # Broken upstream: the client must not take what it has for the whole.
    if isinstance(watch, StreamScanner):
        if watch.finished:
            passed.result, passed.detail = "done", "the upstream closed after the end marker"
            abort(request)
            return
        if watch.at_boundary and not watch.error_seen and not writer.abrupt:
            try:
                writer.write(_error_event(path, passed.detail))
                close(request)
                return
            except ConnectionError:
                pass
    abort(request)


class _Writer:
    """Frames a body for the client and writes it at once."""

    __slots__ = ("_chunked", "_head", "_passed", "_request", "_transport", "abrupt")

    def __init__(self, request: web.BaseRequest, head: bytes, chunked: bool, passed: Passed) -> None:
        self._request = request
        self._transport = request.transport
        self._head = head  # not sent yet when not empty
        self._chunked = chunked
        self._passed = passed
        self.abrupt = not chunked  # only chunked framing shows where a closed connection stopped short

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
                await self._request.writer.drain()


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


def abort(request: web.BaseRequest) -> None:
    """Close with a reset: also a client that reads until the end must see that this is none."""
    transport = request.transport
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        log.debug("the client's socket is closed already")
    transport.abort()


def close(request: web.BaseRequest) -> None:
    """Send what is written, then close."""
    if request.transport is not None:
        request.transport.close()


def _error_event(path: str, message: str) -> bytes:
    """An error as the endpoint's clients know it, without an end marker after it."""
    value = error_body(message, "server_error", "upstream_broken")
    if path == "/v1/messages":
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(
            {"type": "error", "error": {"type": "api_error", "message": message}}
        )
    if path == "/v1/responses":
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(
            {"type": "error", "code": "upstream_broken", "message": message}
        )
    return b"data: %b\n\n" % msgspec.json.encode(value)
