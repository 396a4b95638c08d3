"""Sends one save-file to a peer's worker: one thread reads and proves chunks, the other sends them.

Plain chunks go from the page cache to the socket: what was read for the proof is not sent again. A file
that changes in between does not pass the peer's check.
"""

from __future__ import annotations

import socket
import time

from blake3 import blake3

from viiwork.errors import ChannelError, KvError, SaveFileError
from viiwork.kv.files import open_save, pread_of
from viiwork.kv.jobs import SendDone, SendJob, Stages
from viiwork.kv.link import Cancel, Link, file_errors
from viiwork.kv.pipeline import PartnerStopped, Pipeline
from viiwork.limits import KV_CHUNK_BYTES
from viiwork.native.mover import pread_exact
from viiwork.wire.channel import TAG_BYTES, FrameType, Opener, Sealed, Sealer, Session, unpack_refusal
from viiwork.wire.replica import Offer, n_chunks, pack_offer, replica_name, root_of
from viiwork.wire.whole_file import SaveInfo, parse


def send_state(sock: socket.socket, job: SendJob, cancel: Cancel, *, aes: bool = False) -> SendDone:
    """Offer the file and send it when the peer wants it. Closes `sock`; raises `KvError`.

    `aes`: AES-GCM is the faster cipher here.
    """
    started = time.monotonic()
    stages = Stages()
    link = Link(sock, job, cancel)
    try:
        with open_save(job.path, job.n_written) as (fd, size):
            info = parse(pread_of(fd), size, n_vocab=job.n_vocab)
            if job.n_saved and info.n_tokens != job.n_saved:
                raise SaveFileError("bad_file", f"{info.n_tokens} tokens, the engine saved {job.n_saved}")
            offer = _offer_of(job, info)
            begun = time.monotonic()
            session = link.initiate(job, aes=aes)
            stages.handshake_s = time.monotonic() - begun
            _converse(link, session, offer, fd, stages)
    finally:
        link.close()
    stages.total_s = time.monotonic() - started
    return SendDone(replica=replica_name(offer), info=info, total_bytes=size, stages=stages)


def _offer_of(job: SendJob, info: SaveInfo) -> Offer:
    return Offer(
        session=job.session,
        model_fp=job.model_fp,
        shape=info.shape,
        n_tokens=info.n_tokens,
        tokens_digest=info.tokens_digest,
        total_bytes=info.total_bytes,
        chunk_bytes=KV_CHUNK_BYTES,
        generation=job.generation,
        source=job.local_name,
        created_unix_s=job.created_unix_s,
    )


def _converse(link: Link, session: Session, offer: Offer, fd: int, stages: Stages) -> None:
    sealer = Sealer(session.send, encrypt=session.encrypt, aes=session.aes)
    opener = Opener(session.receive, encrypt=session.encrypt, aes=session.aes)
    link.send_message(sealer, FrameType.OFFER, pack_offer(offer))
    _await(link, opener, FrameType.ACCEPT, stages)
    try:
        root = _send_chunks(link, opener, sealer, session.encrypt, offer, fd, stages)
        link.send_message(sealer, FrameType.COMMIT, root)
        acknowledged = _await(link, opener, FrameType.ACK, stages)
    except KvError as error:
        if error.reason == "link_lost":
            _last_words(link, opener, stages)
        raise
    if acknowledged != root:
        raise ChannelError("protocol", "the peer acknowledged something else")


def _await(link: Link, opener: Opener, wanted: FrameType, stages: Stages) -> bytes:
    begun = time.monotonic()
    try:
        type_, payload = link.recv_message(opener, wanted, FrameType.REFUSE, FrameType.NACK)
    finally:
        stages.wait_s += time.monotonic() - begun
    if type_ is not wanted:
        said = unpack_refusal(payload)
        raise KvError(said.reason, f"the peer refused: {said.reason} {said.detail}".rstrip())
    return payload


def _send_chunks(
    link: Link, opener: Opener, sealer: Sealer, encrypt: bool, offer: Offer, fd: int, stages: Stages
) -> bytes:
    """All DATA frames; the root of what was sent."""
    digests = bytearray()

    def read_ahead(pipe: Pipeline[tuple[Sealed, int]]) -> None:
        chunk = memoryview(bytearray(offer.chunk_bytes))
        for index in range(n_chunks(offer)):
            at = index * offer.chunk_bytes
            view = chunk[: min(offer.chunk_bytes, offer.total_bytes - at)]
            buffer = pipe.take()
            t0 = time.monotonic()
            with file_errors():
                pread_exact(fd, view, at)
            t1 = time.monotonic()
            if encrypt:
                frame = sealer.seal(FrameType.DATA, view, at, into=buffer)
            else:
                frame = sealer.prove(FrameType.DATA, len(view), blake3(view).digest(), at)
            digests.extend(frame.digest)
            stages.read_s += t1 - t0
            stages.hash_s += time.monotonic() - t1
            pipe.put(buffer, (frame, len(view)))

    # Plain chunks need no buffers: what goes round are the turns.
    pipe = Pipeline(offer.chunk_bytes + TAG_BYTES if encrypt else 0, read_ahead)
    at = 0
    try:
        for _ in range(n_chunks(offer)):
            buffer, (frame, size) = pipe.get()
            begun = time.monotonic()
            if link.readable():
                _await(link, opener, FrameType.ACK, stages)
                raise ChannelError("protocol", "the peer acknowledged before the end")
            if encrypt:
                link.send(frame)
            else:
                link.send_from(frame, fd, [(at, size)])
            at += size
            stages.send_s += time.monotonic() - begun
            pipe.give(buffer)
        pipe.finish()
    except PartnerStopped:
        raise pipe.abort() or KvError("io_error", "reading the save-file ended early") from None
    finally:
        pipe.abort()
    return root_of(bytes(digests))


def _last_words(link: Link, opener: Opener, stages: Stages) -> None:
    """Raise what the peer said before it closed, if it said anything."""
    if link.readable():
        try:
            _await(link, opener, FrameType.ACK, stages)
        except KvError as said:
            if said.reason != "link_lost":
                raise
