"""A replica store in memory: a dict of rows. Slow and plain, the oracle for extraction and rendering."""

from __future__ import annotations

from dataclasses import dataclass, field

from viiwork.wire.checkpoint import check_checkpoint
from viiwork.wire.plan import BlobBytes, BlobTurned, Bytes, Part, StoreRows, StoreStrips
from viiwork.wire.rendering import Stored, StoredRows, render_plan
from viiwork.wire.rows import RowSpan, spans_of, take_from
from viiwork.wire.savefile import check_recurrent, parse
from viiwork.wire.state import Checkpoint, Layout, SaveInfo, StateShape, segments_of


def turned(data: bytes, rows: int, columns: int, elem: int) -> bytes:
    """The transposed of a rows x columns matrix."""
    return b"".join(
        data[(row * columns + column) * elem :][:elem] for column in range(columns) for row in range(rows)
    )


def reader(data: bytes):
    return lambda offset, size: data[offset : offset + size]


def info_of(data: bytes) -> SaveInfo:
    return parse(reader(data), len(data))


def rows_of(data: bytes, info: SaveInfo, index: int, lo: int, hi: int) -> dict[tuple[int, int], bytes]:
    """(segment, pos) -> row, of what the file holds of [lo, hi) of one segment."""
    found: dict[tuple[int, int], bytes] = {}
    segment = segments_of(info.shape)[index]
    for span in spans_of(info, segment, lo, hi):
        if isinstance(span, RowSpan):
            plain = data[span.offset : span.offset + span.size]
        else:
            strip = span.n * span.elem_bytes
            starts = (span.offset + channel * span.stride for channel in range(span.n_channels))
            strips = b"".join(data[start : start + strip] for start in starts)
            plain = turned(strips, span.n_channels, span.n, span.elem_bytes)
        assert len(plain) == span.size == span.n * segment.row_bytes
        for i in range(span.n):
            assert (index, span.pos + i) not in found
            found[index, span.pos + i] = plain[i * segment.row_bytes :][: segment.row_bytes]
    return found


@dataclass
class Store:
    """One session's replica, grown from save-files."""

    shape: StateShape
    tokens: bytes = b""
    rows: dict[tuple[int, int], bytes] = field(default_factory=dict)
    lows: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    recurrent: dict[int, bytes] = field(default_factory=dict)
    checkpoints: dict[int, tuple[bytes, Checkpoint]] = field(default_factory=dict)

    def add(self, data: bytes, keep: int = 0) -> None:
        """Take a newer save-file, of which rows below `keep` are held already."""
        info = info_of(data)
        n = info.n_tokens
        assert info.shape == self.shape
        lows = self.lows or [0] * len(info.caches)
        starts = [take_from(rows, keep, lo) for rows, lo in zip(info.caches, lows, strict=True)]
        self.lows, self.needed = [lo for _, lo in starts], [rows.lo for rows in info.caches]
        cache_of = [segment.cache for segment in segments_of(info.shape)]
        self.rows = {at: row for at, row in self.rows.items() if self.lows[cache_of[at[0]]] <= at[1] < keep}
        for segment, cache in enumerate(cache_of):
            self.rows |= rows_of(data, info, segment, starts[cache][0], n)
        self.recurrent = {at: blob for at, blob in self.recurrent.items() if at <= keep}
        self.checkpoints = {at: blob for at, blob in self.checkpoints.items() if at <= keep}
        self.tokens = data[info.tokens_offset :][: 4 * n]
        if info.recurrent is not None:
            blob = info.recurrent
            self.recurrent[n] = data[blob.offset :][: blob.size]
            assert check_recurrent(info.shape, reader(self.recurrent[n]), blob.size) == n
        for point in info.checkpoints:
            raw = data[point.offset :][: point.size]
            known = check_checkpoint(
                info.shape, reader(raw), len(raw), self.tokens, point.n_tokens, point.pos_min, point.pos_max
            )
            self.checkpoints[point.n_tokens] = raw, known

    @property
    def stored(self) -> Stored:
        return Stored(
            shape=self.shape,
            n_tokens=len(self.tokens) // 4,
            rows=tuple(StoredRows(lo=lo, needed=n) for lo, n in zip(self.lows, self.needed, strict=True)),
            recurrent=tuple(self.recurrent),
            checkpoints=tuple(known for _, known in self.checkpoints.values()),
        )

    def render(self, target: Layout, n_tokens: int = 0) -> bytes:
        plan = render_plan(self.stored, self.tokens, target, n_tokens)
        parts = [self._bytes(part) for part in plan]
        assert [len(made) for made in parts] == [part.size for part in plan]
        return b"".join(parts)

    def _bytes(self, part: Part) -> bytes:
        match part:
            case Bytes(data):
                return data
            case StoreRows(segment, pos, n):
                return b"".join(self.rows[segment, at] for at in range(pos, pos + n))
            case StoreStrips(segment, pos, n, n_channels, elem_bytes):
                plain = b"".join(self.rows[segment, at] for at in range(pos, pos + n))
                return turned(plain, n, n_channels, elem_bytes)
            case BlobBytes(kind, n_tokens, offset, size):
                return self._blob(kind, n_tokens)[offset:][:size]
            case BlobTurned(kind, n_tokens, offset, n_rows, n_columns, elem_bytes):
                matrix = self._blob(kind, n_tokens)[offset:][: part.size]
                return turned(matrix, n_rows, n_columns, elem_bytes)

    def _blob(self, kind: str, n_tokens: int) -> bytes:
        return self.recurrent[n_tokens] if kind == "recurrent" else self.checkpoints[n_tokens][0]


def store_of(data: bytes) -> Store:
    store = Store(info_of(data).shape)
    store.add(data)
    return store
