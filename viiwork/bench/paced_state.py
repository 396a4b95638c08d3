"""The state of a simulated engine's slot: save-files as llama.cpp writes them, made of the tokens alone.

Rows follow from the tokens before them (by groups of 256) and the recurrent state from all tokens, so what a
file must be is known to the byte: a restore that differs anywhere is refused.
"""

from __future__ import annotations

import os
import random
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from viiwork.limits import MIB
from viiwork.wire.frames import attention_frame, planes_head, rows_head, tokens_frame
from viiwork.wire.state import CacheShape, Layout, Plane, RecurrentShape, StateShape, segments_of

# Qwen3.8-27B: 16 of 64 layers have attention (f16), the others a recurrent state.
LAYERS, ATTENTION_LAYERS, ROW_BYTES = 64, 16, 2048
RECURRENT_LAYERS, CONV_BYTES, STATE_BYTES = 48, 122_880, 3_145_728
TOKEN_BYTES = 2 * ATTENTION_LAYERS * ROW_BYTES
RECURRENT_BYTES = RECURRENT_LAYERS * (CONV_BYTES + STATE_BYTES)

GROUP_TOKENS = 256  # rows that follow from the same earlier tokens
_POOL_BYTES = 16 * MIB  # no frame of the channel (4 MiB) meets the same rows twice, but by chance
_F16, _F32 = 1, 0
_WRITES_AT_ONCE = 512  # below IOV_MAX
# Of 32 values of a normal distribution so many have this exponent; f16 states then pack as real ones do.
_EXPONENTS = {16: 1, 15: 9, 14: 10, 13: 6, 12: 3, 11: 2, 10: 1}


@dataclass(frozen=True, slots=True)
class PacedModel:
    """The modelled model, every size divided by `scale` (a power of two up to 256)."""

    scale: int

    @property
    def shape(self) -> StateShape:
        layers = max(1, ATTENTION_LAYERS // self.scale)
        row = TOKEN_BYTES // self.scale // (2 * layers)
        n = max(1, RECURRENT_LAYERS // self.scale)
        conv, state = (
            size * RECURRENT_LAYERS // self.scale // n // 4 * 4 for size in (CONV_BYTES, STATE_BYTES)
        )
        planes = (Plane(_F16, row),) * layers
        rows = (Plane(_F32, conv),) * n + (Plane(_F32, state),) * n
        base = CacheShape(name="base", n_rot_k=0, n_rot_v=0, k=planes, v=planes)
        recurrent = RecurrentShape(n_layer=max(LAYERS // self.scale, n), rows=rows)
        return StateShape(state_version=4, ext=True, caches=(base,), recurrent=recurrent)

    def bytes_of(self, n_tokens: int) -> int:
        """Of a state, as the engine keeps it."""
        return (TOKEN_BYTES * n_tokens + RECURRENT_BYTES) // self.scale


class PacedStates:
    """Writes and checks the save-files of one engine. Blocks; what is costly runs without the GIL."""

    def __init__(self, model: PacedModel, n_slots: int, seed: int = 27) -> None:
        self.shape = model.shape
        self._n_slots = n_slots
        pool = bytearray(random.Random(seed).randbytes(_POOL_BYTES))
        pool[1::2] = pool[1::2].translate(_high_bytes())
        self._pool = memoryview(bytes(pool + pool))  # twice, so that a piece may begin anywhere

    def save(self, path: Path, tokens: array[int], slot: int) -> int:
        """Write the state after these tokens; the bytes of the file."""
        parts = list(self._parts(tokens, slot))
        with path.open("wb", buffering=0) as out:
            for at in range(0, len(parts), _WRITES_AT_ONCE):
                _write_all(out.fileno(), parts[at : at + _WRITES_AT_ONCE])
        return sum(len(part) for part in parts)

    def restore(self, path: Path, slot: int) -> tuple[array[int], int]:
        """Tokens and size of a file that is to the byte what `slot` would have saved; else `ValueError`."""
        with path.open("rb") as file:
            head = file.read(24)
            if len(head) < 24:
                raise ValueError("the file ends early")
            (n,) = struct.unpack_from("<I", head, 20)
            tokens = array("i")
            data = file.read(4 * n)
            if not n or len(data) < 4 * n:
                raise ValueError("the file ends early")
            tokens.frombytes(data)
            file.seek(0)
            size = 0
            for part in self._parts(tokens, slot):
                if file.read(len(part)) != bytes(part):
                    raise ValueError(f"a byte from {size} on differs from what {n} tokens make")
                size += len(part)
            if file.read(1):
                raise ValueError("bytes are left over")
        return tokens, size

    def _parts(self, tokens: array[int], slot: int) -> Iterator[bytes | memoryview]:
        n = len(tokens)
        layout = Layout(
            shape=self.shape, n_stream=self._n_slots, slot=slot, v_trans=False, max_tokens=max(n, 1)
        )
        data = tokens.tobytes()
        yield tokens_frame(data)
        if not n:
            return
        head, tail = attention_frame(layout, array("i", range(n)), self.shape.ext, tokens)
        yield head + planes_head(self.shape.caches[0], False)
        places, last = _places(data)
        for segment in segments_of(self.shape):
            yield rows_head(Plane(segment.type, segment.row_bytes))
            for group, place in enumerate(places):
                rows = min(GROUP_TOKENS, n - group * GROUP_TOKENS)
                yield self._piece(place + 7919 * segment.index, rows * segment.row_bytes)
        if tail:
            yield tail
        recurrent = self.shape.recurrent
        assert recurrent is not None
        yield struct.pack("<IiIII", 1, n - 1, 0, 0, recurrent.n_layer)
        for number, plane in enumerate(recurrent.rows):
            yield rows_head(plane)
            yield self._piece(last + 104_729 * number, plane.row_bytes)

    def _piece(self, place: int, size: int) -> memoryview:
        at = 64 * place % _POOL_BYTES
        return self._pool[at : at + size]


def _places(tokens: bytes) -> tuple[list[int], int]:
    """Where in the pool each group's rows are, by the tokens before the group; and the recurrent state's."""
    step = 4 * GROUP_TOKENS
    places, digest = [], blake3(b"paced").digest()
    for at in range(0, len(tokens), step):
        places.append(int.from_bytes(digest[:4], "little"))
        digest = blake3(digest + tokens[at : at + step]).digest()
    return places, int.from_bytes(digest[:4], "little")


def _high_bytes() -> bytes:
    """Random byte -> high byte of an f16: its sign and mantissa stay random, its exponent is a likely one."""
    likely = [exponent for exponent, times in _EXPONENTS.items() for _ in range(times)]
    return bytes(byte & 0x80 | likely[byte >> 2 & 31] << 2 | byte & 3 for byte in range(256))


def _write_all(fd: int, parts: list[bytes | memoryview]) -> None:
    left = sum(len(part) for part in parts)
    while left:
        done = os.writev(fd, parts)
        left -= done
        while parts and done >= len(parts[0]):
            done -= len(parts.pop(0))
        if parts and done:
            parts[0] = memoryview(parts[0])[done:]
