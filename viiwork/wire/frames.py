"""The bytes of a save-file that rendering makes anew: everything that is not a row or a blob."""

from __future__ import annotations

import struct
import sys
from array import array

from viiwork.wire.sections import (
    CELL_BYTES,
    EXT_BYTES,
    MAGIC,
    PACK_VERSION,
    PACKED,
    VERSION,
)
from viiwork.wire.state import GGML_TYPES, CacheShape, Layout, Plane, RecurrentShape, Run


def tokens_frame(tokens: bytes) -> bytes:
    """Header and token list, of little-endian i32 tokens."""
    n = len(tokens) // 4
    return struct.pack("<3IiII", MAGIC, VERSION, n + 4, PACKED, PACK_VERSION, n) + tokens + bytes(4)


def attention_frame(
    target: Layout, positions: array[int], ext: bool, tokens: array[int]
) -> tuple[bytes, bytes]:
    """What stands around the planes of a cache whose cells hold these positions: before and after them."""
    stream = target.slot if target.n_stream > 1 else 0
    head = struct.pack(f"<{stream + 2}I", target.n_stream, *[0] * stream, len(positions))
    tail = bytes(4 * (target.n_stream - 1 - stream))
    return head + _cells(positions, target.slot, ext, tokens), tail


def _cells(positions: array[int], seq_id: int, ext: bool, tokens: array[int]) -> bytes:
    step = (CELL_BYTES + (EXT_BYTES if ext else 0)) // 4
    n = len(positions)
    words = array("i", bytes(4 * step * n))
    words[0::step] = positions
    words[1::step] = array("i", [1]) * n
    if ext:
        words[2::step] = words[3::step] = positions
        words[4::step] = array("i", map(tokens.__getitem__, positions))
    words[step - 1 :: step] = array("i", [seq_id]) * n
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def planes_head(cache: CacheShape, v_trans: bool) -> bytes:
    return struct.pack("<4I", v_trans, len(cache.k), cache.n_rot_k, cache.n_rot_v)


def rows_head(plane: Plane) -> bytes:
    return struct.pack("<iQ", plane.type, plane.row_bytes)


def strips_head(plane: Plane) -> bytes:
    size = GGML_TYPES[plane.type][2]
    return struct.pack("<iII", plane.type, size, plane.row_bytes // size)


def recurrent_bytes(shape: RecurrentShape) -> int:
    """Size of a recurrent blob."""
    return 20 + sum(12 + plane.row_bytes for plane in shape.rows)


def positions_of(runs: tuple[Run, ...]) -> array[int]:
    """Positions in the order of the cells."""
    found = array("i")
    for run in sorted(runs, key=lambda run: run.cell):
        found.extend(range(run.pos, run.pos + run.n))
    return found
