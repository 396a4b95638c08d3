"""Passes one upstream answer to the client: bytes unchanged, as they come, and honest about its end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from viiwork.api.connection import Connection
from viiwork.api.headers import answer_headers, header
from viiwork.api.outgoing import ClientAnswer
from viiwork.core.turn import Grant, Result, Usage
from viiwork.limits import ANSWER_TAIL_BYTES, REFUSAL_DRAIN_BYTES, REFUSAL_DRAIN_S
from viiwork.wire.sse import StreamScanner, usage_of_body, usage_of_tail

_NO_BODY = frozenset((204, 304))


@dataclass(slots=True)
class Passed:
    """What became of an answer; filled while it passes, so that it is true at any moment."""

    result: Result = "broken"
    first_content_at: float | None = None
    streamed: bool = False
    usage: Usage | None = None
    detail: str = ""
    keep_alive: bool = False
    finished: bool = False  # the stream's own end marker was sent

    def client_left(self) -> None:
        """Many clients close at the end marker, before the connection's own end: they have it all."""
        self.result, self.detail = ("done", "") if self.finished else ("client_gone", "the client left")


async def relay(
    request: web.BaseRequest, client: ClientAnswer, answer: Connection, grant: Grant, passed: Passed
) -> None:
    """Send `answer` to the client and tell in `passed` how far it came.

    Comments do not make the grant an answered one: an engine that has lost a request still sends them.
    Returns for every fault of either side; only cancellation passes through. "unreachable" says that it
    broke while another route may still answer. The upstream connection is left to the caller: read to its
    end only when `passed.result` is "done".
    """
    head = answer.head
    raw = head.headers
    streamed = passed.streamed = header(raw, b"content-type").lower().startswith(b"text/event-stream")
    plain = not header(raw, b"content-encoding")
    if client.head_sent:
        if head.status != 200 or not streamed or not plain:
            grant.answered = True
            await _tell_late(client, answer, passed)
            return
        passed.keep_alive = client.keeps_alive
    else:
        _start(request, client, answer, passed, peer=grant.is_forward)
        client.comments_fit = streamed and plain and not (header(raw, b"content-length") and not head.chunked)
        client.began = grant.answered = not (client.comments_fit and head.status == 200)
    watch: StreamScanner | _BodyWatch = StreamScanner() if streamed else _BodyWatch()
    if isinstance(watch, StreamScanner):
        client.watch = watch
    whole = False
    try:
        chunk = answer.take()
        while True:
            if chunk:
                watch.feed(chunk)
                if not client.began:
                    client.began = grant.answered = watch.began
                if passed.first_content_at is None and watch.content_seen:
                    passed.first_content_at = time.monotonic()
            if answer.at_end:
                client.end(chunk)
                whole = True
                break
            client.write(chunk)  # also without a piece at first: the head must not wait for the body
            passed.finished = watch.finished
            await client.drain()
            chunk = await answer.read()
    except OSError as error:
        if client.client_left:
            passed.client_left()
        elif isinstance(error, TimeoutError):
            passed.result, passed.detail = "client_gone", "the client stopped reading"
            client.cut(reset=True)
        else:
            passed.detail = f"{error or type(error).__name__}".partition("\n")[0]
            _break_off(client, watch, passed)
    finally:
        passed.usage = watch.usage
    if whole:
        passed.result = "done"


def _start(
    request: web.BaseRequest, client: ClientAnswer, answer: Connection, passed: Passed, *, peer: bool
) -> None:
    """Give the client the upstream's head, framed for it."""
    head, http11 = answer.head, client.http11
    length = b"" if head.chunked else header(head.headers, b"content-length")
    has_body = head.status not in _NO_BODY
    chunked = has_body and not length and http11
    passed.keep_alive = request.keep_alive and (http11 or bool(length) or not has_body)
    lines = [
        b"HTTP/1.%d %d %b\r\n" % (http11, head.status, head.reason),
        *answer_headers(head.headers, peer=peer),
    ]
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    elif has_body and length:
        lines.append(b"Content-Length: %b\r\n" % length)
    if not passed.keep_alive:
        lines.append(b"Connection: close\r\n")
    elif not http11:
        lines.append(b"Connection: keep-alive\r\n")
    client.start(lines, chunked=chunked, length=length)


async def _tell_late(client: ClientAnswer, answer: Connection, passed: Passed) -> None:
    """The client was promised a stream and this is none: it hears of it as an event, and nothing follows."""
    body = bytearray()
    try:
        async with asyncio.timeout(REFUSAL_DRAIN_S):
            while not answer.at_end and len(body) < REFUSAL_DRAIN_BYTES:
                body += await answer.read()
    except OSError as error:
        passed.detail = f"its error was cut short: {error or type(error).__name__}"
    status = answer.head.status
    try:
        client.tell(_message_of(bytes(body)) or f"the engine answered {status} and no stream", *_kind(status))
        client.end(b"")
    except ConnectionError:
        passed.result, passed.detail = "client_gone", "the client left"
    else:
        passed.result, passed.keep_alive = "done", client.keeps_alive


def _kind(status: int) -> tuple[str, str]:
    """`type` and `code` of an error that came with a status."""
    return ("invalid_request", "engine_refused") if 400 <= status < 500 else ("server_error", "engine_failed")


def _message_of(body: bytes) -> str:
    """The text of an engine's error, "" when there is none to be found."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    error = value.get("error") if isinstance(value, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return text if isinstance(text, str) else ""


def _break_off(client: ClientAnswer, watch: StreamScanner | _BodyWatch, passed: Passed) -> None:
    """The upstream broke in its body: the client must not take what it has for the whole."""
    try:
        if not client.began:
            client.separate()
            passed.result = "unreachable"
            return
        if isinstance(watch, StreamScanner):
            if watch.finished:
                passed.result = "done"
            elif watch.at_boundary and not watch.error_seen and client.has_end:
                client.tell(
                    "the upstream broke off in the middle of its answer", "server_error", "upstream_broken"
                )
    except ConnectionError:
        passed.result = "client_gone"
    passed.keep_alive = False
    client.cut()


class _BodyWatch:
    """Keeps what is needed of a plain answer to find its token counts at the end."""

    __slots__ = ("_cut", "_tail", "content_seen")
    began = True
    finished = False

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
