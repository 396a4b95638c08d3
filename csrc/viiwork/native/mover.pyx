"""Moves whole buffers between memory, sockets and files without the GIL.

Every buffer is borrowed for the call only. Failures are OSError (TimeoutError for a silence or a
passed deadline) with errno set. Sockets may be blocking or not: waiting is done by poll.
"""

from libc.errno cimport ETIMEDOUT
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc

from viiwork.native.ranges cimport ranges_of, vw_range

import os

cdef extern from "vw_io.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

    int vw_send_all(int fd, const iovec *pieces, size_t n_pieces, int silence_ms, int64_t deadline_ms,
                    size_t *done)
    size_t VW_SENDFILE_BYTES
    int vw_send_ranges(int fd, iovec head, int file_fd, const vw_range *ranges, size_t n_ranges, iovec tail,
                       uint8_t *scratch, int silence_ms, int64_t deadline_ms, size_t *done)
    int vw_recv_exact(int fd, uint8_t *into, size_t size, int silence_ms, int64_t deadline_ms, size_t *done)
    int vw_pread_exact(int fd, uint8_t *into, size_t size, int64_t offset, size_t *done)
    int vw_pwrite_all(int fd, const uint8_t *data, size_t size, int64_t offset, size_t *done)


cdef int failed(int code, str what, size_t done, Py_ssize_t size) except -1:
    if code == -ETIMEDOUT:
        raise TimeoutError(ETIMEDOUT, f"{what}: no progress in time, {done} of {size} bytes done")
    raise OSError(-code, f"{what}: {os.strerror(-code)}, {done} of {size} bytes done")


cdef int64_t to_ms(double deadline) noexcept nogil:
    return -1 if deadline < 0 else <int64_t>(deadline * 1000.0)


def send_all(int fd, const uint8_t[::1] head not None, const uint8_t[::1] payload not None,
             const uint8_t[::1] tail not None, int silence_ms, double deadline) -> None:
    """Send head, payload and tail as one run of bytes.

    Waits at most `silence_ms` for the peer to take more, and never past `deadline` (time.monotonic
    seconds; negative = none).
    """
    cdef iovec pieces[3]
    cdef size_t done = 0
    cdef int code
    cdef int64_t deadline_ms = to_ms(deadline)
    pieces[0].iov_base = <void *>&head[0] if head.shape[0] else NULL
    pieces[0].iov_len = <size_t>head.shape[0]
    pieces[1].iov_base = <void *>&payload[0] if payload.shape[0] else NULL
    pieces[1].iov_len = <size_t>payload.shape[0]
    pieces[2].iov_base = <void *>&tail[0] if tail.shape[0] else NULL
    pieces[2].iov_len = <size_t>tail.shape[0]
    with nogil:
        code = vw_send_all(fd, pieces, 3, silence_ms, deadline_ms, &done)
    if code:
        failed(code, "send", done, head.shape[0] + payload.shape[0] + tail.shape[0])


def send_ranges(int fd, const uint8_t[::1] head not None, int file_fd, ranges not None,
                const uint8_t[::1] tail not None, int silence_ms, double deadline) -> None:
    """Send head, the (offset, size) ranges of a file and tail as one run of bytes; time limits as in `send_all`.

    Ranges of 32 KiB and more go from the page cache by sendfile, shorter ones are gathered. The socket is
    made non-blocking, as sendfile has no flag for that. A file that ends early is OSError ENODATA.
    """
    cdef iovec first, last
    cdef size_t n_ranges = 0, total = 0, done = 0
    cdef int code
    cdef int64_t deadline_ms = to_ms(deadline)
    first.iov_base = <void *>&head[0] if head.shape[0] else NULL
    first.iov_len = <size_t>head.shape[0]
    last.iov_base = <void *>&tail[0] if tail.shape[0] else NULL
    last.iov_len = <size_t>tail.shape[0]
    cdef vw_range *parts = ranges_of(ranges, &n_ranges, &total)
    cdef uint8_t *scratch = <uint8_t *>malloc(VW_SENDFILE_BYTES)
    if scratch == NULL:
        free(parts)
        raise MemoryError("no memory to gather ranges in")
    with nogil:
        code = vw_send_ranges(fd, first, file_fd, parts, n_ranges, last, scratch, silence_ms, deadline_ms, &done)
        free(scratch)
        free(parts)
    if code:
        failed(code, "send", done, head.shape[0] + <Py_ssize_t>total + tail.shape[0])


def recv_exact(int fd, uint8_t[::1] into not None, int silence_ms, double deadline) -> None:
    """Fill `into` from the socket; a peer that closes early is ConnectionResetError.

    Time limits as in `send_all`. What `into` holds after an error is not defined.
    """
    cdef size_t done = 0
    cdef int code
    cdef int64_t deadline_ms = to_ms(deadline)
    cdef uint8_t *base = &into[0] if into.shape[0] else NULL
    with nogil:
        code = vw_recv_exact(fd, base, <size_t>into.shape[0], silence_ms, deadline_ms, &done)
    if code:
        failed(code, "receive", done, into.shape[0])


def pread_exact(int fd, uint8_t[::1] into not None, int64_t offset) -> None:
    """Fill `into` from the file at `offset`; a file that ends early is OSError ENODATA."""
    cdef size_t done = 0
    cdef int code
    cdef uint8_t *base = &into[0] if into.shape[0] else NULL
    with nogil:
        code = vw_pread_exact(fd, base, <size_t>into.shape[0], offset, &done)
    if code:
        failed(code, "read", done, into.shape[0])


def pwrite_all(int fd, const uint8_t[::1] data not None, int64_t offset) -> None:
    """Write all of `data` to the file at `offset`."""
    cdef size_t done = 0
    cdef int code
    cdef const uint8_t *base = &data[0] if data.shape[0] else NULL
    with nogil:
        code = vw_pwrite_all(fd, base, <size_t>data.shape[0], offset, &done)
    if code:
        failed(code, "write", done, data.shape[0])
