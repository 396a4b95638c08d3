"""Rows between save-files, buffers and replicas: gathered, scattered, transposed, split into byte planes.

Every buffer is borrowed for the call only, and the GIL is let go of while bytes move. Sizes that do not
fit together are ValueError before a byte moves; failures of the system are OSError with errno set.
"""

from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.stdlib cimport free

from viiwork.native.ranges cimport ranges_of, vw_range

import os

cdef extern from "vw_rows.h" nogil:
    int vw_gather(int fd, const vw_range *ranges, size_t n, uint8_t *into, size_t *done)
    int vw_scatter(int fd, const uint8_t *from_, const vw_range *ranges, size_t n, size_t *done)
    int vw_gather_strips(int fd, int64_t offset, int64_t stride, size_t strip, size_t n, uint8_t *into,
                         size_t *done)
    int vw_scatter_strips(int fd, const uint8_t *from_, int64_t offset, int64_t stride, size_t strip, size_t n,
                          size_t *done)
    int vw_span(size_t rows, size_t row_bytes, size_t stride, size_t *span)
    void vw_transpose_1(const uint8_t *src, size_t src_stride, size_t rows, size_t columns, uint8_t *dst,
                        size_t dst_stride)
    void vw_transpose_2(const uint8_t *src, size_t src_stride, size_t rows, size_t columns, uint8_t *dst,
                        size_t dst_stride)
    void vw_transpose_4(const uint8_t *src, size_t src_stride, size_t rows, size_t columns, uint8_t *dst,
                        size_t dst_stride)
    void vw_split_2(const uint8_t *src, uint8_t *dst, size_t n)
    void vw_split_4(const uint8_t *src, uint8_t *dst, size_t n)
    void vw_merge_2(const uint8_t *src, uint8_t *dst, size_t n)
    void vw_merge_4(const uint8_t *src, uint8_t *dst, size_t n)

cdef int64_t FILE_MAX = 0x7FFFFFFFFFFFFFFF


cdef int failed(int code, str what, size_t done, size_t size) except -1:
    raise OSError(-code, f"{what}: {os.strerror(-code)}, {done} of {size} bytes done")


cdef int fits(str what, size_t needed, size_t there) except -1:
    if needed > there:
        raise ValueError(f"{what} holds {there} bytes, {needed} are needed")
    return 0


cdef int distinct(const uint8_t[::1] src, const uint8_t[::1] dst) except -1:
    """Raises ValueError when the two share a byte: what is read would be overwritten meanwhile."""
    if src.shape[0] == 0 or dst.shape[0] == 0:
        return 0
    cdef uintptr_t one = <uintptr_t>&src[0]
    cdef uintptr_t other = <uintptr_t>&dst[0]
    if one < other + <size_t>dst.shape[0] and other < one + <size_t>src.shape[0]:
        raise ValueError("source and target overlap")
    return 0


def gather(int fd, ranges not None, uint8_t[::1] into not None) -> int:
    """Read the (offset, size) ranges of a file one after the other into `into`; how many bytes that were.

    Ranges that follow each other in the file are one read. OSError ENODATA where the file ends early.
    """
    cdef size_t n = 0, total = 0, done = 0
    cdef int code
    cdef uint8_t *base = &into[0] if into.shape[0] else NULL
    cdef vw_range *parts = ranges_of(ranges, &n, &total)
    if total > <size_t>into.shape[0]:
        free(parts)
        fits("the buffer", total, <size_t>into.shape[0])
    with nogil:
        code = vw_gather(fd, parts, n, base, &done)
        free(parts)
    if code:
        failed(code, "read", done, total)
    return done


def scatter(int fd, const uint8_t[::1] data not None, ranges not None) -> int:
    """Write `data` from its front to the (offset, size) ranges of a file; how many bytes that were."""
    cdef size_t n = 0, total = 0, done = 0
    cdef int code
    cdef const uint8_t *base = &data[0] if data.shape[0] else NULL
    cdef vw_range *parts = ranges_of(ranges, &n, &total)
    if total > <size_t>data.shape[0]:
        free(parts)
        fits("the buffer", total, <size_t>data.shape[0])
    with nogil:
        code = vw_scatter(fd, base, parts, n, &done)
        free(parts)
    if code:
        failed(code, "write", done, total)
    return done


cdef int check_strips(int64_t offset, int64_t stride, size_t strip, size_t n, size_t there) except -1:
    """Raises ValueError unless n strips fit the buffer and end within what a file can hold."""
    cdef size_t span = 0
    if offset < 0 or stride < 0 or strip > <size_t>FILE_MAX or (n > 1 and <size_t>stride < strip):
        raise ValueError(f"strips of {strip} bytes every {stride} bytes from {offset} on are not possible")
    if strip and n > <size_t>FILE_MAX // strip:
        raise ValueError(f"{n} strips of {strip} bytes are more than a buffer can hold")
    fits("the buffer", strip * n, there)
    if vw_span(n, strip, <size_t>stride, &span) or span > <size_t>(FILE_MAX - offset):
        raise ValueError("the last strip would end beyond what a file can hold")
    return 0


def gather_strips(int fd, int64_t offset, int64_t stride, size_t strip_bytes, size_t n_strips,
                  uint8_t[::1] into not None) -> None:
    """Read `n_strips` strips, `stride` bytes from start to start in the file, densely into `into`."""
    cdef size_t done = 0
    cdef int code
    cdef uint8_t *base = &into[0] if into.shape[0] else NULL
    check_strips(offset, stride, strip_bytes, n_strips, <size_t>into.shape[0])
    with nogil:
        code = vw_gather_strips(fd, offset, stride, strip_bytes, n_strips, base, &done)
    if code:
        failed(code, "read", done, strip_bytes * n_strips)


def scatter_strips(int fd, const uint8_t[::1] data not None, int64_t offset, int64_t stride,
                   size_t strip_bytes, size_t n_strips) -> None:
    """Inverse of `gather_strips`: `data` holds the strips densely."""
    cdef size_t done = 0
    cdef int code
    cdef const uint8_t *base = &data[0] if data.shape[0] else NULL
    check_strips(offset, stride, strip_bytes, n_strips, <size_t>data.shape[0])
    with nogil:
        code = vw_scatter_strips(fd, base, offset, stride, strip_bytes, n_strips, &done)
    if code:
        failed(code, "write", done, strip_bytes * n_strips)


cdef size_t matrix(str what, size_t rows, size_t columns, size_t elem, size_t stride, size_t there) except? 0:
    """The stride in bytes of a matrix that lies within `there` bytes; ValueError when it does not."""
    cdef size_t span = 0
    if columns > <size_t>FILE_MAX // elem:
        raise ValueError(f"{columns} columns are more than a buffer can hold")
    if stride == 0:
        stride = columns * elem
    if stride < columns * elem:
        raise ValueError(f"rows of {columns * elem} bytes every {stride} bytes would overlap")
    if vw_span(rows, columns * elem, stride, &span):
        raise ValueError("the matrix is more than a buffer can hold")
    fits(what, span, there)
    return stride


def transpose(const uint8_t[::1] src not None, size_t n_rows, size_t n_columns, size_t elem_bytes,
              uint8_t[::1] dst not None, size_t src_stride=0, size_t dst_stride=0) -> None:
    """Row r, column c of `src` becomes row c, column r of `dst`; elements of 1, 2 or 4 bytes.

    The strides are bytes from row to row, 0 = dense. `src` and `dst` share no byte.
    """
    if elem_bytes not in (1, 2, 4):
        raise ValueError(f"elements of {elem_bytes} bytes are not transposed")
    src_stride = matrix("the source", n_rows, n_columns, elem_bytes, src_stride, <size_t>src.shape[0])
    dst_stride = matrix("the target", n_columns, n_rows, elem_bytes, dst_stride, <size_t>dst.shape[0])
    distinct(src, dst)
    if n_rows == 0 or n_columns == 0:
        return
    cdef const uint8_t *source = &src[0]
    cdef uint8_t *target = &dst[0]
    with nogil:
        if elem_bytes == 1:
            vw_transpose_1(source, src_stride, n_rows, n_columns, target, dst_stride)
        elif elem_bytes == 2:
            vw_transpose_2(source, src_stride, n_rows, n_columns, target, dst_stride)
        else:
            vw_transpose_4(source, src_stride, n_rows, n_columns, target, dst_stride)


cdef int check_planes(size_t src, size_t dst, size_t width) except -1:
    """Raises ValueError unless both are of one size, a multiple of a width that is known."""
    if width != 2 and width != 4:
        raise ValueError(f"elements of {width} bytes have no planes here")
    if src != dst or src % width:
        raise ValueError(f"{src} bytes to {dst} bytes are not whole elements of {width} bytes")
    return 0


def split_planes(const uint8_t[::1] src not None, uint8_t[::1] dst not None, size_t width) -> None:
    """Byte 0 of every `width`-byte element, then byte 1 of every element ...; `width` is 2 or 4.

    Both are of one size, a multiple of `width`, and share no byte.
    """
    check_planes(<size_t>src.shape[0], <size_t>dst.shape[0], width)
    distinct(src, dst)
    if src.shape[0] == 0:
        return
    cdef const uint8_t *source = &src[0]
    cdef uint8_t *target = &dst[0]
    cdef size_t n = <size_t>src.shape[0] // width
    with nogil:
        if width == 2:
            vw_split_2(source, target, n)
        else:
            vw_split_4(source, target, n)


def merge_planes(const uint8_t[::1] src not None, uint8_t[::1] dst not None, size_t width) -> None:
    """Inverse of `split_planes`."""
    check_planes(<size_t>src.shape[0], <size_t>dst.shape[0], width)
    distinct(src, dst)
    if src.shape[0] == 0:
        return
    cdef const uint8_t *source = &src[0]
    cdef uint8_t *target = &dst[0]
    cdef size_t n = <size_t>src.shape[0] // width
    with nogil:
        if width == 2:
            vw_merge_2(source, target, n)
        else:
            vw_merge_4(source, target, n)
