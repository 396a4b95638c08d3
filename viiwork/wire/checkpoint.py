"""The engine's context checkpoints: a sliding window and a recurrent state as they were some tokens ago.

A checkpoint's bytes name the source's slots and V order, so they are parsed as strictly as a save-file and
fitted to the target when they are rendered.
"""

from __future__ import annotations

from array import array

from viiwork.errors import SaveFileError
from viiwork.limits import KV_BLOB_MAX_BYTES
from viiwork.wire.cells import read_cells
from viiwork.wire.sections import (
    PARTIAL_MAGIC,
    AppendedCheckpoint,
    Attention,
    Cursor,
    Misfit,
    PRead,
    Recurrent,
    read_attention,
    read_recurrent,
    words_of,
)
from viiwork.wire.state import Blob, CacheRows, CacheShape, Checkpoint, StateShape


def check_checkpoint(
    shape: StateShape, pread: PRead, size: int, tokens: bytes, n_tokens: int, pos_min: int, pos_max: int
) -> Checkpoint:
    """Facts of a received checkpoint of `size` bytes, with offset 0; raises `SaveFileError`.

    `tokens` are the session's, as little-endian i32: with `ext` shapes every cell names its token.
    """
    entry = AppendedCheckpoint(n_tokens, pos_min, pos_max, 0, size, 0)
    return checkpoint_of(pread, shape, words_of(tokens), entry)


def checkpoint_of(
    pread: PRead, shape: StateShape, tokens: array[int], entry: AppendedCheckpoint
) -> Checkpoint:
    """Check one entry of an appendix; raises `SaveFileError` (`bad_file`)."""
    swa = next((cache for cache in shape.caches if cache.name == "swa"), None)
    whole = 0 <= entry.pos_min <= entry.pos_max == entry.n_tokens - 1 < len(tokens)
    if not whole or not 8 < entry.size <= KV_BLOB_MAX_BYTES or (swa is None and shape.recurrent is None):
        raise _bad("its positions or its size")

    def within(offset: int, size: int) -> bytes:
        return pread(entry.offset + offset, size)

    cursor = Cursor(within, entry.size)
    window, recurrent = None, None
    try:
        if cursor.u32() != PARTIAL_MAGIC:
            raise _bad("its magic")
        cursor.u32()  # the source's sequence
        if swa is not None:
            window = read_attention(cursor, ext=shape.ext, has_v=bool(swa.v))
        if shape.recurrent is not None:
            recurrent = read_recurrent(cursor)
    except Misfit as misfit:
        raise _bad(str(misfit)) from None
    if cursor.left():
        raise _bad("bytes left over")
    return Checkpoint(
        n_tokens=entry.n_tokens,
        pos_min=entry.pos_min,
        pos_max=entry.pos_max,
        offset=entry.offset,
        size=entry.size,
        caches=(_window(within, shape, swa, window, tokens, entry),) if swa and window else (),
        recurrent=_recurrent(shape, recurrent, entry) if recurrent else None,
    )


def _window(
    pread: PRead,
    shape: StateShape,
    swa: CacheShape,
    found: Attention,
    tokens: array[int],
    entry: AppendedCheckpoint,
) -> CacheRows:
    if (found.k, found.v, found.rot) != (swa.k, swa.v, (swa.n_rot_k, swa.n_rot_v)):
        raise _bad("its window is of another cache")
    cells = read_cells(pread, found.meta_offset, found.cells, shape.ext, tokens)
    if cells.lo + found.cells != entry.n_tokens or cells.lo < entry.pos_min:
        raise _bad("its window is elsewhere")
    return CacheRows(cells=found.cells, lo=cells.lo, runs=cells.runs, v_trans=found.v_trans, data=found.data)


def _recurrent(shape: StateShape, found: Recurrent, entry: AppendedCheckpoint) -> Blob:
    wanted = shape.recurrent
    if wanted is None or (found.n_layer, found.rows) != (wanted.n_layer, wanted.rows):
        raise _bad("its recurrent state is of another model")
    if found.pos != entry.pos_max:
        raise _bad("its recurrent state is elsewhere")
    return Blob(n_tokens=entry.n_tokens, offset=found.offset, size=found.size)


def _bad(what: str) -> SaveFileError:
    return SaveFileError("bad_file", f"a checkpoint is damaged: {what}")
