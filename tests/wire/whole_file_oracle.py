"""A reference reader of save-files: simple, unbounded, in memory whole. The law for `whole_file.parse`."""

from __future__ import annotations

import struct
from typing import Any

BLOCK = {0: 4, 1: 2, 2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 20: 18, 30: 2}


class Bad(Exception):
    pass


class Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, form: str) -> Any:
        size = struct.calcsize(form)
        values = struct.unpack_from(form, self.data, self.skip(size))
        return values if len(values) > 1 else values[0]

    def skip(self, size: int) -> int:
        if self.at + size > len(self.data):
            raise Bad("end of file")
        start, self.at = self.at, self.at + size
        return start


def header(reader: Reader) -> tuple[int, ...]:
    magic, version, n = reader.take("<3I")
    if magic != 0x67677371 or version != 4:
        raise Bad("magic or version")
    words = struct.unpack_from(f"<{n}i", reader.data, reader.skip(4 * n))
    if n < 4 or words[:2] != (-1, 1) or words[2] != n - 4 or words[-1] != 0:
        raise Bad("not a packed list of text tokens")
    return words[3:-1]


def attention(reader: Reader, ext: bool, has_v: bool) -> dict[str, Any]:
    n_stream = reader.take("<I")
    if not 1 <= n_stream <= 256:
        raise Bad("streams")
    streams: list[dict[str, Any]] = []
    for stream in range(n_stream):
        cells = reader.take("<I")
        if cells == 0:
            continue
        found: dict[str, Any] = {"stream": stream, "cells": cells}
        form, size = ("<iIiiii", 24) if ext else ("<iIi", 12)
        start = reader.skip(cells * size)
        metas = [struct.unpack_from(form, reader.data, start + i * size) for i in range(cells)]
        if any(meta[1] != 1 or meta[0] < 0 for meta in metas):
            raise Bad("cell")
        found["positions"] = [meta[0] for meta in metas]
        found["data"] = reader.at
        v_trans, n_layer, rot_k, rot_v = reader.take("<4I")
        if v_trans > 1 or not 1 <= n_layer <= 1024:
            raise Bad("data header")
        found |= {"v_trans": v_trans, "rot": (rot_k, rot_v)}
        found["k"] = [rows(reader, cells) for _ in range(n_layer)]
        if has_v:
            found["v"] = [strips(reader, cells) if v_trans else rows(reader, cells) for _ in range(n_layer)]
        else:
            found["v"] = []
        streams.append(found)
    return {"n_stream": n_stream, "streams": streams}


def rows(reader: Reader, cells: int) -> tuple[int, int]:
    type_, row = reader.take("<iQ")
    if type_ not in BLOCK or row == 0 or row > 1 << 24 or row % BLOCK[type_]:
        raise Bad("rows")
    reader.skip(cells * row)
    return type_, row


def strips(reader: Reader, cells: int) -> tuple[int, int]:
    type_, element, channels = reader.take("<iII")
    if type_ not in BLOCK or element != BLOCK[type_] or not 1 <= channels <= 1 << 20:
        raise Bad("strips")
    reader.skip(cells * element * channels)
    return type_, element * channels


def read_dense(data: bytes) -> list[dict[str, Any]]:
    """Every reading of `data` as one attention cache and nothing else."""
    try:
        reader = Reader(data)
        tokens = header(reader)
    except Bad:
        return []
    start, fits = reader.at, []
    for ext in (False, True):
        for has_v in (True, False):
            reader = Reader(data, start)
            try:
                found = attention(reader, ext, has_v)
            except Bad:
                continue
            if reader.at == len(data):
                fits.append({**found, "ext": ext, "has_v": has_v, "tokens": tokens, "state": start})
    return fits
