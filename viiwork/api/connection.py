"""One connection to an engine or a peer: a request out, the head of its answer and a body to read.

The relay writes its own head, must know whether a connection was a kept-alive one, and whether the other
side can have seen a request that a closing connection swallowed.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Callable
from typing import NamedTuple, cast

from viiwork.limits import ANSWER_HEAD_MAX_BYTES, HEADERS_MAX, KIB
from viiwork.native.answer import AnswerReader

_READ_BYTES = 64 * KIB  # of a body not taken pause the socket at twice this
AT_ONCE_S = 0.02  # an engine needs longer to take a request, run it and fail
_SO_NWRITE = 0x1024  # macOS: bytes in the send buffer the other side has not acknowledged


class Address(NamedTuple):
    """Where a connection goes to, and which of our addresses it comes from ("" = any)."""

    host: str
    port: int
    source_ip: str = ""
    tls: bool = False  # only to external servers


class Connection(asyncio.Protocol):
    """One socket to an upstream and the answer that comes on it; one reader at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        self.address = address
        self.head = AnswerReader(ANSWER_HEAD_MAX_BYTES, HEADERS_MAX)
        self.used = False  # has carried an exchange before this one
        self.idle_since = 0.0
        self.sent_at = 0.0
        self.unseen = False  # it closed, and has not read what was sent last
        self.on_lost: Callable[[Connection], None] | None = None  # while idle in the pool
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []  # of the body, not taken yet
        self._n_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._fault: OSError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader = self.head
        piece = reader.feed(data)
        if piece:
            self._pieces.append(piece)
            self._n_bytes += len(piece)
            if self._n_bytes > 2 * _READ_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
        if reader.fault and self._fault is None:
            self.fail(ConnectionAbortedError(f"the answer is not HTTP: {reader.fault}"))
            self.abort()
        elif reader.head_seen:
            self._wake()

    def eof_received(self) -> None:
        if self._transport is not None:
            self.unseen = _unconfirmed(self._transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        transport, self._transport = self._transport, None
        if isinstance(exc, ConnectionError) and transport is not None:
            # A reset at once says that the bytes lay unread when the other side closed.
            at_once = self._loop.time() - self.sent_at < AT_ONCE_S
            self.unseen = at_once or _unconfirmed(transport)
        if exc is None and self.head.feed_eof():
            self._wake()
        else:
            self.fail(ConnectionAbortedError(f"the connection broke: {exc or 'closed too early'}"))
        if self.on_lost is not None:
            self.on_lost(self)

    def send(self, head: bytes, body: bytes) -> None:
        """Begin an exchange."""
        transport = self._transport
        if transport is None:
            raise ConnectionAbortedError("the connection is closed")
        self.unseen = False
        self.head.start()
        self.sent_at = self._loop.time()
        if len(body) <= _READ_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    async def read_head(self) -> None:
        """Wait for the facts of the answer's head."""
        while not self.head.head_seen:
            await self._next()

    def take(self) -> bytes:
        """What came of the body since the last time."""
        pieces = self._pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._n_bytes = 0
        if self._paused:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        return data

    @property
    def at_end(self) -> bool:
        """Whether the whole body was taken."""
        return not self._pieces and self.head.done

    async def read(self) -> bytes:
        """The next bytes of the body; b"" only at its end. Raises `OSError` where it broke off."""
        while not self._pieces and not self.head.done:
            await self._next()
        return self.take()

    def fail(self, error: OSError) -> None:
        """Break the answer off here, unless it has come to its end."""
        if self._fault is None:
            self._fault = error
        self._wake()

    def abort(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    @property
    def reusable(self) -> bool:
        transport = self._transport
        head = self.head
        return (
            transport is not None
            and not transport.is_closing()
            and head.keep_alive
            and head.done
            and not head.surplus
            and self._fault is None
            and transport.get_write_buffer_size() == 0  # it answered before it had read everything
        )

    def _next(self) -> asyncio.Future[None]:
        """Done when there is more to see. Raises the fault that ended the answer."""
        if self._fault is not None:
            raise self._fault
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # a reader that was cancelled is done
            waiter.set_result(None)


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
