"""What a session's state is made of: the shape two engines must share, and how one engine lays it out.

A state is **rows**, one a position, in **segments** (one layer's K or V of one cache), and **blobs** that
have no rows: recurrent states and the engine's context checkpoints. In the canonical form every segment
is a row per position, `row_bytes` each, whatever the file it came from looked like.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# ggml type -> (name, values a block, bytes a block): what a KV cache can be made of
GGML_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    20: ("iq4_nl", 32, 18),
    30: ("bf16", 1, 2),
}

CacheName = Literal["base", "swa"]
BlobKind = Literal["recurrent", "checkpoint"]


class Plane(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer's K, V or recurrent state: its ggml type and the bytes of one row."""

    type: int
    row_bytes: int


class CacheShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attention cache: `base` holds every position, `swa` only the last ones."""

    name: CacheName
    n_rot_k: int  # Hadamard block of a quantised cache, 0 = none
    n_rot_v: int
    k: tuple[Plane, ...]
    v: tuple[Plane, ...]  # empty where the cache keeps K only


class RecurrentShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recurrent section: layers of the model, and every row it stores, in its order."""

    n_layer: int
    rows: tuple[Plane, ...]

    @property
    def n_bytes(self) -> int:
        return sum(plane.row_bytes for plane in self.rows)


class StateShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What two engines must have in common to exchange a state; equal shapes render into each other.

    Slot counts, unified caches and transposed V are not in it: rendering changes them.
    """

    state_version: int
    ext: bool  # cells carry M-RoPE positions and their token
    caches: tuple[CacheShape, ...]  # base, then swa; none for a purely recurrent model
    recurrent: RecurrentShape | None = None

    @property
    def kind(self) -> str:
        """`dense`, `swa`, `hybrid`, `hybrid-swa` or `recurrent`."""
        swa = any(cache.name == "swa" for cache in self.caches)
        if self.recurrent is None:
            return "swa" if swa else "dense"
        if not self.caches:
            return "recurrent"
        return "hybrid-swa" if swa else "hybrid"

    @property
    def token_bytes(self) -> int:
        """Bytes of the rows of one position."""
        return sum(plane.row_bytes for cache in self.caches for plane in (*cache.k, *cache.v))


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer's K or V of one cache, a row per position."""

    index: int  # of all segments of the shape; the order is the same on every node
    name: str  # `base.k.0`
    cache: int  # index into `StateShape.caches`
    layer: int  # of this cache, not of the model
    part: Literal["k", "v"]
    type: int
    row_bytes: int
    elem_bytes: int  # of one channel's value; 0 = in blocks, so never transposed

    @property
    def n_channels(self) -> int:
        """Values of a row; 0 where it is made of blocks."""
        return self.row_bytes // self.elem_bytes if self.elem_bytes else 0


def segments_of(shape: StateShape) -> tuple[Segment, ...]:
    """All segments in the canonical order: cache by cache, K of all layers, then V of all layers."""
    found: list[Segment] = []
    for at, cache in enumerate(shape.caches):
        parts: tuple[tuple[Literal["k", "v"], tuple[Plane, ...]], ...] = (("k", cache.k), ("v", cache.v))
        for part, planes in parts:
            for layer, plane in enumerate(planes):
                _, values, block_bytes = GGML_TYPES[plane.type]
                found.append(
                    Segment(
                        index=len(found),
                        name=f"{cache.name}.{part}.{layer}",
                        cache=at,
                        layer=layer,
                        part=part,
                        type=plane.type,
                        row_bytes=plane.row_bytes,
                        elem_bytes=block_bytes if values == 1 else 0,
                    )
                )
    return tuple(found)


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine and slot a file is rendered for."""

    shape: StateShape
    n_stream: int  # 1 for a unified cache, else the engine's slot count
    slot: int
    v_trans: bool  # V is kept channel by channel (flash attention off)
    max_tokens: int  # tokens the slot can hold
    n_vocab: int = 0  # 0 = not known
    # Checkpoints put into the file, the newest first. Engines without the appendix ignore it, and their
    # `n_read` is then smaller than the file.
    checkpoints: int = 0
    # Rows the sliding-window cache takes (window + micro-batch); 0 = not known, as many as the engine saved.
    swa_rows: int = 0
    # A window that begins where the engine's begins gets a cell of zeros before it. It is masked for every
    # token to come, and without it the engine takes the window for one that lost rows, and reads it all anew.
    swa_pad: bool = False


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Cells [cell, cell+n) of a file hold positions [pos, pos+n)."""

    pos: int
    cell: int
    n: int


class CacheRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a save-file, or a checkpoint in it, has the rows of one cache; offsets are into its bytes."""

    cells: int
    lo: int  # positions [lo, lo + cells), each once
    runs: tuple[Run, ...]  # by position
    v_trans: bool
    data: tuple[int, ...]  # offset of the data of each segment of this cache, K of all layers, then V

    @property
    def hi(self) -> int:
        return self.lo + self.cells


class Blob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The recurrent state after `n_tokens` tokens; its bytes are the same on every engine."""

    n_tokens: int
    offset: int
    size: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's own way back to `n_tokens` tokens: sliding windows and recurrent state as they were.

    Its bytes [offset, offset + size) are shipped as they are; rendering fits them to the target. Offsets in
    `caches` and `recurrent` count from the start of these bytes.
    """

    n_tokens: int
    pos_min: int
    pos_max: int
    offset: int
    size: int
    caches: tuple[CacheRows, ...]  # of the swa cache, where the model has one
    recurrent: Blob | None


class SaveInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of one checked save-file; offsets are into the file."""

    shape: StateShape
    n_tokens: int
    tokens_offset: int  # n_tokens little-endian i32
    tokens_digest: bytes  # BLAKE3 of those bytes
    max_token: int
    n_stream: int
    stream: int
    seq_id: int
    v_trans: bool
    caches: tuple[CacheRows, ...]  # as in the shape
    recurrent: Blob | None
    checkpoints: tuple[Checkpoint, ...]  # oldest first
    payload_bytes: int  # without the appendix
    total_bytes: int
