"""The compiled movers and their plain twins answer alike."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from viiwork.native import mover


class Twin:
    """The same contract in plain Python."""

    @staticmethod
    def _wait(fd: int, event: int, silence_ms: int, deadline: float) -> None:
        left = silence_ms / 1000
        if deadline >= 0:
            left = min(left, deadline - time.monotonic())
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0, left * 1000)):
            raise TimeoutError(errno.ETIMEDOUT, "no progress in time")

    @classmethod
    def send_all(cls, fd: int, head: Any, payload: Any, tail: Any, silence_ms: int, deadline: float) -> None:
        data = memoryview(bytes(head) + bytes(payload) + bytes(tail))
        sock = socket.socket(fileno=os.dup(fd))
        with sock:
            while data:
                try:
                    data = data[sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    cls._wait(fd, select.POLLOUT, silence_ms, deadline)
                    continue
                if data and 0 <= deadline <= time.monotonic():
                    raise TimeoutError(errno.ETIMEDOUT, "too late")

    @classmethod
    def send_ranges(
        cls, fd: int, head: Any, file: int, ranges: Any, tail: Any, silence_ms: int, deadline: float
    ) -> None:
        payload = bytearray(sum(size for _, size in ranges))
        at = 0
        for offset, size in ranges:
            cls.pread_exact(file, memoryview(payload)[at : at + size], offset)
            at += size
        cls.send_all(fd, head, payload, tail, silence_ms, deadline)

    @classmethod
    def recv_exact(cls, fd: int, into: Any, silence_ms: int, deadline: float) -> None:
        left = memoryview(into)
        sock = socket.socket(fileno=os.dup(fd))
        with sock:
            while left:
                try:
                    n = sock.recv_into(left, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    cls._wait(fd, select.POLLIN, silence_ms, deadline)
                    continue
                if n == 0:
                    raise ConnectionResetError(errno.ECONNRESET, "closed early")
                left = left[n:]
                if left and 0 <= deadline <= time.monotonic():
                    raise TimeoutError(errno.ETIMEDOUT, "too late")

    @staticmethod
    def pread_exact(fd: int, into: Any, offset: int) -> None:
        data = os.pread(fd, len(into), offset)
        if len(data) < len(into):
            raise OSError(errno.ENODATA, "ends early")
        memoryview(into)[:] = data

    @staticmethod
    def pwrite_all(fd: int, data: Any, offset: int) -> None:
        os.pwrite(fd, data, offset)


@pytest.fixture(params=["compiled", "plain"])
def impl(request: pytest.FixtureRequest) -> Any:
    if request.param == "plain":
        return Twin
    return SimpleNamespace(**{name: getattr(mover, name) for name in dir(mover) if not name.startswith("_")})


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def in_thread(work: Callable[[], object]) -> Callable[[], object]:
    """Start `work`; calling the answer waits for it and gives its result or raises its error."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((True, work()))
        except BaseException as error:  # noqa: BLE001
            result.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> object:
        thread.join(20)
        fine, value = result[0]
        if not fine:
            raise value
        return value

    return join


@pytest.mark.parametrize("sizes", [(0, 0, 0), (48, 0, 16), (48, 1, 0), (0, 3_000_001, 16), (48, 1 << 20, 16)])
def test_pieces_arrive_as_one_run_of_bytes(impl: Any, pair: Any, sizes: tuple[int, int, int]) -> None:
    near, far = pair
    head, payload, tail = (os.urandom(size) for size in sizes)
    got = bytearray(sum(sizes))
    receive = in_thread(lambda: impl.recv_exact(far.fileno(), got, 5000, -1.0))
    impl.send_all(near.fileno(), head, payload, tail, 5000, -1.0)
    receive()
    assert got == head + payload + tail


K = 1024
LONG = 256 * K  # from here on a range is sent straight from the page cache


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 0)],
        [(3, 5)],
        [(0, LONG)],
        [(7, LONG + 1), (0, 10), (10, 10), (2 * LONG, LONG)],
        [(5, LONG // 2), (5 + LONG // 2, LONG), (1, 1)],
        [(3 * i, LONG - 1) for i in range(6)],
        [(LONG, 5 * LONG), (0, 1)],
    ],
    ids=str,
)
def test_ranges_of_a_file_arrive_between_head_and_tail(
    impl: Any, pair: Any, tmp_path: Path, ranges: list[tuple[int, int]]
) -> None:
    near, far = pair
    data = os.urandom(7 * LONG)
    (tmp_path / "file").write_bytes(data)
    wanted = b"head" + b"".join(data[offset : offset + size] for offset, size in ranges) + b"tail"
    got = bytearray(len(wanted))
    receive = in_thread(lambda: impl.recv_exact(far.fileno(), got, 5000, -1.0))
    with (tmp_path / "file").open("rb") as file:
        impl.send_ranges(near.fileno(), b"head", file.fileno(), ranges, b"tail", 5000, -1.0)
    receive()
    assert got == wanted


@pytest.mark.parametrize("size", [10, 2 * LONG])
def test_a_file_that_ends_within_a_range_is_no_data(impl: Any, pair: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size - 1))
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError) as caught:
        drain = in_thread(lambda: list(iter(lambda: pair[1].recv(LONG), b"")))
        try:
            impl.send_ranges(pair[0].fileno(), b"h", file.fileno(), [(0, size)], b"t", 5000, -1.0)
        finally:
            pair[0].close()
            drain()
    assert caught.value.errno == errno.ENODATA


@pytest.mark.parametrize("blocking", [True, False])
def test_sending_a_file_to_a_peer_that_does_not_read_times_out(
    impl: Any, pair: Any, tmp_path: Path, blocking: bool
) -> None:
    (tmp_path / "file").write_bytes(bytes(64 * LONG))
    pair[0].setblocking(blocking)
    with (tmp_path / "file").open("rb") as file, pytest.raises(TimeoutError):
        impl.send_ranges(pair[0].fileno(), b"", file.fileno(), [(0, 64 * LONG)], b"", 30, -1.0)


def test_a_link_that_trickles_is_read_as_it_trickles(pair: Any) -> None:
    near, far = pair
    got = bytearray(20)
    receive = in_thread(lambda: mover.recv_exact(far.fileno(), got, 10_000, -1.0))
    for byte in range(20):
        near.send(bytes([byte]))
        time.sleep(0.003)
    receive()
    assert got == bytes(range(20))


def test_a_long_receive_leaves_the_socket_to_wake_at_the_next_byte() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        size = 8 * LONG
        receive = in_thread(lambda: mover.recv_exact(far.fileno(), bytearray(size), 5000, -1.0))
        for start in range(0, size, LONG):
            near.sendall(bytes(LONG))
            time.sleep(0.002 * (start == 0))
        receive()
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_receiving_from_a_silent_peer_times_out(impl: Any, pair: Any) -> None:
    with pytest.raises(TimeoutError) as caught:
        impl.recv_exact(pair[1].fileno(), bytearray(10), 30, -1.0)
    assert caught.value.errno == errno.ETIMEDOUT


def test_sending_to_a_peer_that_does_not_read_times_out(impl: Any, pair: Any) -> None:
    with pytest.raises(TimeoutError):
        impl.send_all(pair[0].fileno(), b"", bytes(64 << 20), b"", 30, -1.0)


def test_a_deadline_ends_a_transfer_that_never_falls_silent(impl: Any, pair: Any) -> None:
    near, far = pair
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.005):
            near.send(b"x")

    sender = in_thread(trickle)
    try:
        with pytest.raises(TimeoutError):
            impl.recv_exact(far.fileno(), bytearray(1 << 20), 5000, time.monotonic() + 0.1)
    finally:
        stop.set()
        sender()


def test_a_peer_that_closes_early_is_a_reset(impl: Any, pair: Any) -> None:
    near, far = pair
    near.send(b"abc")
    near.close()
    with pytest.raises(ConnectionResetError):
        impl.recv_exact(far.fileno(), bytearray(4), 1000, -1.0)


def test_sending_to_a_closed_peer_is_an_error_and_not_a_signal(impl: Any, pair: Any) -> None:
    near, far = pair
    far.close()
    previous = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with pytest.raises(BrokenPipeError):
            impl.send_all(near.fileno(), b"x", b"", b"", 1000, -1.0)
    finally:
        signal.signal(signal.SIGPIPE, previous)


def test_files_are_read_and_written_at_offsets(impl: Any, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        data = os.urandom(300_001)
        impl.pwrite_all(fd, data, 5)
        impl.pwrite_all(fd, b"", 0)
        got = bytearray(len(data))
        impl.pread_exact(fd, got, 5)
        assert got == data
        with pytest.raises(OSError) as caught:
            impl.pread_exact(fd, bytearray(10), len(data))
        assert caught.value.errno == errno.ENODATA
    finally:
        os.close(fd)


def test_errors_of_the_system_carry_their_number(impl: Any, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError) as caught:
            impl.pwrite_all(fd, b"x", 0)
        assert caught.value.errno == errno.EBADF
        with pytest.raises(OSError) as caught:
            impl.recv_exact(fd, bytearray(1), 100, -1.0)
        assert caught.value.errno == errno.ENOTSOCK
    finally:
        os.close(fd)


def test_signals_do_not_disturb_a_move(pair: Any) -> None:
    near, far = pair
    hits: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    got = bytearray(8 << 20)
    data = os.urandom(len(got))

    def slowly() -> None:
        for start in range(0, len(data), 1 << 18):
            mover.send_all(near.fileno(), b"", data[start : start + (1 << 18)], b"", 5000, -1.0)
            time.sleep(0.001)

    send = in_thread(slowly)
    try:
        mover.recv_exact(far.fileno(), got, 5000, -1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        send()
    assert got == data and hits


def test_other_threads_run_while_a_move_waits(pair: Any) -> None:
    waiting = in_thread(lambda: mover.recv_exact(pair[1].fileno(), bytearray(1), 10_000, -1.0))
    # With the GIL held this line would not run before the wait is over, and nobody would end it.
    pair[0].send(b"x")
    waiting()


@pytest.mark.parametrize("bad", [None, 3, "text"])
def test_only_buffers_are_taken(bad: Any, pair: Any) -> None:
    with pytest.raises(TypeError):
        mover.send_all(pair[0].fileno(), b"", bad, b"", 10, -1.0)


def test_a_read_only_buffer_is_never_written(pair: Any, tmp_path: Path) -> None:
    with pytest.raises((BufferError, ValueError)):
        mover.recv_exact(pair[1].fileno(), b"frozen", 10, -1.0)
