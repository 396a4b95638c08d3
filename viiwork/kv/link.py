"""A channel's socket with its clocks: blocking frames in and out, and both ends of the handshake."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from viiwork.errors import ChannelError, KvError, SaveFileError
from viiwork.kv.jobs import ReceiveGrant, SendJob
from viiwork.limits import KV_DRAIN_MIN_BYTES, KV_HANDSHAKE_S
from viiwork.native.mover import recv_exact, send_all, send_ranges
from viiwork.wire.channel import (
    HEADER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    TAG_BYTES,
    FrameType,
    Header,
    Initiator,
    Opener,
    Responder,
    Sealed,
    Sealer,
    Session,
    read_header,
)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Cancel:
    """Ends a job from another thread: wakes its socket, and is looked at between chunks."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = "cancelled"
        self._wake: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def watch(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._wake = wake
        if self._event.is_set():
            wake()

    def set(self, reason: str = "cancelled") -> None:
        with self._lock:
            if not self._event.is_set():
                self.reason = reason
            self._event.set()
            wake = self._wake
        if wake is not None:
            wake()

    def check(self) -> None:
        if self._event.is_set():
            raise KvError(self.reason, f"the job was {self.reason}")

    @property
    def is_set(self) -> bool:
        return self._event.is_set()


@contextmanager
def link_errors() -> Iterator[None]:
    """Map what a socket does to reason words."""
    try:
        yield
    except TimeoutError as error:
        raise KvError("timeout", str(error)) from None
    except OSError as error:
        raise KvError("link_lost", str(error)) from None


@contextmanager
def file_errors() -> Iterator[None]:
    """Map what a file does to reason words."""
    try:
        yield
    except OSError as error:
        reason = "no_space" if error.errno in _NO_SPACE else "io_error"
        raise KvError(reason, str(error)) from None


class Link:
    """Frames over one socket. Owns the socket: `close` it. Sending and receiving may be on two threads."""

    def __init__(self, sock: socket.socket, job: SendJob | ReceiveGrant, cancel: Cancel) -> None:
        self._sock, self._fd, self._cancel = sock, sock.fileno(), cancel
        self._silence_ms = int(job.silence_s * 1000)
        self._deadline = time.monotonic() + job.deadline_s
        self._expect_seq = 0
        self.sent_bytes = self.received_bytes = 0
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        with suppress(OSError):  # not a TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cancel.watch(self._wake)

    def _wake(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed by the peer already

    def close(self) -> None:
        self._cancel.watch(lambda: None)
        self._sock.close()

    # -- handshake

    def initiate(self, job: SendJob, *, aes: bool = False) -> Session:
        """Both proofs exchanged; raises `KvError`. `aes`: that cipher is the faster one here."""
        side = Initiator(job.key, job.local_name, os.urandom(32), encrypt=job.encrypt, aes=aes)
        with self._handshake_clock():
            self._send_raw(side.hello())
            proof, session = side.finish(self._recv_raw(HELLO_BYTES), job.peer_name)
            self._send_raw(proof)
        return session

    def respond(self, grant: ReceiveGrant, *, aes: bool = False) -> Session:
        side = Responder(grant.keys, grant.local_name, os.urandom(32), aes=aes)
        with self._handshake_clock():
            hello = self._recv_raw(HELLO_BYTES)
            self._send_raw(side.answer(hello, grant.peer_name, require_encrypt=grant.require_encrypt))
            return side.finish(self._recv_raw(PROOF_BYTES))

    @contextmanager
    def _handshake_clock(self) -> Iterator[None]:
        deadline = self._deadline
        self._deadline = min(deadline, time.monotonic() + KV_HANDSHAKE_S)
        try:
            with link_errors():
                yield
        finally:
            self._deadline = deadline

    def _send_raw(self, data: bytes) -> None:
        self.sent_bytes += len(data)
        send_all(self._fd, data, b"", b"", self._silence_ms, self._deadline)

    def _recv_raw(self, size: int) -> bytes:
        data = bytearray(size)
        self.received_bytes += size
        recv_exact(self._fd, data, self._silence_ms, self._deadline)
        return bytes(data)

    # -- frames

    def send(self, frame: Sealed) -> None:
        self._cancel.check()
        self.sent_bytes += frame.wire_bytes
        with link_errors():
            send_all(self._fd, frame.header, frame.payload, frame.tag, self._silence_ms, self._deadline)

    def send_from(self, frame: Sealed, file: int, ranges: list[tuple[int, int]]) -> None:
        """Send a proven frame whose payload is these ranges of a file."""
        self._cancel.check()
        self.sent_bytes += frame.wire_bytes + sum(size for _, size in ranges)
        with link_errors():
            try:
                silence, deadline = self._silence_ms, self._deadline
                send_ranges(self._fd, frame.header, file, ranges, frame.tag, silence, deadline)
            except OSError as error:
                if error.errno == errno.ENODATA:
                    raise SaveFileError("bad_file", "the file became shorter while it was sent") from None
                raise

    def send_message(self, sealer: Sealer, type_: FrameType, payload: bytes = b"") -> None:
        self.send(sealer.seal(type_, payload))

    def recv_header(self) -> Header:
        """The next frame's header; its body is next on the socket. Raises `KvError`."""
        self._cancel.check()
        data = bytearray(HEADER_BYTES)
        with link_errors():
            self._until_it_arrived()
            recv_exact(self._fd, data, self._silence_ms, self._deadline)
        header = read_header(data, self._expect_seq)
        self._expect_seq += 1
        return header

    def _until_it_arrived(self) -> None:
        """Wait as long as the kernel still gets rid of what we sent: on a slow link that takes a while.

        The peer cannot answer before it has all of it, so its silence begins only then.
        """
        left = self._unacknowledged()
        while left and not self._poll.poll(self._silence_ms):
            before, left = left, self._unacknowledged()
            if before - left < KV_DRAIN_MIN_BYTES or time.monotonic() > self._deadline:
                return  # for the receive to say so

    def _unacknowledged(self) -> int:
        """Bytes of ours in the kernel that the peer's has not taken yet."""
        left = array.array("i", [0])
        with suppress(OSError):
            fcntl.ioctl(self._fd, termios.TIOCOUTQ, left)
        return left[0]

    def recv_body(self, header: Header, into: bytearray | memoryview) -> memoryview:
        """Payload and tag, into the front of `into`."""
        view = memoryview(into)[: header.wire_len + TAG_BYTES]
        self.received_bytes += HEADER_BYTES + len(view)
        with link_errors():
            recv_exact(self._fd, view, self._silence_ms, self._deadline)
        return view

    def recv_message(self, opener: Opener, *expect: FrameType) -> tuple[FrameType, bytes]:
        """One proven frame that is not DATA."""
        header = self.recv_header()
        if header.type not in expect:
            raise ChannelError("protocol", f"an unexpected {header.type.name} frame")
        body = self.recv_body(header, bytearray(header.wire_len + TAG_BYTES))
        payload, _ = opener.open(header, body)
        return header.type, bytes(payload)

    def readable(self) -> bool:
        """The peer has something to say, or is gone."""
        return bool(self._poll.poll(0))

    def linger(self, limit_s: float) -> None:
        """Let the peer read our last words: closing with its data unread would destroy them."""
        until = time.monotonic() + limit_s
        waste = bytearray(1 << 16)
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0 and not self._cancel.is_set:
                if not self._poll.poll(left * 1000) or not self._sock.recv_into(
                    waste, 0, socket.MSG_DONTWAIT
                ):
                    return
        except OSError:
            return  # the peer is gone; nothing to wait for
