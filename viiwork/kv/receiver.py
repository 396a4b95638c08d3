"""Takes one state from a peer's worker: one thread receives, the other proves and writes."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from viiwork.errors import ChannelError, KvError
from viiwork.kv.jobs import ModelTerms, ReceiveDone, ReceiveGrant, Stages
from viiwork.kv.link import Cancel, Link, file_errors
from viiwork.kv.pipeline import PartnerStopped, Pipeline
from viiwork.kv.store import Incoming, ReplicaStore
from viiwork.limits import KV_LINGER_S
from viiwork.native.mover import pwrite_all
from viiwork.wire.channel import TAG_BYTES, FrameType, Header, Opener, Sealer, pack_refusal
from viiwork.wire.replica import DIGEST_BYTES, Offer, root_of, unpack_offer
from viiwork.wire.whole_file import SaveInfo, parse


def receive_state(
    sock: socket.socket, grant: ReceiveGrant, store: ReplicaStore, cancel: Cancel, *, aes: bool = False
) -> ReceiveDone:
    """Verify and commit one replica. Closes `sock`; raises `KvError` with nothing left behind.

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
        try:
            offer, terms, incoming = _accept(link, opener, grant, store)
        except KvError as error:
            _say_no(link, sealer, FrameType.REFUSE, error)
            raise
        try:
            link.send_message(sealer, FrameType.ACCEPT)
            root = _take_chunks(link, opener, offer, incoming, stages)
            begun = time.monotonic()
            info = _check(offer, terms, incoming)
            manifest, replaced = store.commit(incoming, root, info)
            stages.verify_s += time.monotonic() - begun
        except KvError as error:
            store.abort(incoming)  # before the last words: they may take seconds
            _say_no(link, sealer, FrameType.NACK, error)
            raise
        finally:
            store.abort(incoming)
        # The replica is whole whether or not the sender hears of it.
        with suppress(KvError):
            link.send_message(sealer, FrameType.ACK, root)
            link.linger(KV_LINGER_S)
    finally:
        link.close()
    stages.total_s = time.monotonic() - started
    dropped = (*incoming.evicted, *replaced)
    return ReceiveDone(replica=incoming.name, manifest=manifest, dropped=dropped, stages=stages)


def _accept(
    link: Link, opener: Opener, grant: ReceiveGrant, store: ReplicaStore
) -> tuple[Offer, ModelTerms, Incoming]:
    _, payload = link.recv_message(opener, FrameType.OFFER)
    offer = unpack_offer(payload)
    if offer.source != grant.peer_name:
        raise KvError("bad_offer", "the offer names another source")
    return offer, (terms := _terms_for(offer, grant)), _reserve(store, offer, terms)


def _terms_for(offer: Offer, grant: ReceiveGrant) -> ModelTerms:
    of_model = [terms for terms in grant.models if terms.model_fp == offer.model_fp]
    if not of_model:
        raise KvError("wrong_model", "no engine here runs exactly this model")
    fitting = [terms for terms in of_model if terms.shape == offer.shape]
    if not fitting:
        raise KvError("layout", "the engines here lay their cache out differently")
    return max(fitting, key=lambda terms: terms.max_tokens)


def _reserve(store: ReplicaStore, offer: Offer, terms: ModelTerms) -> Incoming:
    if offer.n_tokens > terms.max_tokens:
        raise KvError("too_long", f"{offer.n_tokens} tokens, a slot here holds {terms.max_tokens}")
    return store.reserve(offer)


def _take_chunks(link: Link, opener: Opener, offer: Offer, incoming: Incoming, stages: Stages) -> bytes:
    """Receive until COMMIT; the root, equal to the sender's."""
    digests = bytearray()
    committed: list[bytes] = []

    def prove_and_write(pipe: Pipeline[Header]) -> None:
        due = 0
        plain = bytearray(offer.chunk_bytes)  # what was encrypted; always the same, so it stays in the cache
        while not committed:
            buffer, header = pipe.get()
            begun = time.monotonic()
            body = memoryview(buffer)[: header.wire_len + TAG_BYTES]
            payload, digest = opener.open(header, body, into=plain)
            proven = time.monotonic()
            stages.verify_s += proven - begun
            if header.type is FrameType.COMMIT:
                committed.append(bytes(payload))
            elif header.offset != due:
                raise ChannelError("protocol", f"a chunk at {header.offset} where {due} was due")
            else:
                with file_errors():
                    pwrite_all(incoming.fd, payload, due)
                digests.extend(digest)
                due += len(payload)
            stages.write_s += time.monotonic() - proven
            pipe.give(buffer)

    pipe = Pipeline(offer.chunk_bytes + TAG_BYTES, prove_and_write)
    try:
        _receive_into(link, pipe, offer, stages)
        pipe.finish()
    except PartnerStopped:
        raise pipe.abort() or KvError("io_error", "writing the replica ended early") from None
    finally:
        pipe.abort()
    root = root_of(bytes(digests))
    if committed != [root]:
        raise ChannelError("corrupt", "the content is not what the sender read")
    return root


def _receive_into(link: Link, pipe: Pipeline[Header], offer: Offer, stages: Stages) -> None:
    """All chunks of exactly the offered sizes, then the COMMIT."""
    left = offer.total_bytes
    while True:
        buffer = pipe.take()
        begun = time.monotonic()
        header = link.recv_header()
        if left:
            wanted, size = FrameType.DATA, min(left, offer.chunk_bytes)
        else:
            wanted, size = FrameType.COMMIT, DIGEST_BYTES
        if header.type is not wanted or header.wire_len != size:
            raise ChannelError("protocol", f"a {header.type.name} of {header.wire_len} bytes is not due")
        link.recv_body(header, buffer)
        stages.receive_s += time.monotonic() - begun
        pipe.put(buffer, header)
        if wanted is FrameType.COMMIT:
            return
        left -= size


def _check(offer: Offer, terms: ModelTerms, incoming: Incoming) -> SaveInfo:
    """A file that passes cannot harm an engine, and is what was offered."""
    info = parse(incoming.pread, offer.total_bytes, n_vocab=terms.n_vocab)
    same = (
        info.shape == offer.shape
        and info.n_tokens == offer.n_tokens
        and info.tokens_digest == offer.tokens_digest
    )
    if not same:
        raise KvError("corrupt", "the state is not what was offered")
    return info


def _say_no(link: Link, sealer: Sealer, type_: FrameType, error: KvError) -> None:
    if error.reason in ("link_lost", "timeout", "cancelled"):
        return  # nobody listens, or nobody may wait
    with suppress(KvError):
        link.send_message(sealer, type_, pack_refusal(error.reason, str(error)))
        link.linger(KV_LINGER_S)
