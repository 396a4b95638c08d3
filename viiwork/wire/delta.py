"""What of an offered state has to travel: decided alike by both ends of a transfer."""

from __future__ import annotations

from collections.abc import Iterator

from viiwork.limits import KV_PREFIX_TOKENS
from viiwork.wire.groups import Piece, blob_pieces, row_pieces, token_pieces
from viiwork.wire.replica import TOKEN_BYTES, Have, Offer, longest_common
from viiwork.wire.rows import take_from


def keep_of(offer: Offer, tokens: bytes, have: Have, same_rows: int) -> int:
    """How many leading rows need not be sent: held, of the same tokens, and known to be the same.

    `same_rows` is what comparing digests found, where the lineage is not known.
    """
    tail = tokens[have.common * TOKEN_BYTES : (have.common + KV_PREFIX_TOKENS) * TOKEN_BYTES]
    agreed = have.common + longest_common(tail, have.tail)
    keep = min(have.n, agreed, offer.n_tokens)
    return keep if have.lineage else min(keep, same_rows)


def starts_of(offer: Offer, keep: int, lows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Per cache: the first row to send, and the first one held afterwards; `lows` are those held before."""
    if keep == 0:
        lows = (0,) * len(offer.needed)
    pairs = zip(offer.needed, lows, strict=True)
    return tuple(take_from(needed, keep, low) for needed, low in pairs)


def pieces_of(offer: Offer, have: Have, keep: int, starts: tuple[int, ...]) -> Iterator[Piece]:
    """Every data frame, in order: tokens, rows, blobs."""
    yield from token_pieces(keep, offer.n_tokens)
    yield from row_pieces(offer.shape.caches, starts, offer.n_tokens)
    for index, blob in enumerate(offer.blobs):
        if blob.n_tokens > keep or blob not in have.blobs:
            yield from blob_pieces(index, blob.size)
