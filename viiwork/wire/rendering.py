"""The plan of a save-file for one engine's slot, made of canonical rows and blobs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from viiwork.wire.state import BlobKind, Checkpoint, Layout, StateShape


class StoredRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica holds of one cache: rows of positions [lo, n_tokens), without a gap.

    `needed` is the lowest position the engine itself saved at `n_tokens` (`CacheRows.lo`): 0 for a base
    cache, the start of the window for a sliding one. lo <= needed.
    """

    lo: int
    needed: int


class Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica as rendering sees it. Tokens are given beside it; blobs are named by kind and token count."""

    shape: StateShape
    n_tokens: int
    rows: tuple[StoredRows, ...]  # as in the shape
    recurrent: tuple[int, ...] = ()  # token counts after which a recurrent blob is held
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Made here: headers, tokens, cells."""

    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class StoreRows:
    """Rows [pos, pos + n) of a segment of the store, copied."""

    segment: int
    pos: int
    n: int
    size: int


@dataclass(frozen=True, slots=True)
class StoreStrips:
    """Rows [pos, pos + n) of a segment of the store, transposed into `n_channels` strips of n elements."""

    segment: int
    pos: int
    n: int
    n_channels: int
    elem_bytes: int

    @property
    def size(self) -> int:
        return self.n * self.n_channels * self.elem_bytes


@dataclass(frozen=True, slots=True)
class BlobBytes:
    """A range of a blob, copied."""

    kind: BlobKind
    n_tokens: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class BlobTurned:
    """A matrix in a blob, `n_rows` x `n_columns` elements, transposed into `n_columns` x `n_rows`."""

    kind: BlobKind
    n_tokens: int
    offset: int
    n_rows: int
    n_columns: int
    elem_bytes: int

    @property
    def size(self) -> int:
        return self.n_rows * self.n_columns * self.elem_bytes


Part = Bytes | StoreRows | StoreStrips | BlobBytes | BlobTurned


def longest(stored: Stored, target: Layout, at_most: int) -> int:
    """The most tokens, not over `at_most`, a file for the target can be rendered with; 0 = none.

    Attention rows can be cut anywhere; a recurrent state only where a blob was kept, a sliding window only
    where the rows before the cut are held.
    """
    raise NotImplementedError


def render_plan(stored: Stored, tokens: bytes, target: Layout, n_tokens: int = 0) -> list[Part]:
    """The parts, in order, of a file that restores the first `n_tokens` tokens (0 = all) into the target.

    `tokens` are the stored tokens as little-endian i32, at least `n_tokens` of them. Raises `SaveFileError`:
    `layout`, `too_long`, or `not_held` when a part such a file needs is not there. No plan names a row
    outside [lo, n_tokens), and in every plan the cells of the base cache are exactly the tokens.
    """
    raise NotImplementedError


def plan_bytes(plan: list[Part]) -> int:
    """Size of the file a plan makes."""
    return sum(part.size for part in plan)
