"""The sections save-files are made of, one after the other: attention caches, recurrent state, the appendix.

A section that does not fit raises `Misfit`. Sizes are compared with what is left of the file before
anything is read; rows and buffers are stepped over.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from viiwork.limits import (
    KV_BLOB_MAX_BYTES,
    KV_CHECKPOINTS_MAX,
    KV_LAYERS_MAX,
    KV_ROW_MAX_BYTES,
    KV_STREAMS_MAX,
    KV_TOKENS_MAX,
)
from viiwork.wire.state import GGML_TYPES, Plane

PRead = Callable[[int, int], bytes]  # (offset, n) -> exactly n bytes

MAGIC, VERSION = 0x67677371, 4  # of a save-file
PACKED, PACK_VERSION = -1, 1  # of its token list
APPENDIX_MAGIC, APPENDIX_VERSION = 0x504B4353, 1
PARTIAL_MAGIC = 0xAF143CD8  # of a checkpoint: a sequence's state without what can be cut back by itself
CELL_BYTES, EXT_BYTES = 12, 12
CELLS_AT_ONCE = 65_536  # cells read at once: 1.5 MiB
F32 = 0


class Misfit(Exception):
    """These bytes are not such a section."""


class Cursor:
    """Reads forward and never past the end; a claim larger than the file reads nothing."""

    def __init__(self, pread: PRead, end: int, offset: int = 0) -> None:
        self.pread, self.end, self.offset = pread, end, offset

    def skip(self, size: int) -> int:
        start = self.offset
        if size < 0 or size > self.end - start:
            raise Misfit("the file ends early")
        self.offset = start + size
        return start

    def bytes(self, size: int) -> bytes:
        return self.pread(self.skip(size), size)

    def u32(self) -> int:
        return int.from_bytes(self.bytes(4), "little")

    def peek_u32(self) -> int | None:
        """The next word, which stays; None at the end."""
        if self.left() < 4:
            return None
        return int.from_bytes(self.pread(self.offset, 4), "little")

    def left(self) -> int:
        return self.end - self.offset


def words_of(data: bytes) -> array[int]:
    """Little-endian i32 words."""
    words = array("i", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


@dataclass(slots=True)
class Attention:
    """One attention cache as it stands in a file."""

    n_stream: int
    stream: int = 0
    cells: int = 0
    meta_offset: int = 0
    v_trans: bool = False
    rot: tuple[int, int] = (0, 0)
    k: tuple[Plane, ...] = ()
    v: tuple[Plane, ...] = ()
    data: tuple[int, ...] = ()  # offset of each plane's data, K first


def read_attention(cursor: Cursor, *, ext: bool, has_v: bool) -> Attention:
    found = Attention(n_stream=cursor.u32())
    if not 1 <= found.n_stream <= KV_STREAMS_MAX:
        raise Misfit("streams")
    for stream in range(found.n_stream):
        cells = cursor.u32()
        if cells == 0:
            continue
        # A save is of one slot; more full streams would only make a crafted file slow to refuse.
        if cells > KV_TOKENS_MAX or found.cells:
            raise Misfit("cells")
        found.stream, found.cells = stream, cells
        found.meta_offset = cursor.skip(cells * (CELL_BYTES + (EXT_BYTES if ext else 0)))
        _read_planes(cursor, found, has_v)
    if not found.cells:
        raise Misfit("no cells")  # tokens without any abort the engine at the next prompt
    return found


def _read_planes(cursor: Cursor, found: Attention, has_v: bool) -> None:
    v_trans, n_layer, rot_k, rot_v = struct.unpack("<4I", cursor.bytes(16))
    if v_trans > 1 or not 1 <= n_layer <= KV_LAYERS_MAX or max(rot_k, rot_v) > KV_ROW_MAX_BYTES:
        raise Misfit("data header")
    found.v_trans, found.rot = bool(v_trans), (rot_k, rot_v)
    k = [_rows(cursor, found.cells) for _ in range(n_layer)]
    read_v = _strips if v_trans else _rows
    v = [read_v(cursor, found.cells) for _ in range(n_layer if has_v else 0)]
    found.k, found.v = tuple(plane for plane, _ in k), tuple(plane for plane, _ in v)
    found.data = tuple(offset for _, offset in (*k, *v))


def _rows(cursor: Cursor, cells: int) -> tuple[Plane, int]:
    type_, row = struct.unpack("<iQ", cursor.bytes(12))
    if type_ not in GGML_TYPES or not 0 < row <= KV_ROW_MAX_BYTES or row % GGML_TYPES[type_][2]:
        raise Misfit("rows")
    return Plane(type_, row), cursor.skip(cells * row)


def _strips(cursor: Cursor, cells: int) -> tuple[Plane, int]:
    """V kept channel by channel: the same bytes a token, in another order."""
    type_, element, channels = struct.unpack("<iII", cursor.bytes(12))
    known = GGML_TYPES.get(type_)
    if known is None or known[1] != 1 or element != known[2]:
        raise Misfit("strips")
    row = element * channels
    if not 0 < row <= KV_ROW_MAX_BYTES:
        raise Misfit("strips")
    return Plane(type_, row), cursor.skip(cells * row)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent section of a file."""

    pos: int
    n_layer: int
    rows: tuple[Plane, ...]
    offset: int
    size: int


def read_recurrent(cursor: Cursor) -> Recurrent:
    start = cursor.offset
    cells, pos, n_seq, transposed, n_layer = struct.unpack("<IiIII", cursor.bytes(20))
    if cells != 1 or n_seq or transposed or pos < 0 or not 1 <= n_layer <= KV_LAYERS_MAX:
        raise Misfit("recurrent header")
    # Which layers are recurrent is not in the file: rows follow, as many R as S, always f32. What comes
    # after them starts with another word.
    rows: list[Plane] = []
    while cursor.peek_u32() == F32:
        type_, row = struct.unpack("<iQ", cursor.bytes(12))
        if not 0 < row <= KV_BLOB_MAX_BYTES or row % 4 or len(rows) == 2 * n_layer:
            raise Misfit("recurrent row")
        cursor.skip(row)
        rows.append(Plane(type_, row))
    size = cursor.offset - start
    if not rows or len(rows) % 2 or size > KV_BLOB_MAX_BYTES:
        raise Misfit("recurrent rows")
    return Recurrent(pos, n_layer, tuple(rows), start, size)


@dataclass(frozen=True, slots=True)
class AppendedCheckpoint:
    """One entry of the appendix; `offset` and `size` are of its target buffer."""

    n_tokens: int
    pos_min: int
    pos_max: int
    offset: int
    size: int
    others: int  # bytes of the draft and the speculative buffer


def read_appendix(cursor: Cursor) -> list[AppendedCheckpoint] | None:
    """The checkpoints, oldest first; None where the appendix is of a version that is not known."""
    magic, version = struct.unpack("<2I", cursor.bytes(8))
    if magic != APPENDIX_MAGIC:
        raise Misfit("bytes left over")
    if version != APPENDIX_VERSION:
        return None
    count = cursor.u32()
    if count > KV_CHECKPOINTS_MAX:
        raise Misfit("checkpoints")
    found = []
    for _ in range(count):
        n_tokens, pos_min, pos_max, size = struct.unpack("<qiiQ", cursor.bytes(24))
        offset = cursor.skip(size)
        others = 0
        for _ in range(2):
            (more,) = struct.unpack("<Q", cursor.bytes(8))
            cursor.skip(more)
            others += more
        found.append(AppendedCheckpoint(n_tokens, pos_min, pos_max, offset, size, others))
    if cursor.left():
        raise Misfit("bytes left over")
    return found
