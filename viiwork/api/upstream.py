"""The pool of connections to engines and peers."""

from __future__ import annotations

import asyncio
import socket
import ssl

from viiwork.api.connection import Address, Connection
from viiwork.errors import UpstreamError, UpstreamUnreachable
from viiwork.limits import CONNECT_S, PEER_DEAD_S, UPSTREAM_IDLE_MAX, UPSTREAM_IDLE_S


class Upstreams:
    """Pool of kept-alive connections, newest used first. There is no limit on those in use."""

    def __init__(self, connect_s: float = CONNECT_S, idle_s: float = UPSTREAM_IDLE_S) -> None:
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[Address, list[Connection]] = {}
        self._n_idle = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    async def exchange(self, address: Address, head: bytes, body: bytes) -> Connection:
        """Send one request and wait, without limit, for the head of its answer.

        Raises `UpstreamUnreachable` when there is no connection or it broke before the head, and
        `UpstreamError` for an answer that is not HTTP. A kept-alive connection that turns out to have
        been closed before the request reached the other side is replaced once, silently.
        """
        loop = asyncio.get_running_loop()
        connection = self._take(address, loop.time())
        if connection is not None and await self._try(connection, head, body):
            return connection
        connection = await self._connect(address, loop)
        if not await self._try(connection, head, body):
            raise UpstreamUnreachable(f"{_text(address)} closed the connection unread")
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep the connection when its answer was read to the end, else close it."""
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

    async def _try(self, connection: Connection, head: bytes, body: bytes) -> bool:
        """One exchange up to the answer's head; False when a used connection closed before its request
        was seen."""
        reused, connection.used = connection.used, True
        try:
            connection.send(head, body)
            await connection.read_head()
        except OSError as error:
            connection.abort()
            if connection.head.fault:
                raise UpstreamError(str(error)) from None
            if reused and connection.unseen:
                return False
            raise UpstreamUnreachable(f"{_text(connection.address)} broke off before its answer") from error
        except BaseException:
            connection.abort()  # cancelled: only a closed socket stops the other side's work
            raise
        if connection.head.status == 101:
            connection.abort()
            raise UpstreamError(f"{_text(connection.address)} switches protocols unasked")
        return True

    async def _connect(self, address: Address, loop: asyncio.AbstractEventLoop) -> Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                transport, connection = await loop.create_connection(
                    lambda: Connection(loop, address),
                    address.host,
                    address.port,
                    local_addr=(address.source_ip, 0) if address.source_ip else None,
                    ssl=self._tls_context() if address.tls else None,
                )
        except TimeoutError:
            raise UpstreamUnreachable(f"{_text(address)} does not answer") from None
        except ssl.SSLCertVerificationError as error:
            raise UpstreamUnreachable(f"{_text(address)}: its certificate: {error.verify_message}") from error
        except OSError as error:
            raise UpstreamUnreachable(f"{_text(address)}: {error.strerror or error}") from error
        if not address.host.startswith("127."):
            _notice_dead_peer(transport)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = (
                ssl.create_default_context()
            )  # reads the system's certificates: some milliseconds, once
        return self._tls

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
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _notice_dead_peer(transport: asyncio.Transport) -> None:
    """A machine that lost its power sends no FIN; its kernel's silence must end the wait."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PEER_DEAD_S * 1000))
