"""What a node says about a session's state: offer, what is held of it, commit, and the sealed manifest."""

from __future__ import annotations

from itertools import chain
from typing import TypeVar

import msgspec
from blake3 import blake3

from viiwork.errors import KvError
from viiwork.limits import (
    KV_BLOB_MAX_BYTES,
    KV_BLOBS_MAX,
    KV_FRAME_MAX_BYTES,
    KV_GROUPS_MAX,
    KV_LAYERS_MAX,
    KV_MANIFEST_MAX_BYTES,
    KV_MARKS_MAX,
    KV_MESSAGE_MAX_BYTES,
    KV_PREFIX_TOKENS,
    KV_ROW_MAX_BYTES,
    KV_STATE_MAX_BYTES,
    KV_TOKENS_MAX,
)
from viiwork.wire.groups import DIGEST_BYTES, cache_bytes, groups_of, rows_of_group
from viiwork.wire.state import GGML_TYPES, BlobKind, Plane, StateShape

MANIFEST_VERSION = 2
HASH_BYTES = 32
NAME_MAX_BYTES = 255
TOKEN_BYTES = 4
SEAL_CONTEXT = "viiwork kv manifest v2"
_M = TypeVar("_M")
_KINDS = (("base",), ("base", "swa"), ())  # the caches a state can have


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows below `keep` are the same in the offered state and in this earlier one."""

    generation: int
    source: str
    keep: int


class BlobFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recurrent state or checkpoint, as it stands in the sender's save-file."""

    kind: BlobKind
    n_tokens: int
    size: int
    pos_min: int = 0  # of a checkpoint
    pos_max: int = 0


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation of a session's state, before its rows have been read."""

    version: int = MANIFEST_VERSION
    session: bytes  # 32-byte hash of the session key
    model_fp: bytes  # 32-byte fingerprint of the weights and whatever changes their results
    shape: StateShape
    n_tokens: int
    tokens_digest: bytes  # BLAKE3 of the tokens as little-endian i32
    prefix: bytes  # `prefix_digests` of the tokens
    needed: tuple[int, ...]  # per cache: the lowest position the engine saved
    blobs: tuple[BlobFacts, ...] = ()
    known: tuple[Mark, ...] = ()
    generation: int  # milliseconds of the mesh's clock; a higher one replaces a lower one
    source: str  # node that made it
    created_unix_s: float


class Have(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the receiver holds that the offered state could keep."""

    n: int = 0  # positions whose rows are held, in every cache from its `lows` on
    lineage: bool = False  # they are known to be the offer's own, up to a mark; else `digests` tell
    lows: tuple[int, ...] = ()  # per cache: the first position held
    common: int = 0  # leading tokens that agree for certain; a multiple of KV_PREFIX_TOKENS
    tail: bytes = b""  # tokens held from `common` on, at most KV_PREFIX_TOKENS
    digests: bytes = b""  # of the groups of the only cache, when the lineage is not known
    blobs: tuple[BlobFacts, ...] = ()  # held, of these tokens


class Begin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The positions that stay; what follows is everything else."""

    keep: int


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Digests of what the state consists of from the first row sent on."""

    groups: tuple[bytes, ...]  # per cache, from the group of the first row sent on
    blobs: tuple[bytes, ...]  # BLAKE3 of each blob sent


class CacheManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is held of one cache: rows of [lo, n_tokens) and their group digests."""

    lo: int
    needed: int
    digests: bytes  # DIGEST_BYTES a group, from the group of `lo` on


class BlobManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    facts: BlobFacts
    digest: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica: what it is of, its tokens, and a digest of every byte it holds."""

    version: int = MANIFEST_VERSION
    session: bytes
    model_fp: bytes
    shape: StateShape
    generation: int
    source: str
    created_unix_s: float
    tokens: bytes  # little-endian i32
    caches: tuple[CacheManifest, ...]
    blobs: tuple[BlobManifest, ...] = ()

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def line_of(of: Offer | Manifest) -> bytes:
    """What generations replace each other within: one session on one model and one kind of state."""
    return blake3(of.session + of.model_fp + blake3(msgspec.msgpack.encode(of.shape)).digest()).digest()


def replica_name(of: Offer | Manifest) -> str:
    """Name of a replica: a hash, telling nothing."""
    words = (of.session, of.model_fp, of.generation.to_bytes(8, "big"), of.source.encode())
    return blake3(b"\0".join(words)).digest(length=16).hex()


def prefix_digests(tokens: bytes) -> bytes:
    """One digest of all tokens up to each multiple of KV_PREFIX_TOKENS."""
    step = KV_PREFIX_TOKENS * TOKEN_BYTES
    running, found = blake3(), bytearray()
    for at in range(step, len(tokens) + 1, step):
        running.update(tokens[at - step : at])
        found += running.digest(length=DIGEST_BYTES)
    return bytes(found)


def common_prefix(prefix: bytes, tokens: bytes) -> int:
    """How many leading tokens agree for certain, from an offer's digests; a multiple of KV_PREFIX_TOKENS."""
    own = prefix_digests(tokens)
    n = 0
    while n < min(len(own), len(prefix)) and own[n : n + DIGEST_BYTES] == prefix[n : n + DIGEST_BYTES]:
        n += DIGEST_BYTES
    return n // DIGEST_BYTES * KV_PREFIX_TOKENS


def longest_common(a: bytes, b: bytes) -> int:
    """How many leading tokens two lists share."""
    n = min(len(a), len(b)) // TOKEN_BYTES
    low = 0
    while low < n:  # halving: comparing bytes is one call, a loop over tokens is not
        middle = (low + n + 1) // 2
        if a[low * TOKEN_BYTES : middle * TOKEN_BYTES] == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            n = middle - 1
    return low


# -- bytes -----------------------------------------------------------------------------------------


def pack_message(message: Offer | Have | Begin | Commit) -> bytes:
    """Raises `KvError` (`too_large`) for what a peer would refuse."""
    data = msgspec.msgpack.encode(message)
    if len(data) > KV_MESSAGE_MAX_BYTES:
        raise KvError("too_large", f"{type(message).__name__} of {len(data)} bytes")
    return data


def unpack_offer(data: bytes | bytearray | memoryview) -> Offer:
    """Strict decode; raises `KvError` (`bad_offer`, `version`) for what no well-meaning peer sends."""
    if len(data) > KV_MESSAGE_MAX_BYTES:
        raise KvError("bad_offer", "the offer is too large")
    try:
        offer = _offers.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KvError("bad_offer", f"the offer cannot be read: {error}") from None
    if offer.version != MANIFEST_VERSION:
        raise KvError("version", f"an offer of version {offer.version}")
    if wrong := _wrong_offer(offer):
        raise KvError("bad_offer", f"the offer's {wrong} is out of bounds")
    return offer


def unpack_have(data: bytes, offer: Offer) -> Have:
    """Raises `KvError` (`protocol`)."""
    have: Have = _decoded(_haves, data)
    n_caches = len(offer.shape.caches)
    fine = (
        0 <= have.n <= KV_TOKENS_MAX
        and (have.n == 0 or len(have.lows) == n_caches)
        and all(0 <= low <= have.n for low in have.lows)
        and 0 <= have.common <= min(have.n, offer.n_tokens)
        and len(have.tail) <= KV_PREFIX_TOKENS * TOKEN_BYTES
        and len(have.tail) % TOKEN_BYTES == 0
        and len(have.digests) % DIGEST_BYTES == 0
        and len(have.blobs) <= KV_BLOBS_MAX
    )
    if not fine:
        raise KvError("protocol", "the peer says it holds what cannot be")
    return have


def unpack_begin(data: bytes) -> Begin:
    begin: Begin = _decoded(_begins, data)
    return begin


def unpack_commit(data: bytes) -> Commit:
    commit: Commit = _decoded(_commits, data)
    return commit


def seal(manifest: Manifest) -> bytes:
    """Bytes of a manifest file: its msgpack and then a BLAKE3 seal of it."""
    body = msgspec.msgpack.encode(manifest)
    return body + _seal_of(body)


def unseal(data: bytes) -> Manifest:
    """Inverse of `seal`; raises `KvError` (`bad_manifest`) when a bit differs."""
    body, tag = data[:-HASH_BYTES], data[-HASH_BYTES:]
    if len(data) > KV_MANIFEST_MAX_BYTES or _seal_of(body) != tag:
        raise KvError("bad_manifest", "the manifest's seal does not match")
    try:
        manifest = _manifests.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise KvError("bad_manifest", f"the manifest cannot be read: {error}") from None
    if manifest.version != MANIFEST_VERSION or wrong_shape(manifest.shape):
        raise KvError("bad_manifest", "the manifest is out of bounds")
    return manifest


def _seal_of(body: bytes) -> bytes:
    return blake3(body, derive_key_context=SEAL_CONTEXT).digest()


def _decoded(decoder: msgspec.msgpack.Decoder[_M], data: bytes) -> _M:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KvError("protocol", f"a message cannot be read: {error}") from None


# -- bounds ----------------------------------------------------------------------------------------


def _wrong_offer(offer: Offer) -> str:
    shape, n = offer.shape, offer.n_tokens
    checks = (
        ("session", len(offer.session) == HASH_BYTES),
        ("model_fp", len(offer.model_fp) == HASH_BYTES),
        ("tokens_digest", len(offer.tokens_digest) == HASH_BYTES),
        ("n_tokens", 1 <= n <= KV_TOKENS_MAX),
        ("prefix", len(offer.prefix) == n // KV_PREFIX_TOKENS * DIGEST_BYTES),
        ("generation", 0 <= offer.generation < 1 << 63),
        ("source", 1 <= len(offer.source.encode("utf-8", "replace")) <= NAME_MAX_BYTES),
        ("created_unix_s", 0 <= offer.created_unix_s < 1e12),
        ("known", len(offer.known) <= KV_MARKS_MAX),
    )
    wrong = next((name for name, fine in checks if not fine), "") or wrong_shape(shape)
    if wrong:
        return wrong
    rows = sum(cache_bytes(cache) * (n - low) for cache, low in zip(shape.caches, offer.needed, strict=False))
    later = (
        ("needed", len(offer.needed) == len(shape.caches) and all(0 <= low < n for low in offer.needed)),
        (
            "needed",
            all(low == 0 for c, low in zip(shape.caches, offer.needed, strict=False) if c.name == "base"),
        ),
        ("groups", all(groups_of(n, rows_of_group(cache)) <= KV_GROUPS_MAX for cache in shape.caches)),
        ("size", rows + sum(max(0, blob.size) for blob in offer.blobs) <= KV_STATE_MAX_BYTES),
        ("blobs", len(offer.blobs) <= KV_BLOBS_MAX and all(_blob_fits(blob, offer) for blob in offer.blobs)),
        ("blobs", len({(blob.kind, blob.n_tokens) for blob in offer.blobs}) == len(offer.blobs)),
        ("recurrent", shape.recurrent is None or any(_is_the_state(blob, n) for blob in offer.blobs)),
    )
    return next((name for name, fine in later if not fine), "")


def _is_the_state(blob: BlobFacts, n_tokens: int) -> bool:
    return blob.kind == "recurrent" and blob.n_tokens == n_tokens


def _blob_fits(blob: BlobFacts, offer: Offer) -> bool:
    if not (1 <= blob.n_tokens <= offer.n_tokens and 1 <= blob.size <= KV_BLOB_MAX_BYTES):
        return False
    if blob.kind == "recurrent":
        return offer.shape.recurrent is not None and blob.pos_min == blob.pos_max == 0
    return 0 <= blob.pos_min <= blob.pos_max < blob.n_tokens


def wrong_shape(shape: StateShape) -> str:
    """Which part of a shape no engine can have; "" = none."""
    recurrent = shape.recurrent
    if tuple(cache.name for cache in shape.caches) not in _KINDS or not (shape.caches or recurrent):
        return "caches"
    if recurrent is not None and not 1 <= len(recurrent.rows) <= 3 * KV_LAYERS_MAX:
        return "recurrent rows"
    for cache in shape.caches:
        if not 1 <= len(cache.k) <= KV_LAYERS_MAX or len(cache.v) not in (0, len(cache.k)):
            return "layers"
        if not all(map(_plane_fits, chain(cache.k, cache.v))):
            return "planes"
        if cache_bytes(cache) > KV_FRAME_MAX_BYTES:
            return "bytes a position"
    return ""


def _plane_fits(plane: Plane) -> bool:
    known = GGML_TYPES.get(plane.type)
    return known is not None and 0 < plane.row_bytes <= KV_ROW_MAX_BYTES and plane.row_bytes % known[2] == 0


_offers = msgspec.msgpack.Decoder(Offer)
_haves = msgspec.msgpack.Decoder(Have)
_begins = msgspec.msgpack.Decoder(Begin)
_commits = msgspec.msgpack.Decoder(Commit)
_manifests = msgspec.msgpack.Decoder(Manifest)
