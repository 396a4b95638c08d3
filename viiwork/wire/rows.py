"""Which bytes of a save-file are the rows of given positions: the plan of an extraction."""

from __future__ import annotations

from dataclasses import dataclass

from viiwork.wire.state import SaveInfo, Segment


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [pos, pos + n), one after the other at `offset`."""

    pos: int
    n: int
    offset: int
    size: int  # n * row_bytes


@dataclass(frozen=True, slots=True)
class StripSpan:
    """The same rows channel by channel, to be transposed.

    Channel c of rows [pos, pos + n) is `n * elem_bytes` bytes at `offset + c * stride`.
    """

    pos: int
    n: int
    offset: int
    stride: int
    n_channels: int
    elem_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the rows, which are those of all strips together."""
        return self.n * self.n_channels * self.elem_bytes


def spans_of(info: SaveInfo, segment: Segment, lo: int, hi: int) -> list[RowSpan | StripSpan]:
    """Where the file has rows [lo, hi) of the segment, by position; only what it holds of them.

    Together with the same call for [k, lo) this is what one call for [k, hi) names.
    """
    raise NotImplementedError
