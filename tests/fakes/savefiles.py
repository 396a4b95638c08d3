"""Makes save-files of every form, byte for byte as the engine writes them, for any layout of the same state.

A row's bytes follow from the seed, its segment and its position alone; so two files of one state differ in
nothing but their layout, and what a rendered file must be is known.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from blake3 import blake3

ELEMENT = {0: 4, 1: 2, 30: 2}  # f32, f16, bf16: bytes a value


@dataclass(frozen=True)
class State:
    """What a session's state is, and how one engine lays it out."""

    n: int = 40
    window: int = 0  # positions of the sliding cache; 0 = none
    recurrent: int = 0  # recurrent layers; 0 = none
    attention: bool = True
    ext: bool = False
    keys_only: bool = False
    n_layer: int = 3
    type: int = 1
    row: int = 16
    rot: int = 0
    checkpoints: tuple[int, ...] = ()  # token counts
    seed: int = 1
    # the layout
    n_stream: int = 2
    slot: int = 0
    v_trans: bool = False
    turn: int = 0  # cells by which every cache's positions are rotated
    media: int = 0
    version: int = 4

    def at(self, **changes: object) -> State:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def stream(self) -> int:
        return self.slot if self.n_stream > 1 else 0

    def stuff(self, what: str, size: int) -> bytes:
        return blake3(f"{self.seed}/{what}".encode()).digest(length=size)

    @property
    def tokens(self) -> list[int]:
        return [int.from_bytes(self.stuff(f"token/{i}", 2), "little") % 49_000 for i in range(self.n)]

    def window_at(self, n: int) -> range:
        return range(max(0, n - self.window), n)


def make(state: State) -> bytes:
    out = [token_frame(state), sections(state)]
    if state.checkpoints:
        out.append(struct.pack("<3I", 0x504B4353, 1, len(state.checkpoints)))
        out += [appended(state, n) for n in state.checkpoints]
    return b"".join(out)


def token_frame(state: State) -> bytes:
    words = [-1, 1, state.n, *state.tokens, state.media]
    head = struct.pack("<3I", 0x67677371, state.version, len(words))
    return head + struct.pack(f"<{len(words)}i", *words)


def sections(state: State) -> bytes:
    out = [attention(state, "base", range(state.n))] if state.attention else []
    if state.window:
        out.append(attention(state, "swa", state.window_at(state.n)))
    if state.recurrent:
        out.append(recurrent(state, state.n))
    return b"".join(out)


def attention(state: State, name: str, positions: range, keys_only: bool = False) -> bytes:
    shift = state.turn % len(positions)
    order = [*positions[shift:], *positions[:shift]]
    out = [struct.pack("<I", state.n_stream), bytes(4 * state.stream), struct.pack("<I", len(order))]
    tokens = state.tokens
    for pos in order:
        ext = struct.pack("<3i", pos, pos, tokens[pos]) if state.ext else b""
        out.append(struct.pack("<iI", pos, 1) + ext + struct.pack("<i", state.slot))
    out.append(struct.pack("<4I", state.v_trans, state.n_layer, state.rot, state.rot))
    for layer in range(state.n_layer):
        rows = [state.stuff(f"{name}.k.{layer}/{pos}", state.row) for pos in order]
        out += [struct.pack("<iQ", state.type, state.row), *rows]
    for layer in range(0 if state.keys_only or keys_only else state.n_layer):
        rows = [state.stuff(f"{name}.v.{layer}/{pos}", state.row) for pos in order]
        if state.v_trans:
            size = ELEMENT[state.type]
            out.append(struct.pack("<iII", state.type, size, state.row // size))
            out += [row[at : at + size] for at in range(0, state.row, size) for row in rows]
        else:
            out += [struct.pack("<iQ", state.type, state.row), *rows]
    return b"".join([*out, bytes(4 * (state.n_stream - 1 - state.stream))])


def recurrent(state: State, n: int) -> bytes:
    out = [struct.pack("<IiIII", 1, n - 1, 0, 0, state.recurrent + 1)]
    for kind, size in (("r", 24), ("s", 40)):
        for layer in range(state.recurrent):
            out.append(struct.pack("<iQ", 0, size) + state.stuff(f"rs.{kind}.{layer}/{n}", size))
    return b"".join(out)


def partial(state: State, n: int) -> bytes:
    """A checkpoint's target buffer."""
    out = [struct.pack("<2I", 0xAF143CD8, state.slot)]
    if state.window:
        out.append(attention(state, "swa", state.window_at(n)))
    if state.recurrent:
        out.append(recurrent(state, n))
    return b"".join(out)


def appended(state: State, n: int, *, draft: bytes = b"", buffer: bytes | None = None) -> bytes:
    buffer = partial(state, n) if buffer is None else buffer
    lo = state.window_at(n)[0] if state.window else n - 1
    facts = struct.pack("<qiiQ", n, lo, n - 1, len(buffer))
    return facts + buffer + struct.pack("<Q", len(draft)) + draft + struct.pack("<Q", 0)


DENSE = State()
SWA = State(window=16, checkpoints=(20, 37))
HYBRID = State(ext=True, recurrent=2, checkpoints=(12, 37))
HYBRID_SWA = State(window=16, recurrent=1, checkpoints=(37,))
RECURRENT = State(attention=False, recurrent=3, n_stream=1)
FORMS = {
    "dense": DENSE,
    "bf16": State(type=30, n_layer=1),
    "f32": State(type=0, row=12),
    "q8_0": State(type=8, row=68, rot=64),
    "q4_0": State(type=2, row=36),
    "keys only": State(keys_only=True),
    "m-rope": State(ext=True),
    "one token": State(n=1),
    "swa": SWA,
    "swa, short": State(n=10, window=16),
    "hybrid": HYBRID,
    "hybrid, keys only": State(keys_only=True, recurrent=2),
    "hybrid-swa": HYBRID_SWA,
    "recurrent": RECURRENT,
    "recurrent with checkpoints": RECURRENT.at(checkpoints=(20,)),
}
