from collections.abc import Sequence

from typing_extensions import Buffer

def send_all(fd: int, head: Buffer, payload: Buffer, tail: Buffer, silence_ms: int, deadline: float) -> None:
    """Send the three as one run of bytes.

    Waits at most `silence_ms` for the peer to take more, and never past `deadline` (time.monotonic
    seconds; negative = none): TimeoutError.
    """

def send_ranges(
    fd: int,
    head: Buffer,
    file_fd: int,
    ranges: Sequence[tuple[int, int]],
    tail: Buffer,
    silence_ms: int,
    deadline: float,
) -> None:
    """Send `head`, the (offset, size) ranges of a file and `tail` as one run of bytes.

    Long ranges go from the page cache to the socket without passing through this process; short ones are
    gathered. The socket is made non-blocking. OSError ENODATA where the file ends early: the frame is then
    broken and the connection of no more use.
    """

def recv_exact(fd: int, into: Buffer, silence_ms: int, deadline: float) -> None:
    """Fill `into` from the socket; a peer that closes early is ConnectionResetError."""

def pread_exact(fd: int, into: Buffer, offset: int) -> None:
    """Fill `into` from the file at `offset`; a file that ends early is OSError ENODATA."""

def pwrite_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data` to the file at `offset`."""
