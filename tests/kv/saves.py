"""Makes save-files of any size and shape, byte for byte as the engine writes them."""

from __future__ import annotations

import random
import struct

APPENDIX = struct.pack("<3I", 0x504B4353, 1, 0)


def make_save(
    n_tokens: int = 40,
    *,
    n_stream: int = 2,
    stream: int = 0,
    n_layer: int = 3,
    type_: int = 1,
    row: int = 64,
    v_trans: bool = False,
    has_v: bool = True,
    rot: int = 0,
    version: int = 4,
    cells: int | None = None,
    tokens: list[int] | None = None,
    positions: list[int] | None = None,
    seq_id: int | None = None,
    tail: bytes = b"",
    seed: int = 1,
) -> bytes:
    rng = random.Random(seed)
    cells = n_tokens if cells is None else cells
    tokens = [rng.randrange(49_000) for _ in range(n_tokens)] if tokens is None else tokens
    positions = list(range(cells)) if positions is None else positions
    seq_id = stream if seq_id is None else seq_id
    words = [-1, 1, len(tokens), *tokens, 0]
    out = [struct.pack("<3I", 0x67677371, version, len(words)), struct.pack(f"<{len(words)}i", *words)]
    out.append(struct.pack("<I", n_stream) + struct.pack("<I", 0) * stream + struct.pack("<I", cells))
    out += [struct.pack("<iIi", position, 1, seq_id) for position in positions]
    out.append(struct.pack("<4I", v_trans, n_layer, rot, rot))
    out += [struct.pack("<iQ", type_, row) + rng.randbytes(cells * row) for _ in range(n_layer)]
    for _ in range(n_layer if has_v else 0):
        if v_trans:
            out.append(struct.pack("<iII", type_, 2, row // 2) + rng.randbytes(cells * row))
        else:
            out.append(struct.pack("<iQ", type_, row) + rng.randbytes(cells * row))
    out.append(struct.pack("<I", 0) * (n_stream - 1 - stream))
    return b"".join(out) + tail
