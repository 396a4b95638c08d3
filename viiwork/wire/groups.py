"""How rows are grouped, hashed and put in order: what both ends of a transfer compute alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from viiwork.limits import (
    KV_BLOB_PIECE_BYTES,
    KV_GROUP_BYTES,
    KV_GROUP_ROWS_MAX,
    KV_TOKENS_PIECE,
)
from viiwork.wire.channel import FrameType
from viiwork.wire.state import CacheShape

DIGEST_BYTES = 16  # of a group: the front of its rows' BLAKE3


@lru_cache(maxsize=64)
def cache_bytes(cache: CacheShape) -> int:
    """Bytes of one position in all segments of a cache."""
    return sum(plane.row_bytes for plane in (*cache.k, *cache.v))


@lru_cache(maxsize=64)
def rows_of_group(cache: CacheShape) -> int:
    """Positions of a group: the largest power of two that keeps it in bounds."""
    rows = KV_GROUP_ROWS_MAX
    while rows > 1 and rows * cache_bytes(cache) > KV_GROUP_BYTES:
        rows //= 2
    return rows


def groups_of(n: int, rows: int) -> int:
    """Groups that [0, n) touches."""
    return -(-n // rows)


@dataclass(frozen=True, slots=True)
class Piece:
    """One data frame of a transfer, before it is read."""

    type: FrameType
    segment: int  # cache or blob
    offset: int  # position or byte
    rows: int  # positions or tokens; 0 for a blob
    size: int


def token_pieces(keep: int, n: int) -> Iterator[Piece]:
    for at in range(keep, n, KV_TOKENS_PIECE):
        rows = min(KV_TOKENS_PIECE, n - at)
        yield Piece(FrameType.TOKENS, 0, at, rows, 4 * rows)


def row_pieces(caches: tuple[CacheShape, ...], starts: tuple[int, ...], n: int) -> Iterator[Piece]:
    """Rows [start, n) of each cache, cut where groups end; the base cache last, so that it tells how far."""
    for index in reversed(range(len(caches))):
        at, group, row = starts[index], rows_of_group(caches[index]), cache_bytes(caches[index])
        while at < n:
            rows = min(group - at % group, n - at)
            yield Piece(FrameType.ROWS, index, at, rows, rows * row)
            at += rows


def blob_pieces(index: int, size: int) -> Iterator[Piece]:
    for at in range(0, size, KV_BLOB_PIECE_BYTES):
        yield Piece(FrameType.BLOB, index, at, 0, min(KV_BLOB_PIECE_BYTES, size - at))
