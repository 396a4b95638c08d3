"""The parts a rendered save-file is written from, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from viiwork.wire.state import BlobKind


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


def plan_bytes(plan: Iterable[Part]) -> int:
    """Size of the file a plan makes."""
    return sum(part.size for part in plan)
