"""Coverage-guided fuzzing of all that a peer says (offer, have, begin, commit, refusal) and of manifests.

    pip install -e '.[fuzz]'
    python bench/fuzz/messages.py -runs=200000 -rss_limit_mb=512 [CORPUS]

The first byte chooses the message. Found faults stop it: an exception that is not a `KvError`, or an
accepted offer whose plan has a frame out of bounds. The memory limit bounds what a claim may allocate.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["viiwork"]):
    from viiwork.wire import channel, delta, replica

import msgspec
from blake3 import blake3

from tests.fakes.savefiles import FORMS, make
from tests.fakes.statestore import info_of
from viiwork.errors import KvError
from viiwork.limits import KV_FRAME_MAX_BYTES, KV_GROUPS_MAX


def offer(data: bytes) -> None:
    found = replica.unpack_offer(data)
    starts = tuple(start for start, _ in delta.starts_of(found, 0, ()))
    for at, piece in enumerate(delta.pieces_of(found, replica.Have(), 0, starts)):
        assert 0 < piece.size <= KV_FRAME_MAX_BYTES and at < 4 * KV_GROUPS_MAX
    replica.line_of(found)
    replica.replica_name(found)
    assert replica.unpack_offer(replica.pack_message(found)) == found


def have(data: bytes) -> None:
    found = replica.unpack_have(data, OFFER)
    tokens = bytes(4 * OFFER.n_tokens)
    keep = delta.keep_of(OFFER, tokens, found, 0)
    assert 0 <= keep <= min(found.n, OFFER.n_tokens)
    for start, low in delta.starts_of(OFFER, keep, found.lows):
        assert 0 <= low <= start <= OFFER.n_tokens


def manifest(data: bytes) -> None:
    seal = blake3(data, derive_key_context=replica.SEAL_CONTEXT).digest()
    replica.unseal(data + seal)


def refusal(data: bytes) -> None:
    said = channel.unpack_refusal(data)
    assert said.reason in channel.REASONS and said.detail.isprintable() and len(said.detail) <= 200


READERS = (offer, have, replica.unpack_begin, replica.unpack_commit, manifest, refusal)


def one(data: bytes) -> None:
    if not data:
        return
    try:
        READERS[data[0] % len(READERS)](data[1:])
    except KvError:
        return


def offer_of(data: bytes) -> replica.Offer:
    info = info_of(data)
    recurrent = info.recurrent
    blobs = (
        (replica.BlobFacts(kind="recurrent", n_tokens=info.n_tokens, size=recurrent.size),)
        if recurrent
        else ()
    )
    return replica.Offer(
        session=bytes(32),
        model_fp=bytes(32),
        shape=info.shape,
        n_tokens=info.n_tokens,
        tokens_digest=info.tokens_digest,
        prefix=replica.prefix_digests(bytes(4 * info.n_tokens)),
        needed=tuple(rows.lo for rows in info.caches),
        blobs=blobs,
        known=(replica.Mark(generation=1, source="a", keep=1),),
        generation=2,
        source="a",
        created_unix_s=1.0,
    )


OFFERS = [offer_of(make(state)) for state in FORMS.values()]
OFFER = next(offer for offer in OFFERS if len(offer.shape.caches) == 2)


def seeds() -> list[bytes]:
    found = [b"\0" + replica.pack_message(offer) for offer in OFFERS]
    held = replica.Have(n=1, lows=(0, 0), common=0, tail=bytes(4), digests=bytes(16), blobs=OFFERS[-1].blobs)
    found.append(b"\1" + replica.pack_message(held))
    found.append(b"\2" + replica.pack_message(replica.Begin(keep=1)))
    found.append(b"\3" + replica.pack_message(replica.Commit(groups=(bytes(16),), blobs=(bytes(32),))))
    for offer in OFFERS:
        kept = replica.Manifest(
            session=offer.session,
            model_fp=offer.model_fp,
            shape=offer.shape,
            generation=1,
            source="a",
            created_unix_s=1.0,
            tokens=bytes(4 * offer.n_tokens),
            caches=tuple(
                replica.CacheManifest(lo=0, needed=0, digests=bytes(16)) for _ in offer.shape.caches
            ),
            blobs=tuple(replica.BlobManifest(facts=blob, digest=bytes(32)) for blob in offer.blobs),
        )
        found.append(b"\4" + msgspec.msgpack.encode(kept))
    found.append(b"\5" + channel.pack_refusal("busy", "later"))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for at, seed in enumerate(seeds()):
            one(seed)
            (Path(folder) / str(at)).write_bytes(seed)
        atheris.Setup([*sys.argv, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
