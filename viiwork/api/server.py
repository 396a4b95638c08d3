"""The HTTP server under the handlers: aiohttp's protocol with our timeouts and our error answers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.http_writer import HttpVersion10, HttpVersion11, StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import ERROR, PayloadAccessError, RequestHandler, _ErrInfo

from viiwork.errors import RequestError, ViiworkError
from viiwork.limits import (
    CONNECTIONS_MAX,
    HEADER_FIELD_MAX_BYTES,
    HEADER_READ_S,
    HEADERS_MAX,
    IDLE_S,
    KIB,
    LINGER_S,
    WRITE_STALL_S,
)
from viiwork.wire.openai import error_body

log = logging.getLogger("viiwork.api")

_VERSIONS = (HttpVersion11, HttpVersion10)
_BODY_GONE = PayloadAccessError()
READ_BYTES = 256 * KIB  # of a body are read ahead, at most twice this

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ClientRequest(web.BaseRequest):
    """A request whose facts are plain fields: aiohttp computes each of them on each use."""

    __slots__ = (
        "content",
        "cross_origin",
        "headers",
        "keep_alive",
        "method",
        "raw_headers",
        "raw_path",
        "version",
    )

    def __init__(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(message, payload, protocol, writer, task, loop)
        self.content = payload
        self.cross_origin: tuple[tuple[str, str], ...] = ()  # header lines for the page behind an `Origin`
        self.headers = message.headers
        self.keep_alive = not message.should_close
        self.method = message.method
        self.raw_headers = message.raw_headers
        self.raw_path = message.path
        self.version = message.version

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        for name, value in self.cross_origin:
            response.headers.add(name, value)


class ClientConnection(RequestHandler):
    """One client's socket."""

    def __init__(self, *args: Any, header_read_s: float = HEADER_READ_S, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_read_s = header_read_s
        self._header_timer: asyncio.TimerHandle | None = None
        self.request_id = ""  # of the inference request being answered
        self.needed = False  # work runs that is only worth while somebody waits for it
        self.half_closed = False
        self.lost = False
        self.broken = False  # the request being read lost its framing
        self._held = False  # reading from the socket is paused
        # One message at a time: the parser forgets what it has read when a later request of the same
        # packet is broken, and those before it would go unanswered.
        self._max_msg_queue_size = 1
        self._msg_queue_resume_size = 0
        self._parser = HttpRequestParser(
            self,
            self._loop,
            READ_BYTES,
            max_line_size=HEADER_FIELD_MAX_BYTES,
            max_field_size=HEADER_FIELD_MAX_BYTES,
            max_headers=HEADERS_MAX,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._header_timer = self._loop.call_later(self._header_read_s, self._header_late)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Ends a connection whose reader takes nothing while bytes wait, also after the handler is done.
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_STALL_S * 1000)
            )

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost = True
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.idle:
            if self._header_timer is None and data:
                self._header_timer = self._loop.call_later(self._header_read_s, self._header_late)
            return
        if self._messages:
            if self._header_timer is not None:
                self._stop_header_timer()
            if isinstance(self._messages[-1][0], _ErrInfo):
                self._end_half_read_body()  # which the parser leaves to wait for ever

    async def start(self) -> None:
        """Answer one request after the other.

        Does what aiohttp does, but runs the handler in this task and not in one of its own, which
        would cost two more rounds of the loop for each request.
        """
        manager, make_request, handler = self._manager, self._request_factory, self._request_handler
        if manager is None or make_request is None or handler is None:
            return
        task = asyncio.current_task()
        assert task is not None
        while not self._force_close:
            if not self._messages:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            message, payload = self._messages.popleft()
            if self._parser is not None:
                self._parser.message_consumed()
            if self._buffer_paused and not self._messages:
                self._resume_reading_if_drained()
            answering = handler
            if not isinstance(message, _ErrInfo) and message.version not in _VERSIONS:
                # The parser lets 0.9 and 2.0 through, and their answers would be as odd.
                message = _ErrInfo(400, RequestError(), "only HTTP/1.1 and HTTP/1.0 are spoken here")
            if isinstance(message, _ErrInfo):
                answering, message = self._make_error_handler(message), ERROR
            request = make_request(message, payload, self, StreamWriter(self, self._loop), task)
            try:
                answer, left = await self._handle_request(request, None, answering)
                if left:
                    break
                self._keepalive = bool(answer.keep_alive)
                if not payload.is_eof():
                    await self._linger(payload)
                payload.set_exception(_BODY_GONE)
            except asyncio.CancelledError:
                self.force_close()
                raise
            except ConnectionError:
                break
            except Exception:
                log.exception("api.failed outside a handler")
                self.force_close()
            finally:
                request._task = cast(Any, None)  # a cycle with this task otherwise
            if not self._keepalive or self._close or self._force_close:
                break
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
            if self._keepalive_handle is None:
                self._keepalive_handle = self._loop.call_at(
                    self._next_keepalive_close_time, self._process_keepalive
                )
        if not self._force_close:
            self._task_handler = None
            if self.transport is not None:
                self.transport.close()

    async def _handle_request(
        self, request: web.BaseRequest, start_time: float | None, request_handler: Any
    ) -> tuple[web.StreamResponse, bool]:
        """Run a handler, which raises nothing but that it was cancelled or that the client left."""
        self._request_in_progress = True
        self._current_request = request
        try:
            answer = await request_handler(request)
            self._current_request = None
            if self._upgraded or type(answer) is not Sent:
                return await self.finish_response(request, answer, start_time)
            return answer, False
        finally:
            self._current_request = None
            self._request_in_progress = False
            if self._handler_waiter is not None:
                self._handler_waiter.set_result(None)

    async def _linger(self, payload: StreamReader) -> None:
        """Read the rest of a body away for a while, so that the client sees its answer and not a reset."""
        try:
            async with asyncio.timeout(self._lingering_time):
                while not payload.is_eof():
                    await payload.readany()
        except TimeoutError:
            self.close()

    def _pause_transport_reading(self) -> None:
        # A lone message that is taken before the next read needs no pause.
        if self._reading_paused or self._waiter is None:
            self._held = True
            super()._pause_transport_reading()

    def _resume_transport_reading(self) -> None:
        if self._held:
            self._held = False
            super()._resume_transport_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Called for every piece read; without a pause before it the parser has nothing left."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that closes for sending has left, as it has for the engine.

        Nothing tells its half-close from a close before the next write, and an answer nobody waits for
        would hold a slot. Only what is answered at once is still answered.
        """
        self.half_closed = True
        self._end_half_read_body()
        if self.needed or self.idle:
            return None
        self.close()
        return True

    def _end_half_read_body(self) -> None:
        """The rest of the body that is being read will not come."""
        request = self._current_request
        if request is not None:
            content = request.content
        elif self._messages and not isinstance(self._messages[0][0], _ErrInfo):
            content = self._messages[0][1]  # its handler has not begun
        else:
            return
        if not content.is_eof():
            self.broken = True
            content.feed_eof()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered or waits for it."""
        return self._waiter is not None and not self._waiter.done()

    def retire(self) -> None:
        """Close now, or after the running request."""
        if self.idle:
            self.force_close()
        else:
            self.close()

    def _header_late(self) -> None:
        self._header_timer = None
        if not self._request_in_progress and not self._messages:
            self.force_close()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused; handlers never let an exception come this far."""
        if status >= 500:
            log.error("api.failed outside a handler", exc_info=exc)
            answer = json_answer(500, error_body("internal error", "server_error", "internal"))
        else:
            text = (message or "not valid HTTP").partition("\n")[0].strip(" :")
            error = RequestError(f"the request is not valid HTTP: {text}"[:300])
            answer = error_answer(error, status=status)
        answer.force_close()
        return answer


class ClientServer(web.Server):
    """Makes a `ClientConnection` of each accepted socket."""

    def __init__(
        self, handler: Handler, *, header_read_s: float = HEADER_READ_S, idle_s: float = IDLE_S
    ) -> None:
        super().__init__(cast(Any, handler), request_factory=self._request, handler_cancellation=True)
        self._header_read_s = header_read_s
        self._idle_s = idle_s

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> ClientRequest:
        return ClientRequest(message, payload, protocol, writer, task, self._loop)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > CONNECTIONS_MAX:
            log.warning("connection.refused: %d clients are connected", CONNECTIONS_MAX)
            transport.abort()

    def retire(self) -> None:
        """Close each connection once its running request is answered."""
        for connection in self.connections:
            cast(ClientConnection, connection).retire()

    def __call__(self) -> RequestHandler:
        return ClientConnection(
            self,
            loop=self._loop,
            header_read_s=self._header_read_s,
            keepalive_timeout=self._idle_s,
            access_log=cast(Any, None),
            read_bufsize=READ_BYTES,
            lingering_time=LINGER_S,
        )


class Sent(web.StreamResponse):
    """Tells aiohttp that a handler has written its answer itself; of a response it is only the name."""

    def __init__(self, keep_alive: bool) -> None:
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: Any = b"") -> None:
        return None


def json_answer(status: int, value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return web.Response(
        status=status,
        body=body,
        content_type="application/json",
        headers={"Server": "viiwork", **(headers or {})},
    )


def error_answer(
    error: ViiworkError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The one way from an error to an answer."""
    more = dict(headers or {})
    if error.retry_after_s is not None:
        more["Retry-After"] = str(error.retry_after_s)
    text = str(error) or error.code.replace("_", " ")
    # Names in a message may hold halves of characters that no encoder takes.
    text = text.encode("utf-8", "replace").decode()
    return json_answer(status or error.http_status, error_body(text, error.type, error.code), more)
