"""Reads llama.cpp's slot save-files: every form of them, bounded, nothing believed before it is checked.

The file names neither its memory kind nor whether cells carry extra words nor whether V rows exist, so
every known form is tried and the file is accepted when exactly one ends where it ends. A crafted file can
abort an engine; from what passes here no such file can be made.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from viiwork.errors import SaveFileError
from viiwork.limits import KV_STATE_MAX_BYTES, KV_TOKENS_MAX
from viiwork.wire.cells import read_cells
from viiwork.wire.checkpoint import checkpoint_of
from viiwork.wire.sections import (
    MAGIC,
    PACK_VERSION,
    PACKED,
    VERSION,
    AppendedCheckpoint,
    Attention,
    Cursor,
    Misfit,
    PRead,
    Recurrent,
    read_appendix,
    read_attention,
    read_recurrent,
    words_of,
)
from viiwork.wire.state import (
    Blob,
    CacheName,
    CacheRows,
    CacheShape,
    Layout,
    RecurrentShape,
    SaveInfo,
    StateShape,
)

COMPRESSED_MAGIC = 0x34565344  # of deepseek4's memory, in place of a stream count


def parse(pread: PRead, total: int, *, n_vocab: int = 0) -> SaveInfo:
    """Check a whole save-file and return its facts; rows and recurrent states are not read.

    Raises `SaveFileError`: `bad_file` when it is damaged or not a save-file, `not_portable` when it is a
    form that is not moved between engines, `too_large`.
    """
    if total > KV_STATE_MAX_BYTES:
        raise SaveFileError("too_large", f"a save-file of {total} bytes is over the limit")
    cursor = Cursor(pread, total)
    tokens, tokens_offset, digest = _tokens(cursor)
    highest = max(tokens)
    if n_vocab and highest >= n_vocab:
        raise SaveFileError("bad_file", f"token {highest} is outside the vocabulary of {n_vocab}")
    reading = _only_reading(pread, total, cursor.offset)
    _portable(reading)
    caches, seq_id = _caches(pread, reading, tokens)
    recurrent = reading.recurrent
    if recurrent is not None and recurrent.pos != len(tokens) - 1:
        raise SaveFileError("bad_file", f"{len(tokens)} tokens, the recurrent state is at {recurrent.pos}")
    shape = _shape(reading)
    # Of two checkpoints at one place the later one stands.
    checkpoints = {at.n_tokens: checkpoint_of(pread, shape, tokens, at) for at in reading.appendix or ()}
    return SaveInfo(
        shape=shape,
        n_tokens=len(tokens),
        tokens_offset=tokens_offset,
        tokens_digest=digest,
        max_token=highest,
        n_stream=reading.caches[0].n_stream if reading.caches else 1,
        stream=reading.caches[0].stream if reading.caches else 0,
        seq_id=seq_id,
        v_trans=any(cache.v_trans for cache in reading.caches),
        caches=caches,
        recurrent=Blob(n_tokens=len(tokens), offset=recurrent.offset, size=recurrent.size)
        if recurrent
        else None,
        checkpoints=tuple(checkpoints[at] for at in sorted(checkpoints)),
        payload_bytes=reading.end,
        total_bytes=total,
    )


def layout_of(probe: SaveInfo, *, slot: int, max_tokens: int, n_vocab: int = 0) -> Layout:
    """The layout a probe save of an engine tells of; checkpoints and window depth it does not."""
    return Layout(
        shape=probe.shape,
        n_stream=probe.n_stream,
        slot=slot,
        v_trans=probe.v_trans,
        max_tokens=max_tokens,
        n_vocab=n_vocab,
    )


def check_recurrent(shape: StateShape, pread: PRead, size: int) -> int:
    """Tokens a received recurrent blob stands for; raises `SaveFileError` when it is not of this shape."""
    cursor = Cursor(pread, size)
    try:
        found = read_recurrent(cursor)
    except Misfit:
        found = None
    if found is None or cursor.left() or _recurrent_shape(found) != shape.recurrent:
        raise SaveFileError("bad_file", "the recurrent state is not one of this model")
    return found.pos + 1


def _tokens(cursor: Cursor) -> tuple[array[int], int, bytes]:
    """The token list, its offset and its digest; the cursor stands behind the payload."""
    try:
        magic, version, words = struct.unpack("<3I", cursor.bytes(12))
        if magic != MAGIC:
            raise SaveFileError("bad_file", "not a save-file")
        if version != VERSION:
            raise SaveFileError("not_portable", f"save-file version {version}, known is {VERSION}")
        if not 5 <= words <= KV_TOKENS_MAX + 4:
            raise SaveFileError("bad_file", f"a token payload of {words} words")
        offset = cursor.offset
        data = cursor.bytes(4 * words)
    except Misfit as misfit:
        raise SaveFileError("bad_file", str(misfit)) from None
    payload = words_of(data)
    if payload[0] != PACKED or payload[1] != PACK_VERSION:
        raise SaveFileError("not_portable", "the token list is in a form that is not moved")
    n_tokens = payload[2]
    if not 1 <= n_tokens <= words - 4:
        raise SaveFileError("bad_file", f"{n_tokens} tokens in a payload of {words} words")
    n_media = payload[3 + n_tokens]
    if n_media:
        raise SaveFileError("not_portable", "the session holds media")
    if n_tokens != words - 4:
        raise SaveFileError("bad_file", f"{n_tokens} tokens in a payload of {words} words")
    tokens = payload[3:-1]
    if min(tokens) < 0:
        raise SaveFileError("bad_file", "a token below zero")
    return tokens, offset + 12, blake3(data[12:-4]).digest()


@dataclass(frozen=True, slots=True)
class _Reading:
    """The file as one form reads it."""

    form: str
    ext: bool
    caches: tuple[Attention, ...]
    recurrent: Recurrent | None
    end: int  # of what is not appendix
    appendix: list[AppendedCheckpoint] | None


# name -> sections: `kv` = K and V, `k` = K only, `rs` = recurrent. Those with an `indexer` are known only to
# be told apart from damage.
_FORMS: dict[str, tuple[str, ...]] = {
    "dense": ("kv",),
    "dense, keys only": ("k",),
    "swa": ("kv", "kv"),
    "hybrid": ("kv", "rs"),
    "hybrid, keys only": ("k", "rs"),
    "hybrid-swa": ("kv", "kv", "rs"),
    "recurrent": ("rs",),
    "indexer": ("kv", "k"),
    "indexer, keys only": ("k", "k"),
    "indexer, keys only, swa": ("k", "k", "k"),
    "hybrid indexer": ("kv", "rs", "k"),
    "hybrid indexer, keys only": ("k", "rs", "k"),
    "hybrid indexer with values": ("kv", "rs", "kv"),
}


def _only_reading(pread: PRead, total: int, start: int) -> _Reading:
    if Cursor(pread, total, start).peek_u32() == COMPRESSED_MAGIC:
        raise SaveFileError("not_portable", "the memory is deepseek4's")
    found = list(_readings(pread, total, start))
    if not found:
        raise SaveFileError("bad_file", "no known memory layout ends where the file ends")
    if len(found) > 1:
        names = ", ".join(sorted(reading.form for reading in found))
        raise SaveFileError("not_portable", f"{len(found)} memory layouts fit the file: {names}")
    return found[0]


def _readings(pread: PRead, total: int, start: int) -> Iterator[_Reading]:
    for form, sections in _FORMS.items():
        for ext in (False, True) if sections != ("rs",) else (False,):
            cursor = Cursor(pread, total, start)
            caches: list[Attention] = []
            recurrent = None
            appendix: list[AppendedCheckpoint] | None = []
            try:
                for section in sections:
                    if section == "rs":
                        recurrent = read_recurrent(cursor)
                    else:
                        caches.append(read_attention(cursor, ext=ext, has_v=section == "kv"))
                end = cursor.offset
                if cursor.left():
                    appendix = read_appendix(cursor)
            except Misfit:
                continue
            yield _Reading(form, ext, tuple(caches), recurrent, end, appendix)


def _portable(reading: _Reading) -> None:
    if "indexer" in reading.form:
        raise SaveFileError("not_portable", f"the memory has an indexer ({reading.form})")
    if reading.appendix is None:
        raise SaveFileError("not_portable", "the checkpoints are of a version that is not known")
    if any(entry.others for entry in reading.appendix):
        raise SaveFileError("not_portable", "the checkpoints hold a draft model's state")


def _caches(pread: PRead, reading: _Reading, tokens: array[int]) -> tuple[tuple[CacheRows, ...], int]:
    """Where each cache has its rows, and the sequence they are of; all of it checked."""
    found: list[CacheRows] = []
    seq_ids: set[int] = set()
    forms: set[tuple[int, int, bool]] = set()
    for at, cache in enumerate(reading.caches):
        cells = read_cells(pread, cache.meta_offset, cache.cells, reading.ext, tokens)
        if cells.lo + cache.cells != len(tokens) or (at == 0 and cells.lo):
            raise SaveFileError("bad_file", f"{cache.cells} cells from {cells.lo}, {len(tokens)} tokens")
        seq_ids.add(cells.seq_id)
        forms.add((cache.n_stream, cache.stream, cache.v_trans))
        found.append(
            CacheRows(
                cells=cache.cells,
                lo=cells.lo,
                runs=cells.runs,
                v_trans=cache.v_trans,
                data=cache.data,
            )
        )
    if len(seq_ids) > 1 or len(forms) > 1:
        raise SaveFileError("bad_file", "the caches are laid out differently")
    seq_id = min(seq_ids, default=0)
    if any(n_stream > 1 and stream != seq_id for n_stream, stream, _ in forms):
        raise SaveFileError("bad_file", f"sequence {seq_id} stands in another one's stream")
    return tuple(found), seq_id


def _shape(reading: _Reading) -> StateShape:
    names: tuple[CacheName, ...] = ("base", "swa")
    return StateShape(
        state_version=VERSION,
        ext=reading.ext,
        caches=tuple(
            CacheShape(name=name, n_rot_k=cache.rot[0], n_rot_v=cache.rot[1], k=cache.k, v=cache.v)
            for name, cache in zip(names, reading.caches, strict=False)
        ),
        recurrent=_recurrent_shape(reading.recurrent) if reading.recurrent else None,
    )


def _recurrent_shape(found: Recurrent) -> RecurrentShape:
    return RecurrentShape(n_layer=found.n_layer, rows=found.rows)
