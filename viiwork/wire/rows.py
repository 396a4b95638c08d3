"""Which bytes of a save-file are the rows of given positions: the plan of an extraction."""

from __future__ import annotations

from dataclasses import dataclass

from viiwork.wire.state import CacheRows, SaveInfo, Segment


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
    rows = info.caches[segment.cache]
    planes = len(info.shape.caches[segment.cache].k)
    data = rows.data[segment.layer if segment.part == "k" else planes + segment.layer]
    spans: list[RowSpan | StripSpan] = []
    for run in rows.runs:
        first, end = max(lo, run.pos), min(hi, run.pos + run.n)
        if first >= end:
            continue
        n, cell = end - first, run.cell + first - run.pos
        if segment.part == "v" and rows.v_trans:
            size = segment.elem_bytes
            spans.append(StripSpan(first, n, data + cell * size, rows.cells * size, segment.n_channels, size))
        else:
            size = segment.row_bytes
            spans.append(RowSpan(first, n, data + cell * size, n * size))
    return spans


def take_from(rows: CacheRows, keep: int, held_lo: int) -> tuple[int, int]:
    """Where extraction of one cache starts for a replica that keeps [held_lo, keep), and its `lo` afterwards.

    A base cache starts at `keep`. A window that moved on past what is kept, or reaches back before it,
    is taken whole: the rows of a replica have no gap.
    """
    if held_lo <= rows.lo <= keep:
        return keep, held_lo
    return rows.lo, rows.lo
