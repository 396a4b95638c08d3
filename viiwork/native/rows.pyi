from collections.abc import Sequence

from typing_extensions import Buffer

def gather(fd: int, ranges: Sequence[tuple[int, int]], into: Buffer) -> int:
    """Read the (offset, size) ranges of a file one after the other into `into`; how many bytes that were.

    Ranges that follow each other in the file are one read. OSError ENODATA where the file ends early.
    """

def scatter(fd: int, data: Buffer, ranges: Sequence[tuple[int, int]]) -> int:
    """Write `data` from its front to the (offset, size) ranges of a file; how many bytes that were."""

def gather_strips(fd: int, offset: int, stride: int, strip_bytes: int, n_strips: int, into: Buffer) -> None:
    """Read `n_strips` strips, `stride` bytes from start to start in the file, densely into `into`."""

def scatter_strips(fd: int, data: Buffer, offset: int, stride: int, strip_bytes: int, n_strips: int) -> None:
    """Inverse of `gather_strips`: `data` holds the strips densely."""

def transpose(
    src: Buffer,
    n_rows: int,
    n_columns: int,
    elem_bytes: int,
    dst: Buffer,
    src_stride: int = 0,
    dst_stride: int = 0,
) -> None:
    """Row r, column c of `src` becomes row c, column r of `dst`; elements of 1, 2 or 4 bytes.

    The strides are bytes from row to row, 0 = dense. `src` and `dst` must not overlap. Channel strips of a
    transposed V: `n_rows` = channels, `n_columns` = cells; the way back is the same call, those swapped.
    """

def split_planes(src: Buffer, dst: Buffer, width: int) -> None:
    """Byte 0 of every `width`-byte element, then byte 1 of every element ...; `width` is 2 or 4.

    Both are of one size, a multiple of `width`, and must not overlap.
    """

def merge_planes(src: Buffer, dst: Buffer, width: int) -> None:
    """Inverse of `split_planes`."""
