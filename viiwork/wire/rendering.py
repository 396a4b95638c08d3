"""The plan of a save-file for one engine's slot, made of canonical rows and blobs."""

from __future__ import annotations

import struct
from array import array

import msgspec

from viiwork.errors import SaveFileError
from viiwork.limits import KV_STREAMS_MAX
from viiwork.wire.frames import (
    attention_frame,
    planes_head,
    positions_of,
    recurrent_bytes,
    rows_head,
    strips_head,
    tokens_frame,
)
from viiwork.wire.plan import BlobBytes, BlobTurned, Bytes, Part, StoreRows, StoreStrips, plan_bytes
from viiwork.wire.sections import APPENDIX_MAGIC, APPENDIX_VERSION, PARTIAL_MAGIC, words_of
from viiwork.wire.state import (
    GGML_TYPES,
    CacheRows,
    CacheShape,
    Checkpoint,
    Layout,
    Plane,
    Segment,
    StateShape,
    segments_of,
)


class StoredRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica holds of one cache: rows of positions [lo, n_tokens), without a gap.

    `needed` is the lowest position the engine itself saved at `n_tokens` (`CacheRows.lo`): 0 for a base
    cache, the start of the window for a sliding one. lo <= needed.
    """

    lo: int
    needed: int


class Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica as rendering sees it. Tokens are given beside it; blobs are named by kind and token count."""

    shape: StateShape
    n_tokens: int
    rows: tuple[StoredRows, ...]  # as in the shape
    recurrent: tuple[int, ...] = ()  # token counts after which a recurrent blob is held
    checkpoints: tuple[Checkpoint, ...] = ()


def longest(stored: Stored, target: Layout, at_most: int) -> int:
    """The most tokens, not over `at_most`, a file for the target can be rendered with; 0 = none.

    Attention rows can be cut anywhere; a recurrent state only where a blob was kept, a sliding window only
    where the rows before the cut are held.
    """
    most = min(at_most, stored.n_tokens, target.max_tokens)
    cuts = [most] if stored.shape.recurrent is None else sorted(stored.recurrent, reverse=True)
    return next((n for n in cuts if 1 <= n <= most and _starts(stored, target, n) is not None), 0)


def most_useful(stored: Stored, target: Layout, at_most: int) -> int:
    """With how many tokens to render for a prompt that has the first `at_most` in common; 0 = of no use.

    More than those where the engine goes back further in a whole state than a shorter one reaches: to a
    checkpoint in it, or within a window that is deep enough.
    """
    cut = longest(stored, target, at_most)
    if cut == min(at_most, target.max_tokens):
        return cut
    whole = longest(stored, target, stored.n_tokens)
    return whole if whole > cut and _back_to(stored, target, whole, at_most) > cut else cut


def _back_to(stored: Stored, target: Layout, n: int, at_most: int) -> int:
    """To how many tokens, not over `at_most`, the engine cuts a state of `n` tokens back by itself."""
    starts = _starts(stored, target, n) or []
    windows = [(rows, lo) for rows, lo in zip(stored.rows, starts, strict=True) if rows.needed]
    if stored.shape.recurrent is None and all(
        lo < at_most - (stored.n_tokens - rows.needed) for rows, lo in windows
    ):
        return at_most
    points = (point.n_tokens for point in _appended(stored, target, n))
    return max((at for at in points if at <= at_most), default=0)


def render_plan(stored: Stored, tokens: bytes, target: Layout, n_tokens: int = 0) -> list[Part]:
    """The parts, in order, of a file that restores the first `n_tokens` tokens (0 = all) into the target.

    `tokens` are the stored tokens as little-endian i32, at least `n_tokens` of them. Raises `SaveFileError`:
    `layout`, `too_long`, or `not_held` when a part such a file needs is not there. No plan names a row
    outside [lo, n_tokens), and in every plan the cells of the base cache are exactly the tokens.
    """
    n = n_tokens or stored.n_tokens
    if not 1 <= n <= stored.n_tokens or len(tokens) < 4 * n:
        raise SaveFileError("not_held", f"{n} of {stored.n_tokens} tokens, {len(tokens) // 4} given")
    ids = words_of(tokens[: 4 * n])
    _check(stored, ids, target, n)
    starts = _starts(stored, target, n)
    if starts is None or (stored.shape.recurrent is not None and n not in stored.recurrent):
        raise SaveFileError("not_held", f"the state after {n} of {stored.n_tokens} tokens is not held")
    plan: list[Part] = [Bytes(tokens_frame(tokens[: 4 * n]))]
    segments = segments_of(stored.shape)
    for at, (cache, lo) in enumerate(zip(stored.shape.caches, starts, strict=True)):
        pad = _is_padded(cache, stored.rows[at], target, lo, n)
        head, tail = attention_frame(target, array("i", range(lo - pad, n)), stored.shape.ext, ids)
        own = [segment for segment in segments if segment.cache == at]
        plan += [Bytes(head), *_planes(cache, own, lo, n, target.v_trans, pad), Bytes(tail)]
    if stored.shape.recurrent is not None:
        plan.append(BlobBytes("recurrent", n, 0, recurrent_bytes(stored.shape.recurrent)))
    plan += _appendix(stored, target, n, ids)
    return [part for part in plan if part.size]


def _check(stored: Stored, ids: array[int], target: Layout, n: int) -> None:
    shape = stored.shape
    if shape != target.shape:
        raise SaveFileError("layout", "the engine's cache is of another shape")
    if target.v_trans and any(s.part == "v" and not s.elem_bytes for s in segments_of(shape)):
        raise SaveFileError("layout", "quantised values cannot be kept channel by channel")
    if not 0 <= target.slot < (target.n_stream if target.n_stream > 1 else KV_STREAMS_MAX):
        raise SaveFileError("layout", f"slot {target.slot} of {target.n_stream}")
    if n > target.max_tokens:
        raise SaveFileError("too_long", f"{n} tokens, the slot holds {target.max_tokens}")
    if min(ids) < 0 or (target.n_vocab and max(ids) >= target.n_vocab):
        raise SaveFileError("layout", "a token is outside the vocabulary")


def _starts(stored: Stored, target: Layout, n: int) -> list[int] | None:
    """The first position each cache has in the file; None when rows it needs are not held."""
    starts: list[int] = []
    for cache, rows in zip(stored.shape.caches, stored.rows, strict=True):
        start = 0 if cache.name == "base" else _window_start(rows, stored.n_tokens, target.swa_rows, n)
        needed = rows.needed if cache.name == "swa" and n == stored.n_tokens else start
        if rows.lo > needed or start >= n:
            return None
        starts.append(start)
    return starts


def _window_start(rows: StoredRows, n_tokens: int, swa_rows: int, n: int) -> int:
    # At the end what the engine saved is enough; more lets the next prompt go back a little. Before the end
    # nobody said what is enough, so it is all that the target's cache takes.
    if n < n_tokens:
        return max(0, n - swa_rows) if swa_rows else 0
    return min(rows.needed, max(rows.lo, n - swa_rows)) if swa_rows else rows.needed


def _is_padded(cache: CacheShape, rows: StoredRows, target: Layout, lo: int, n: int) -> bool:
    # Strips would have the zeros in their middle; a transposed window goes back to a checkpoint instead.
    return target.swa_pad and cache.name == "swa" and 0 < lo == rows.needed < n and not target.v_trans


def _planes(
    cache: CacheShape, segments: list[Segment], lo: int, n: int, v_trans: bool, pad: bool
) -> list[Part]:
    """K and V of one cache, from the store."""
    plan: list[Part] = [Bytes(planes_head(cache, v_trans))]
    for segment in segments:
        plane, count = Plane(segment.type, segment.row_bytes), n - lo
        if segment.part == "v" and v_trans:
            strips = StoreStrips(segment.index, lo, count, segment.n_channels, segment.elem_bytes)
            plan += [Bytes(strips_head(plane)), strips]
        else:
            rows = StoreRows(segment.index, lo, count, count * segment.row_bytes)
            plan += [Bytes(rows_head(plane)), Bytes(bytes(plane.row_bytes if pad else 0)), rows]
    return plan


def _appendix(stored: Stored, target: Layout, n: int, ids: array[int]) -> list[Part]:
    """The newest checkpoints that are of these tokens, oldest first, as the engine writes them."""
    kept = _appended(stored, target, n)
    if not kept:
        return []
    plan: list[Part] = [Bytes(struct.pack("<3I", APPENDIX_MAGIC, APPENDIX_VERSION, len(kept)))]
    for checkpoint in kept:
        state = _checkpoint(stored.shape, checkpoint, target, ids)
        facts = checkpoint.n_tokens, checkpoint.pos_min, checkpoint.pos_max, plan_bytes(state)
        plan += [Bytes(struct.pack("<qiiQ", *facts)), *state, Bytes(bytes(16))]  # no draft, no speculation
    return plan


def _appended(stored: Stored, target: Layout, n: int) -> list[Checkpoint]:
    """The checkpoints that go into a file of `n` tokens, oldest first."""
    fitting = sorted((c for c in stored.checkpoints if c.n_tokens <= n), key=lambda c: c.n_tokens)
    return fitting[-target.checkpoints :] if target.checkpoints > 0 else []


def _checkpoint(shape: StateShape, checkpoint: Checkpoint, target: Layout, ids: array[int]) -> list[Part]:
    """One checkpoint's state: its rows stay in their cells, what names slots and V order is made anew."""
    plan: list[Part] = [Bytes(struct.pack("<II", PARTIAL_MAGIC, target.slot))]
    windows = [cache for cache in shape.caches if cache.name == "swa"]
    for cache, rows in zip(windows, checkpoint.caches, strict=True):
        head, tail = attention_frame(target, positions_of(rows.runs), shape.ext, ids)
        plan += [Bytes(head), Bytes(planes_head(cache, target.v_trans))]
        for plane, offset in zip(cache.k, rows.data, strict=False):
            plan += [Bytes(rows_head(plane)), _copied(checkpoint, offset, rows.cells * plane.row_bytes)]
        for plane, offset in zip(cache.v, rows.data[len(cache.k) :], strict=True):
            plan += _values(checkpoint, plane, rows, offset, target.v_trans)
        plan.append(Bytes(tail))
    if checkpoint.recurrent is not None:
        plan.append(_copied(checkpoint, checkpoint.recurrent.offset, checkpoint.recurrent.size))
    return plan


def _values(checkpoint: Checkpoint, plane: Plane, rows: CacheRows, offset: int, v_trans: bool) -> list[Part]:
    head = strips_head(plane) if v_trans else rows_head(plane)
    if rows.v_trans == v_trans:
        return [Bytes(head), _copied(checkpoint, offset, rows.cells * plane.row_bytes)]
    size = GGML_TYPES[plane.type][2]
    n_channels = plane.row_bytes // size
    shape = (n_channels, rows.cells) if rows.v_trans else (rows.cells, n_channels)
    return [Bytes(head), BlobTurned("checkpoint", checkpoint.n_tokens, offset, *shape, size)]


def _copied(checkpoint: Checkpoint, offset: int, size: int) -> BlobBytes:
    return BlobBytes("checkpoint", checkpoint.n_tokens, offset, size)
