"""One plain TCP stream, as fast as the kernel carries it: what a transfer is compared with.

The sender hands the kernel pages of a file (sendfile), the receiver reads into one buffer and forgets. Time
runs from the first byte until the receiver's acknowledgement of the last one is back. Both functions block;
while bytes move, they hold no lock of the interpreter.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from viiwork.errors import BenchError
from viiwork.limits import BENCH_RAW_BUFFER_BYTES, BENCH_SILENCE_S
from viiwork.native.mover import recv_exact, send_ranges

_SILENCE_MS = int(BENCH_SILENCE_S * 1000)
_NO_DEADLINE = -1.0
_DONE = b"!"


def send_raw(sock: socket.socket, path: Path, n_bytes: int) -> float:
    """Send the file's bytes, from its front again and again, until it is `n_bytes`; seconds it took.

    Raises `BenchError`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        begun = time.monotonic()
        left = n_bytes
        while left:
            piece = min(left, size)
            send_ranges(sock.fileno(), b"", fd, [(0, piece)], b"", _SILENCE_MS, _NO_DEADLINE)
            left -= piece
        recv_exact(sock.fileno(), bytearray(1), _SILENCE_MS, _NO_DEADLINE)
        return time.monotonic() - begun
    except OSError as error:
        raise BenchError(f"the link died in the middle of a raw stream: {error.strerror or error}") from None
    finally:
        os.close(fd)


def receive_raw(sock: socket.socket, n_bytes: int) -> None:
    """Take `n_bytes` and acknowledge them. Raises OSError."""
    buffer = memoryview(bytearray(BENCH_RAW_BUFFER_BYTES))
    left = n_bytes
    while left:
        piece = buffer[: min(left, len(buffer))]
        recv_exact(sock.fileno(), piece, _SILENCE_MS, _NO_DEADLINE)
        left -= len(piece)
    sock.sendall(_DONE)
