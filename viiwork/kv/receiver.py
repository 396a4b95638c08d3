"""Takes one state from a peer's worker: one thread receives, the other proves, unpacks and writes."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from blake3 import blake3

from viiwork.errors import ChannelError, KvError
from viiwork.kv.buffers import new_buffer
from viiwork.kv.compress import Unpacker
from viiwork.kv.incoming import Incoming
from viiwork.kv.jobs import ReceiveDone, ReceiveGrant, Stages
from viiwork.kv.link import Cancel, Link
from viiwork.kv.pipeline import PartnerStopped, Pipeline
from viiwork.kv.store import ReplicaStore
from viiwork.limits import KV_LINGER_S
from viiwork.wire.channel import TAG_BYTES, Codec, FrameType, Header, Opener, Sealer, pack_refusal
from viiwork.wire.delta import pieces_of
from viiwork.wire.groups import Piece, cache_bytes
from viiwork.wire.replica import (
    Have,
    Manifest,
    Mark,
    Offer,
    pack_message,
    replica_name,
    unpack_begin,
    unpack_commit,
    unpack_offer,
)


def receive_state(
    sock: socket.socket, grant: ReceiveGrant, store: ReplicaStore, cancel: Cancel, *, aes: bool = False
) -> ReceiveDone:
    """Verify and commit one replica. Closes `sock`; raises `KvError` with only verified rows left behind.

    `aes`: AES-GCM is the faster cipher here.
    """
    started = time.monotonic()
    stages = Stages()
    link = Link(sock, grant, cancel)
    try:
        session = link.respond(grant, aes=aes)
        stages.handshake_s = time.monotonic() - started
        sealer = Sealer(session.send, encrypt=session.encrypt, aes=session.aes)
        opener = Opener(session.receive, encrypt=session.encrypt, aes=session.aes)
        incoming: Incoming | None = None
        try:
            offer = _offer(link, opener, grant)
            incoming = Incoming(store, offer, cancel)
            have = incoming.have()
            link.send_message(sealer, FrameType.HAVE, pack_message(have))
            raw_bytes, commit = _take(link, opener, offer, have, incoming, stages)
            begun = time.monotonic()
            incoming.check(unpack_commit(commit))
            manifest, replaced = incoming.commit()
            stages.verify_s += time.monotonic() - begun
        except KvError as error:
            type_ = FrameType.REFUSE if incoming is None else FrameType.NACK
            if incoming is not None:
                incoming.close()  # before the last words: they may take seconds
            _say_no(link, sealer, type_, error)
            raise
        finally:
            if incoming is not None:
                incoming.close()
        # The replica is whole whether or not the sender hears of it.
        with suppress(KvError):
            link.send_message(sealer, FrameType.ACK, blake3(commit).digest())
            link.linger(KV_LINGER_S)
    finally:
        link.close()
    stages.total_s = time.monotonic() - started
    dropped = (*incoming.evicted, *([replaced] if replaced else []))
    return done_of(manifest, incoming.keep, raw_bytes, link.received_bytes, dropped, stages, offer.known)


def done_of(
    manifest: Manifest,
    kept: int,
    raw_bytes: int,
    wire_bytes: int,
    dropped: tuple[str, ...],
    stages: Stages,
    known: tuple[Mark, ...],
) -> ReceiveDone:
    """A committed replica for the answer; `kept`, `raw_bytes` and `wire_bytes` are of its way here."""
    n = manifest.n_tokens
    rows = sum(
        (n - held.lo) * cache_bytes(cache)
        for held, cache in zip(manifest.caches, manifest.shape.caches, strict=True)
    )
    return ReceiveDone(
        replica=replica_name(manifest),
        session=manifest.session,
        model_fp=manifest.model_fp,
        generation=manifest.generation,
        source=manifest.source,
        n_tokens=n,
        kept=kept,
        total_bytes=rows + len(manifest.tokens) + sum(blob.facts.size for blob in manifest.blobs),
        raw_bytes=raw_bytes,
        wire_bytes=wire_bytes,
        dropped=dropped,
        stages=stages,
        known=known,
    )


def _offer(link: Link, opener: Opener, grant: ReceiveGrant) -> Offer:
    _, payload = link.recv_message(opener, FrameType.OFFER)
    offer = unpack_offer(payload)
    if offer.source != grant.peer_name:
        raise KvError("bad_offer", "the offer names another source")
    of_model = [terms for terms in grant.models if terms.model_fp == offer.model_fp]
    if not of_model:
        raise KvError("wrong_model", "no engine here runs exactly this model")
    fitting = [terms for terms in of_model if terms.shape == offer.shape]
    if not fitting:
        raise KvError("layout", "the engines here keep their cache in another form")
    most = max(terms.max_tokens for terms in fitting)
    if offer.n_tokens > most:
        raise KvError("too_long", f"{offer.n_tokens} tokens, a slot here holds {most}")
    return offer


def _take(
    link: Link, opener: Opener, offer: Offer, have: Have, incoming: Incoming, stages: Stages
) -> tuple[int, bytes]:
    """Receive until COMMIT: bytes of tokens, rows and blobs, and the COMMIT's payload."""
    _, payload = link.recv_message(opener, FrameType.BEGIN)
    keep = unpack_begin(payload).keep
    if not 0 <= keep <= min(have.n, offer.n_tokens):
        raise ChannelError("protocol", f"{keep} rows to keep, {have.n} are held")
    incoming.begin(keep)
    due = list(pieces_of(offer, have, keep, incoming.starts))
    pipe: Pipeline[Header] = Pipeline(
        max((piece.size for piece in due), default=1) + TAG_BYTES,
        _Writer(opener, incoming, offer, due, stages).run,
    )
    try:
        for piece in due:
            buffer = pipe.take()
            begun = time.monotonic()
            header = link.recv_header()
            if not _is_due(header, piece):
                raise ChannelError("protocol", f"a {header.type.name} frame that is not due")
            link.recv_body(header, buffer)
            stages.receive_s += time.monotonic() - begun
            pipe.put(buffer, header)
        pipe.finish()
    except PartnerStopped:
        raise pipe.abort() or KvError("io_error", "writing the replica ended early") from None
    except KvError:
        if (first := pipe.abort()) is not None:
            raise first from None  # the other thread refused something before the link ended
        raise
    finally:
        pipe.abort()  # what arrived whole before an error is verified and written all the same
    _, commit = link.recv_message(opener, FrameType.COMMIT)
    return sum(piece.size for piece in due), commit


def _is_due(header: Header, piece: Piece) -> bool:
    said = (header.type, header.segment, header.offset, header.rows, header.raw_bytes)
    return said == (piece.type, piece.segment, piece.offset, piece.rows, piece.size)


class _Writer:
    """The thread that proves and writes what the other one received."""

    def __init__(
        self, opener: Opener, incoming: Incoming, offer: Offer, due: list[Piece], stages: Stages
    ) -> None:
        self._opener, self._incoming, self._blobs = opener, incoming, offer.blobs
        self._due, self._stages = due, stages
        self._unpacker: Unpacker | None = None
        largest = max((piece.size for piece in due), default=0)
        self._opened = new_buffer(largest)  # what was encrypted; always the same, so it stays in the cache

    def run(self, pipe: Pipeline[Header]) -> None:
        tokens_open = True
        for piece in self._due:
            buffer, header = pipe.get()
            begun = time.monotonic()
            if tokens_open and piece.type is not FrameType.TOKENS:
                self._incoming.tokens_done()
                tokens_open = False
            wire = buffer[: header.wire_len + TAG_BYTES]
            opened, digest = self._opener.open(header, wire, self._opened)
            payload = memoryview(opened)
            if header.codec is not Codec.RAW:
                self._unpacker = self._unpacker or Unpacker()
                payload = self._unpacker.unpack(payload, header.codec, header.raw_bytes)
                digest = blake3(payload).digest()
            proven = time.monotonic()
            if piece.type is FrameType.BLOB and piece.offset == 0:
                self._incoming.begin_blob(self._blobs[piece.segment])
            self._incoming.write(piece, payload, digest)
            self._stages.verify_s += proven - begun
            self._stages.write_s += time.monotonic() - proven
            pipe.give(buffer)
        if tokens_open:
            self._incoming.tokens_done()


def _say_no(link: Link, sealer: Sealer, type_: FrameType, error: KvError) -> None:
    if error.reason in ("link_lost", "timeout", "cancelled"):
        return  # nobody listens, or nobody may wait
    with suppress(KvError):
        link.send_message(sealer, type_, pack_refusal(error.reason, str(error)))
        link.linger(KV_LINGER_S)
