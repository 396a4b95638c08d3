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


def _stream(seed: int, what: str, size: int) -> bytes:
    return random.Random(f"{seed} {what}").randbytes(size)


def make_turn(
    n_tokens: int,
    branches: tuple[tuple[int, int], ...] = ((0, 1),),
    *,
    n_layer: int = 3,
    row: int = 64,
    n_stream: int = 1,
    stream: int = 0,
    v_trans: bool = False,
    seed_rows: int = 0,
) -> bytes:
    """A session's save after so many tokens: what stands at a position depends on its branch alone.

    `branches` are (first position, seed). Equal tokens with another `seed_rows` are a prompt read anew.
    """
    ends = [*(at for at, _ in branches[1:]), n_tokens]

    def told(what: str, width: int) -> bytes:
        pieces = (
            _stream(seed, what, width * n_tokens)[width * at : width * min(end, n_tokens)]
            for (at, seed), end in zip(branches, ends, strict=True)
        )
        return b"".join(pieces)

    tokens = [word % 49_000 for word in struct.unpack(f"<{n_tokens}I", told("tokens", 4))]
    planes = [told(f"{seed_rows} {part}{layer}", row) for part in "kv" for layer in range(n_layer)]
    words = [-1, 1, n_tokens, *tokens, 0]
    out = [struct.pack("<3I", 0x67677371, 4, len(words)), struct.pack(f"<{len(words)}i", *words)]
    out.append(struct.pack("<I", n_stream) + struct.pack("<I", 0) * stream + struct.pack("<I", n_tokens))
    out += [struct.pack("<iIi", position, 1, stream) for position in range(n_tokens)]
    out.append(struct.pack("<4I", v_trans, n_layer, 0, 0))
    out += [struct.pack("<iQ", 1, row) + plane for plane in planes[:n_layer]]
    for plane in planes[n_layer:]:
        if v_trans:
            values = struct.unpack(f"<{len(plane) // 2}H", plane)
            width = row // 2
            turned = [values[at * width + channel] for channel in range(width) for at in range(n_tokens)]
            out.append(struct.pack("<iII", 1, 2, width) + struct.pack(f"<{len(turned)}H", *turned))
        else:
            out.append(struct.pack("<iQ", 1, row) + plane)
    out.append(struct.pack("<I", 0) * (n_stream - 1 - stream))
    return b"".join(out)
