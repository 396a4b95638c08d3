"""Connections to engines and peers: one request out, the head of its answer and a body to read.

aiohttp's client protocol and parser without its session: the relay writes its own head, must know
whether a connection was a kept-alive one, and whether the other side can have seen a request that a
closing connection swallowed.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

from aiohttp.client_exceptions import ClientError
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import TimerNoop
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from viiwork.errors import UpstreamError, UpstreamUnreachable
from viiwork.limits import (
    CONNECT_S,
    HEADER_FIELD_MAX_BYTES,
    HEADERS_MAX,
    KIB,
    PEER_DEAD_S,
    UPSTREAM_IDLE_MAX,
    UPSTREAM_IDLE_S,
)

_READ_BYTES = 64 * KIB  # the body reader pauses the socket at twice this
AT_ONCE_S = 0.02  # an engine needs longer to take a request, run it and fail
_SO_NWRITE = 0x1024  # macOS: bytes in the send buffer the other side has not acknowledged


class Address(NamedTuple):
    """Where a connection goes to, and which of our addresses it comes from ("" = any)."""

    host: str
    port: int
    source_ip: str = ""


class Connection(ResponseHandler):
    """One socket to an upstream; `spare` after an answer was read to its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        super().__init__(loop)
        self.address = address
        self.used = False  # has carried an exchange before this one
        self.idle_since = 0.0
        self.sent_at = 0.0
        self.unseen = False  # it closed, and has not read what was sent last
        self.on_lost: Callable[[Connection], None] | None = None  # while idle in the pool

    def eof_received(self) -> None:
        transport = self.transport
        if transport is not None:
            self.unseen = _unconfirmed(transport)
        super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        transport = self.transport
        if isinstance(exc, ConnectionError) and transport is not None:
            # A reset at once says that the bytes lay unread when the other side closed.
            at_once = self._loop.time() - self.sent_at < AT_ONCE_S
            self.unseen = at_once or _unconfirmed(transport)
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost(self)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Called for every piece read; without a pause before it the parser has nothing left."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def start(self) -> None:
        """Make ready for the next answer."""
        self.unseen = False
        self.set_response_params(
            timer=TimerNoop(),
            read_until_eof=True,
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
            max_line_size=HEADER_FIELD_MAX_BYTES,
            max_field_size=HEADER_FIELD_MAX_BYTES,
            max_headers=HEADERS_MAX,
        )

    @property
    def reusable(self) -> bool:
        transport = self.transport
        return (
            transport is not None
            and not transport.is_closing()
            and not self.should_close
            and transport.get_write_buffer_size() == 0  # it answered before it had read everything
        )


@dataclass(slots=True)
class Answer:
    """Head of an answer, and its body to be read to the end or closed."""

    head: RawResponseMessage
    body: StreamReader
    connection: Connection

    @property
    def status(self) -> int:
        return self.head.code


class Upstreams:
    """Pool of kept-alive connections, newest used first. There is no limit on those in use."""

    def __init__(self, connect_s: float = CONNECT_S, idle_s: float = UPSTREAM_IDLE_S) -> None:
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[Address, list[Connection]] = {}
        self._n_idle = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def exchange(self, address: Address, head: bytes, body: bytes) -> Answer:
        """Send one request and wait, without limit, for the head of its answer.

        Raises `UpstreamUnreachable` when there is no connection or it broke before the head, and
        `UpstreamError` for an answer that is not HTTP. A kept-alive connection that turns out to have
        been closed before the request reached the other side is replaced once, silently.
        """
        loop = asyncio.get_running_loop()
        connection = self._take(address, loop.time())
        if connection is None:
            connection = await self._connect(address, loop)
        elif (answer := await self._try(connection, head, body)) is not None:
            return answer
        else:
            connection = await self._connect(address, loop)
        answer = await self._try(connection, head, body)
        if answer is None:
            raise UpstreamUnreachable(f"{_text(address)} closed the connection unread")
        return answer

    def give_back(self, answer: Answer) -> None:
        """Keep the connection when its answer was read to the end, else close it."""
        connection = answer.connection
        if self._closed or not connection.reusable or self._n_idle >= UPSTREAM_IDLE_MAX:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        connection.on_lost = self._forget
        self._idle.setdefault(connection.address, []).append(connection)
        self._n_idle += 1
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_s, self._sweep)

    def close(self) -> None:
        """Close all idle connections; those in use are closed when given back."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connections in list(self._idle.values()):
            for connection in list(connections):
                self._drop(connection)

    async def _try(self, connection: Connection, head: bytes, body: bytes) -> Answer | None:
        """One exchange; None when a used connection closed before its request was seen."""
        reused, connection.used = connection.used, True
        transport = cast(asyncio.Transport, connection.transport)
        try:
            connection.start()
            connection.sent_at = asyncio.get_running_loop().time()
            transport.write(head + body if len(body) <= _READ_BYTES else head)
            if len(body) > _READ_BYTES:
                transport.write(body)
            while True:
                message, payload = await connection.read()
                if message.code >= 200:
                    return Answer(message, payload, connection)
                if message.code == 101:
                    raise UpstreamError(f"{_text(connection.address)} switches protocols unasked")
        except HttpProcessingError as error:
            connection.abort()
            raise UpstreamError(f"the answer is not HTTP: {error.message}") from error
        except (OSError, ClientError) as error:
            connection.abort()
            if reused and connection.unseen:
                return None
            raise UpstreamUnreachable(f"{_text(connection.address)} broke off before its answer") from error
        except BaseException:
            connection.abort()  # cancelled: only a closed socket stops the other side's work
            raise

    async def _connect(self, address: Address, loop: asyncio.AbstractEventLoop) -> Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                transport, connection = await loop.create_connection(
                    lambda: Connection(loop, address),
                    address.host,
                    address.port,
                    local_addr=(address.source_ip, 0) if address.source_ip else None,
                )
        except TimeoutError:
            raise UpstreamUnreachable(f"{_text(address)} does not answer") from None
        except OSError as error:
            raise UpstreamUnreachable(f"{_text(address)}: {error.strerror or error}") from error
        if not address.host.startswith("127."):
            _notice_dead_peer(transport)
        return connection

    def _take(self, address: Address, now: float) -> Connection | None:
        connections = self._idle.get(address)
        while connections:
            connection = connections.pop()
            self._n_idle -= 1
            connection.on_lost = None
            if connection.reusable and now - connection.idle_since < self._idle_s:
                return connection
            connection.abort()
        self._idle.pop(address, None)
        return None

    def _forget(self, connection: Connection) -> None:
        connections = self._idle.get(connection.address)
        if connections and connection in connections:
            connections.remove(connection)
            self._n_idle -= 1
            if not connections:
                del self._idle[connection.address]

    def _drop(self, connection: Connection) -> None:
        self._forget(connection)
        connection.on_lost = None
        connection.abort()

    def _sweep(self) -> None:
        """Close what idled too long; both sides would otherwise meet a connection half dead."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        oldest = loop.time() - self._idle_s
        for connections in list(self._idle.values()):
            for connection in [c for c in connections if c.idle_since <= oldest]:
                self._drop(connection)
        if self._n_idle:
            self._sweeper = loop.call_later(self._idle_s, self._sweep)


def _text(address: Address) -> str:
    host, port, _ = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unconfirmed(transport: asyncio.Transport) -> bool:
    """Whether bytes were sent that not even the other side's kernel has taken; False if nobody can say."""
    if transport.get_write_buffer_size():
        return True
    sock = transport.get_extra_info("socket")
    try:
        if sys.platform == "darwin":
            return bool(sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE))
        return fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)) != bytes(4)
    except (OSError, ValueError):
        return False


def _notice_dead_peer(transport: asyncio.Transport) -> None:
    """A machine that lost its power sends no FIN; its kernel's silence must end the wait."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PEER_DEAD_S * 1000))
