"""What a node says about a session's state: the offer before it is sent, the sealed manifest after."""

from __future__ import annotations

import msgspec
from blake3 import blake3

from viiwork.errors import KvError
from viiwork.limits import (
    KV_CHUNK_MAX_BYTES,
    KV_LAYERS_MAX,
    KV_MESSAGE_MAX_BYTES,
    KV_ROW_MAX_BYTES,
    KV_STATE_MAX_BYTES,
    KV_TOKENS_MAX,
    MIB,
)
from viiwork.wire.whole_file import GGML_TYPES, Plane, StateShape

MANIFEST_VERSION = 1
DIGEST_BYTES = 32
NAME_MAX_BYTES = 255
CHUNK_MIN_BYTES = 64 * 1024  # below the last chunk's size a digest list would outgrow its state
SEAL_CONTEXT = "viiwork kv manifest v1"


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation of a session's state, before its bytes have been read."""

    version: int = MANIFEST_VERSION
    session: bytes  # 32-byte hash of the session key
    model_fp: bytes  # 32-byte fingerprint of the weights and whatever changes their results
    shape: StateShape
    n_tokens: int
    tokens_digest: bytes
    total_bytes: int
    chunk_bytes: int
    generation: int  # milliseconds of the mesh's clock; a higher one replaces a lower one
    source: str  # node that made it
    created_unix_s: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A committed generation: the offer and the root of its content."""

    offer: Offer
    root: bytes  # `root_of` the chunk digests

    @property
    def name(self) -> str:
        return replica_name(self.offer)


def line_of(offer: Offer) -> bytes:
    """What generations replace each other within: one session on one model."""
    return blake3(offer.session + offer.model_fp).digest()


def replica_name(offer: Offer) -> str:
    """Name of a replica: a hash, safe as a file name and telling nothing."""
    words = (offer.session, offer.model_fp, offer.generation.to_bytes(8, "big"), offer.source.encode())
    return blake3(b"\0".join(words)).digest(length=16).hex()


def root_of(chunk_digests: bytes) -> bytes:
    """Name of a whole content, from the BLAKE3 digests of its chunks in order.

    Chunks are hashed once, for the frame's proof and for this; so the root depends on the chunk size,
    which the offer states.
    """
    return blake3(chunk_digests).digest()


def n_chunks(offer: Offer) -> int:
    return -(-offer.total_bytes // offer.chunk_bytes)


def pack_offer(offer: Offer) -> bytes:
    return msgspec.msgpack.encode(offer)


def unpack_offer(data: bytes | bytearray | memoryview) -> Offer:
    """Strict decode; raises `KvError` (`bad_offer`) for anything a well-meaning peer would not send."""
    if len(data) > KV_MESSAGE_MAX_BYTES:
        raise KvError("bad_offer", "the offer is too large")
    try:
        offer = _offers.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KvError("bad_offer", f"the offer cannot be read: {error}") from None
    wrong = _wrong_with(offer)
    if wrong:
        raise KvError("bad_offer", f"the offer's {wrong} is out of bounds")
    return offer


def seal(manifest: Manifest) -> bytes:
    """Bytes of a manifest file: its msgpack and then a BLAKE3 seal of it."""
    body = msgspec.msgpack.encode(manifest)
    return body + _seal_of(body)


def unseal(data: bytes) -> Manifest:
    """Inverse of `seal`; raises `KvError` (`bad_manifest`) when a bit differs."""
    body, tag = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(data) > KV_MESSAGE_MAX_BYTES or _seal_of(body) != tag:
        raise KvError("bad_manifest", "the manifest's seal does not match")
    try:
        manifest = _manifests.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise KvError("bad_manifest", f"the manifest cannot be read: {error}") from None
    if _wrong_with(manifest.offer) or len(manifest.root) != DIGEST_BYTES:
        raise KvError("bad_manifest", "the manifest is out of bounds")
    return manifest


def _seal_of(body: bytes) -> bytes:
    return blake3(body, derive_key_context=SEAL_CONTEXT).digest()


def _wrong_with(offer: Offer) -> str:
    shape = offer.shape
    checks = (
        ("version", offer.version == MANIFEST_VERSION),
        ("session", len(offer.session) == DIGEST_BYTES),
        ("model_fp", len(offer.model_fp) == DIGEST_BYTES),
        ("tokens_digest", len(offer.tokens_digest) == DIGEST_BYTES),
        ("n_tokens", 1 <= offer.n_tokens <= KV_TOKENS_MAX),
        ("total_bytes", 1 <= offer.total_bytes <= KV_STATE_MAX_BYTES),
        ("chunk_bytes", CHUNK_MIN_BYTES <= offer.chunk_bytes <= KV_CHUNK_MAX_BYTES),
        ("generation", 0 <= offer.generation < 1 << 63),
        ("source", 1 <= len(offer.source.encode()) <= NAME_MAX_BYTES),
        ("created_unix_s", 0 <= offer.created_unix_s < 1e12),
        ("shape", shape.kind == "dense" and not shape.ext and 1 <= len(shape.k) <= KV_LAYERS_MAX),
        ("planes", len(shape.v) in (0, len(shape.k)) and all(map(_plane_ok, (*shape.k, *shape.v)))),
        # A state is its rows, its token and cell lists and the headers; more than that is not one.
        ("total_bytes", offer.n_tokens * shape.token_bytes <= offer.total_bytes),
        ("total_bytes", offer.total_bytes <= offer.n_tokens * (shape.token_bytes + 16) + MIB),
    )
    return next((name for name, fine in checks if not fine), "")


def _plane_ok(plane: Plane) -> bool:
    return plane.type in GGML_TYPES and 0 < plane.row_bytes <= KV_ROW_MAX_BYTES


_offers = msgspec.msgpack.Decoder(Offer)
_manifests = msgspec.msgpack.Decoder(Manifest)
