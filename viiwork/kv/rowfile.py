"""The rows of one cache on disk: group after group, and in a group segment after segment.

Row `pos` of a segment lies at a place that depends on its position alone, so what was written stays where
it is when a session grows. A full group is one run of bytes, in the order in which it travels.
"""

from __future__ import annotations

import os

from blake3 import blake3

from viiwork.kv.link import file_errors
from viiwork.native.mover import pread_exact, pwrite_all
from viiwork.native.rows import gather, scatter
from viiwork.wire.groups import DIGEST_BYTES, cache_bytes, groups_of, rows_of_group
from viiwork.wire.state import CacheShape


class RowFile:
    """Borrows `fd`. Reads and writes are of rows of one group."""

    def __init__(self, fd: int, cache: CacheShape) -> None:
        self.fd = fd
        self.group = rows_of_group(cache)
        self.row_bytes = cache_bytes(cache)
        self.widths = [plane.row_bytes for plane in (*cache.k, *cache.v)]
        self._places: list[tuple[int, int]] = []  # of each segment in a group: offset, row bytes
        at = 0
        for width in self.widths:
            self._places.append((at, width))
            at += self.group * width

    def write(self, pos: int, rows: int, data: memoryview) -> None:
        """Rows [pos, pos + rows) of every segment, segment after segment."""
        with file_errors():
            if rows == self.group:
                pwrite_all(self.fd, data, pos * self.row_bytes)
            else:
                scatter(self.fd, data, self.ranges(pos, rows))

    def read(self, pos: int, rows: int, into: memoryview) -> None:
        with file_errors():
            if rows == self.group:
                pread_exact(self.fd, into, pos * self.row_bytes)
            else:
                gather(self.fd, self.ranges(pos, rows), into)

    def ranges(self, pos: int, rows: int) -> list[tuple[int, int]]:
        """Where these rows of each segment lie."""
        base, within = pos // self.group * self.group * self.row_bytes, pos % self.group
        return [(base + at + within * width, rows * width) for at, width in self._places]

    def digest(self, lo: int, hi: int, buffer: memoryview) -> bytes:
        """Digest of rows [lo, hi) of one group, as they are on disk."""
        view = buffer[: (hi - lo) * self.row_bytes]
        self.read(lo, hi - lo, view)
        return blake3(view).digest(length=DIGEST_BYTES)

    def cut(self, n: int) -> None:
        """Give back what lies behind the group of the last of n rows."""
        end = groups_of(n, self.group) * self.group * self.row_bytes
        with file_errors():
            if os.fstat(self.fd).st_size > end:
                os.ftruncate(self.fd, end)
