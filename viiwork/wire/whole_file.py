"""llama.cpp's slot save-files: a bounded parser, and the plan that fits one to another engine's slots.

The file names neither its memory kind nor whether cells carry extra position words nor whether V
rows exist, so every known layout is tried and the file is accepted when exactly one ends at its end.
A crafted file can abort an engine; what passes here cannot: one non-empty stream, as many cells as
tokens, each position once, known types, no byte left over. Only dense text models are portable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec
from blake3 import blake3

from viiwork.errors import SaveFileError
from viiwork.limits import KV_LAYERS_MAX, KV_ROW_MAX_BYTES, KV_STATE_MAX_BYTES, KV_STREAMS_MAX, KV_TOKENS_MAX

PRead = Callable[[int, int], bytes]  # (offset, n) -> exactly n bytes

MAGIC, VERSION = 0x67677371, 4
PACKED, PACK_VERSION = -1, 1
APPENDIX_MAGIC, APPENDIX_VERSION = 0x504B4353, 1

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


class Plane(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer's K or V: its ggml type and the bytes of one token's row."""

    type: int
    row_bytes: int


class StateShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What two engines must have in common to exchange a state; equal shapes restore into each other."""

    state_version: int
    kind: str
    ext: bool
    v_trans: bool
    n_rot_k: int
    n_rot_v: int
    k: tuple[Plane, ...]
    v: tuple[Plane, ...]  # empty for caches that keep K only

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in all planes."""
        return sum(plane.row_bytes for plane in chain(self.k, self.v))


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine and slot a file is rendered for."""

    shape: StateShape
    n_stream: int  # 1 for a unified cache, else the engine's slot count
    slot: int
    max_tokens: int  # tokens the slot can hold
    n_vocab: int = 0  # 0 = not known


class SaveInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of one checked save-file; offsets are into the file."""

    shape: StateShape
    n_tokens: int
    tokens_digest: bytes  # BLAKE3 of the tokens as little-endian i32
    max_token: int
    n_stream: int
    stream: int
    seq_id: int
    state_offset: int
    meta_offset: int
    data_offset: int
    data_end: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Literal:
    data: bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the source file, unchanged."""

    offset: int
    size: int


Segment = Literal | Span


class _Misfit(Exception):
    """This layout does not describe the file; the next one may."""


class _Cursor:
    """Reads forward and never past the end; a claim larger than the file reads nothing."""

    def __init__(self, pread: PRead, total: int, offset: int) -> None:
        self._pread, self._total, self.offset = pread, total, offset

    def skip(self, size: int) -> int:
        start = self.offset
        if size < 0 or size > self._total - start:
            raise _Misfit("the file ends early")
        self.offset = start + size
        return start

    def bytes(self, size: int) -> bytes:
        return self._pread(self.skip(size), size)

    def u32(self) -> int:
        return int.from_bytes(self.bytes(4), "little")

    def left(self) -> int:
        return self._total - self.offset


@dataclass(slots=True)
class _Kv:
    """One attention cache as one layout reads it."""

    n_stream: int
    stream: int = -1
    cells: int = 0
    meta_offset: int = 0
    data_offset: int = 0
    data_end: int = 0
    v_trans: bool = False
    rot: tuple[int, int] = (0, 0)
    k: tuple[Plane, ...] = ()
    v: tuple[Plane, ...] = ()


def parse(pread: PRead, total: int, *, n_vocab: int = 0) -> SaveInfo:
    """Check a whole save-file and return its facts.

    Raises `SaveFileError`: `bad_file` when it is damaged or not a save-file, `not_portable` when it is a
    form that is not moved between engines.
    """
    if total > KV_STATE_MAX_BYTES:
        raise SaveFileError("too_large", f"a save-file of {total} bytes is over the limit")
    tokens, state = _tokens(_Cursor(pread, total, 0))
    found = list(_readings(pread, total, state))
    if not found:
        raise SaveFileError("bad_file", "no known memory layout ends where the file ends")
    if len(found) > 1:
        raise SaveFileError("not_portable", f"{len(found)} memory layouts fit the file")
    name, ext, parts = found[0]
    if name != "dense" or ext:
        raise SaveFileError("not_portable", f"memory kind {name}{' with extra positions' if ext else ''}")
    (kv,) = parts
    seq_id = _check_cells(pread, kv, len(tokens))
    highest = max(tokens)
    if n_vocab and highest >= n_vocab:
        raise SaveFileError("bad_file", f"token {highest} is outside the vocabulary of {n_vocab}")
    shape = StateShape(
        state_version=VERSION,
        kind=name,
        ext=ext,
        v_trans=kv.v_trans,
        n_rot_k=kv.rot[0],
        n_rot_v=kv.rot[1],
        k=kv.k,
        v=kv.v,
    )
    return SaveInfo(
        shape=shape,
        n_tokens=len(tokens),
        tokens_digest=blake3(struct.pack(f"<{len(tokens)}i", *tokens)).digest(),
        max_token=highest,
        n_stream=kv.n_stream,
        stream=kv.stream,
        seq_id=seq_id,
        state_offset=state,
        meta_offset=kv.meta_offset,
        data_offset=kv.data_offset,
        data_end=kv.data_end,
        total_bytes=total,
    )


def render_plan(info: SaveInfo, target: Layout, pread: PRead) -> list[Segment]:
    """The parts, in order, of a file that restores into `target`; `pread` reads the file `info` is of.

    Raises `SaveFileError` (`layout`, `too_long`) when no such file exists. Rows are never changed.
    """
    if info.shape != target.shape:
        raise SaveFileError("layout", "the engine's cache is laid out differently")
    if info.n_tokens > target.max_tokens:
        raise SaveFileError("too_long", f"{info.n_tokens} tokens, the slot holds {target.max_tokens}")
    if target.n_vocab and info.max_token >= target.n_vocab:
        raise SaveFileError("layout", f"token {info.max_token} is outside the vocabulary")
    if not 0 <= target.slot < (target.n_stream if target.n_stream > 1 else KV_STREAMS_MAX):
        raise SaveFileError("layout", f"slot {target.slot} of {target.n_stream}")
    stream = target.slot if target.n_stream > 1 else 0
    head = [target.n_stream] + [0] * stream + [info.n_tokens]
    tail = [0] * (target.n_stream - 1 - stream)
    return [
        Span(0, info.state_offset),
        Literal(struct.pack(f"<{len(head)}I", *head)),
        _cells_for(info, target.slot, pread),
        Span(info.data_offset, info.data_end - info.data_offset),
        Literal(struct.pack(f"<{len(tail)}I", *tail)),
    ]


def _cells_for(info: SaveInfo, slot: int, pread: PRead) -> Segment:
    size = 12 * info.n_tokens
    if info.seq_id == slot:
        return Span(info.meta_offset, size)
    words = list(struct.unpack(f"<{3 * info.n_tokens}i", pread(info.meta_offset, size)))
    words[2::3] = [slot] * info.n_tokens
    return Literal(struct.pack(f"<{len(words)}i", *words))


def plan_bytes(plan: list[Segment]) -> int:
    """Size of the file a plan makes."""
    return sum(part.size if isinstance(part, Span) else len(part.data) for part in plan)


def _tokens(cursor: _Cursor) -> tuple[tuple[int, ...], int]:
    """The token list and the offset of what follows it."""
    try:
        magic, version, words = struct.unpack("<3I", cursor.bytes(12))
        if magic != MAGIC:
            raise SaveFileError("bad_file", "not a save-file")
        if version != VERSION:
            raise SaveFileError("not_portable", f"save-file version {version}, known is {VERSION}")
        if not 5 <= words <= KV_TOKENS_MAX + 4:
            raise SaveFileError("bad_file", f"a token payload of {words} words")
        payload = struct.unpack(f"<{words}i", cursor.bytes(4 * words))
    except _Misfit as misfit:
        raise SaveFileError("bad_file", str(misfit)) from None
    if payload[0] != PACKED or payload[1] != PACK_VERSION:
        raise SaveFileError("not_portable", "the token list is in a form that is not moved")
    tokens, media = payload[3:-1], payload[-1]
    if payload[2] != len(tokens):
        # Media chunks follow the token list and make the payload longer.
        raise SaveFileError("not_portable", "the session holds media, or the token list is damaged")
    if media != 0 or min(tokens) < 0:
        raise SaveFileError("not_portable", "the session holds media")
    return tokens, cursor.offset


def _readings(pread: PRead, total: int, state: int) -> Iterator[tuple[str, bool, tuple[_Kv, ...]]]:
    kinds = (("dense", 1, False), ("swa", 2, False), ("hybrid", 1, True), ("hybrid-swa", 2, True))
    for ext in (False, True):
        for has_v in (True, False):
            for name, n_caches, recurrent in kinds:
                cursor = _Cursor(pread, total, state)
                try:
                    caches = tuple(_kv(cursor, ext, has_v) for _ in range(n_caches))
                    if recurrent:
                        _recurrent(cursor)
                    _end(cursor)
                except _Misfit:
                    continue
                yield name, ext, caches
    cursor = _Cursor(pread, total, state)
    try:
        _recurrent(cursor)
        _end(cursor)
    except _Misfit:
        return
    yield "recurrent", False, ()


def _kv(cursor: _Cursor, ext: bool, has_v: bool) -> _Kv:
    kv = _Kv(n_stream=cursor.u32())
    if not 1 <= kv.n_stream <= KV_STREAMS_MAX:
        raise _Misfit("streams")
    for stream in range(kv.n_stream):
        cells = cursor.u32()
        if cells == 0:
            continue
        # A save is of one slot; more full streams would only make a crafted file slow to refuse.
        if cells > KV_TOKENS_MAX or kv.cells:
            raise _Misfit("cells")
        kv.stream, kv.cells = stream, cells
        kv.meta_offset = cursor.skip(cells * (24 if ext else 12))
        kv.data_offset = cursor.offset
        v_trans, n_layer, rot_k, rot_v = struct.unpack("<4I", cursor.bytes(16))
        if v_trans > 1 or not 1 <= n_layer <= KV_LAYERS_MAX or max(rot_k, rot_v) > KV_ROW_MAX_BYTES:
            raise _Misfit("data header")
        kv.v_trans, kv.rot = bool(v_trans), (rot_k, rot_v)
        kv.k = tuple(_rows(cursor, cells) for _ in range(n_layer))
        read_v = _strips if v_trans else _rows
        kv.v = tuple(read_v(cursor, cells) for _ in range(n_layer if has_v else 0))
        kv.data_end = cursor.offset
    return kv


def _rows(cursor: _Cursor, cells: int) -> Plane:
    type_, row = struct.unpack("<iQ", cursor.bytes(12))
    if type_ not in GGML_TYPES or not 0 < row <= KV_ROW_MAX_BYTES or row % GGML_TYPES[type_][2]:
        raise _Misfit("rows")
    cursor.skip(cells * row)
    return Plane(type_, row)


def _strips(cursor: _Cursor, cells: int) -> Plane:
    """V kept channel by channel: the same bytes a token, in another order."""
    type_, element, channels = struct.unpack("<iII", cursor.bytes(12))
    known = GGML_TYPES.get(type_)
    if known is None or known[1] != 1 or element != known[2]:
        raise _Misfit("strips")
    row = element * channels
    if not 0 < row <= KV_ROW_MAX_BYTES:
        raise _Misfit("strips")
    cursor.skip(cells * row)
    return Plane(type_, row)


def _recurrent(cursor: _Cursor) -> None:
    cells = cursor.u32()
    if not 1 <= cells <= 4096:
        raise _Misfit("recurrent cells")
    for _ in range(cells):
        _, n_seq = struct.unpack("<iI", cursor.bytes(8))
        if n_seq:
            raise _Misfit("recurrent cell")
    transposed, n_layer = struct.unpack("<II", cursor.bytes(8))
    if transposed or not 1 <= n_layer <= KV_LAYERS_MAX:
        raise _Misfit("recurrent header")
    # Which layers are recurrent is not in the file: rows follow until it ends, as many R as S.
    n_rows = 0
    while cursor.left() and not _at_appendix(cursor):
        type_, row = struct.unpack("<iQ", cursor.bytes(12))
        if type_ not in GGML_TYPES or row > 1 << 30:
            raise _Misfit("recurrent row")
        cursor.skip(cells * row)
        n_rows += 1
        if n_rows > 3 * KV_LAYERS_MAX:
            raise _Misfit("recurrent rows")
    if n_rows == 0:
        raise _Misfit("no recurrent rows")


def _at_appendix(cursor: _Cursor) -> bool:
    if cursor.left() < 12:
        return False
    magic = cursor.u32()
    cursor.offset -= 4
    return magic == APPENDIX_MAGIC


def _end(cursor: _Cursor) -> None:
    """The end of the file, or an appendix of context checkpoints that has none in it."""
    if cursor.left() == 0:
        return
    magic, version, count = struct.unpack("<3I", cursor.bytes(12))
    if magic != APPENDIX_MAGIC or version != APPENDIX_VERSION or count or cursor.left():
        raise _Misfit("bytes left over")


def _check_cells(pread: PRead, kv: _Kv, n_tokens: int) -> int:
    """Check the cell list of a dense cache; the sequence id it names."""
    if kv.cells != n_tokens:
        raise SaveFileError("bad_file", f"{n_tokens} tokens but {kv.cells} cells")
    words = struct.unpack(f"<{3 * kv.cells}i", pread(kv.meta_offset, 12 * kv.cells))
    if sorted(words[0::3]) != list(range(n_tokens)):
        raise SaveFileError("bad_file", "positions are not 0 to n-1, each once")
    if set(words[1::3]) != {1} or len(set(words[2::3])) != 1:
        raise SaveFileError("bad_file", "cells belong to more than one sequence")
    seq_id: int = words[2]
    if not 0 <= seq_id < KV_STREAMS_MAX:
        raise SaveFileError("bad_file", f"sequence id {seq_id}")
    return seq_id
