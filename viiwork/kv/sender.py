"""Sends what a peer does not hold of a state: one thread reads, hashes and packs, the other sends.

Plain rows go from the page cache to the socket: what was read for the proof is not sent again. A file that
changes in between does not pass the peer's check.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from blake3 import blake3

from viiwork.errors import ChannelError, KvError
from viiwork.kv.buffers import new_buffer
from viiwork.kv.compress import Packer, codec_of
from viiwork.kv.extract import SavedState, facts_of, open_state
from viiwork.kv.jobs import SendDone, SendJob, Stages
from viiwork.kv.link import Cancel, Link
from viiwork.kv.pipeline import PartnerStopped, Pipeline
from viiwork.limits import KV_COMPRESS_BELOW_BYTES_PER_S, KV_FRAME_MAX_BYTES, KV_SENDFILE_BYTES
from viiwork.wire.channel import TAG_BYTES, Codec, FrameType, Opener, Sealed, Sealer, unpack_refusal
from viiwork.wire.delta import keep_of, pieces_of, starts_of
from viiwork.wire.groups import (
    DIGEST_BYTES,
    Piece,
    groups_of,
    rows_of_group,
)
from viiwork.wire.replica import Begin, Commit, Have, pack_message, replica_name, unpack_have

_Frame = tuple[Sealed, list[tuple[int, int]]]  # and where its payload lies in the file; [] = in the frame
_Reader = Callable[[Pipeline[_Frame]], None]


def send_state(sock: socket.socket, job: SendJob, cancel: Cancel, *, aes: bool = False) -> SendDone:
    """Offer the state and send what the peer wants of it. Closes `sock`; raises `KvError`.

    `aes`: AES-GCM is the faster cipher here.
    """
    started = time.monotonic()
    stages = Stages()
    link = Link(sock, job, cancel)
    try:
        with open_state(job.file) as state:
            sending = _Sending(link, job, state, stages)
            sending.converse(aes)
    finally:
        link.close()
    stages.total_s = time.monotonic() - started
    return SendDone(
        replica=replica_name(sending.offer),
        info=facts_of(state.info),
        total_bytes=state.info.total_bytes,
        kept=sending.keep,
        raw_bytes=sending.raw_bytes,
        wire_bytes=link.sent_bytes,
        stages=stages,
    )


class _Sending:
    """One conversation of the sending side."""

    def __init__(self, link: Link, job: SendJob, state: SavedState, stages: Stages) -> None:
        self._link, self._job, self._state, self._stages = link, job, state, stages
        self.offer = state.offer()
        self.keep = self.raw_bytes = 0
        slow = 0 < job.link_bytes_per_s < KV_COMPRESS_BELOW_BYTES_PER_S
        self._packer = Packer() if job.compress == "on" or (job.compress == "auto" and slow) else None
        self._digests: list[list[bytes]] = [[] for _ in self.offer.shape.caches]
        self._blob_digests: list[bytes] = []

    def converse(self, aes: bool) -> None:
        begun = time.monotonic()
        session = self._link.initiate(self._job, aes=aes)
        self._stages.handshake_s = time.monotonic() - begun
        self._sealer = Sealer(session.send, encrypt=session.encrypt, aes=session.aes)
        self._opener = Opener(session.receive, encrypt=session.encrypt, aes=session.aes)
        self._encrypt = session.encrypt
        try:
            self._link.send_message(self._sealer, FrameType.OFFER, pack_message(self.offer))
            have = unpack_have(self._await(FrameType.HAVE), self.offer)
            self._decide(have)
            self._link.send_message(self._sealer, FrameType.BEGIN, pack_message(Begin(keep=self.keep)))
            self._send_pieces(list(pieces_of(self.offer, have, self.keep, self._starts)))
            commit = pack_message(self._commit())
            self._link.send_message(self._sealer, FrameType.COMMIT, commit)
            acknowledged = self._await(FrameType.ACK)
        except KvError as error:
            if error.reason == "link_lost":
                self._last_words()
            raise
        if acknowledged != blake3(commit).digest():
            raise ChannelError("protocol", "the peer acknowledged something else")

    def _await(self, wanted: FrameType) -> bytes:
        begun = time.monotonic()
        try:
            type_, payload = self._link.recv_message(self._opener, wanted, FrameType.REFUSE, FrameType.NACK)
        finally:
            self._stages.wait_s += time.monotonic() - begun
        if type_ is not wanted:
            said = unpack_refusal(payload)
            raise KvError(said.reason, f"the peer refused: {said.reason} {said.detail}".rstrip())
        return payload

    # -- what is sent

    def _decide(self, have: Have) -> None:
        same_rows = self._state.same_rows(have.digests, have.n)
        self.keep = keep_of(self.offer, self._state.tokens, have, same_rows)
        self._starts = tuple(start for start, _ in starts_of(self.offer, self.keep, have.lows))

    def _commit(self) -> Commit:
        groups = []
        buffer = new_buffer(KV_FRAME_MAX_BYTES)
        n = self.offer.n_tokens
        for at, cache in enumerate(self.offer.shape.caches):
            rows, start = rows_of_group(cache), self._starts[at]
            own = self._digests[at]
            if start < n and start != self._state.whole_group(at, start // rows).offset:
                view = self._state.read(self._state.whole_group(at, start // rows), buffer)
                own[0] = blake3(view).digest(length=DIGEST_BYTES)
            if len(own) != (groups_of(n, rows) - start // rows if start < n else 0):
                raise KvError("bug", "digests do not match the rows sent")
            groups.append(b"".join(own))
        return Commit(groups=tuple(groups), blobs=tuple(self._blob_digests))

    # -- sending

    def _send_pieces(self, pieces: list[Piece]) -> None:
        largest = max((piece.size for piece in pieces), default=1)
        pipe: Pipeline[_Frame] = Pipeline(largest + TAG_BYTES, self._reader_of(pieces, largest))
        try:
            for _ in pieces:
                buffer, (frame, ranges) = pipe.get()
                begun = time.monotonic()
                if self._link.readable():
                    self._await(FrameType.ACK)
                    raise ChannelError("protocol", "the peer acknowledged before the end")
                if ranges:
                    self._link.send_from(frame, self._state.fd, ranges)
                else:
                    self._link.send(frame)
                self._stages.send_s += time.monotonic() - begun
                pipe.give(buffer)
            pipe.finish()
        except PartnerStopped:
            raise pipe.abort() or KvError("io_error", "reading the save-file ended early") from None
        finally:
            pipe.abort()

    def _reader_of(self, pieces: list[Piece], largest: int) -> _Reader:
        def read_ahead(pipe: Pipeline[_Frame]) -> None:
            hashing: tuple[int, blake3] | None = None
            scratch = new_buffer(largest)  # always the same, so that it stays in the cache
            for piece in pieces:
                buffer = pipe.take()
                t0 = time.monotonic()
                ranges = [] if self._encrypt or self._packer else self._long_ranges(piece)
                stays = bool(ranges) or self._encrypt  # what is read is not sent as it is
                view = self._state.read(piece, scratch if stays else buffer)
                t1 = time.monotonic()
                digest = blake3(view).digest()
                if piece.type is FrameType.ROWS:
                    self._digests[piece.segment].append(digest[:DIGEST_BYTES])
                if piece.type is FrameType.BLOB:
                    if hashing is None or hashing[0] != piece.segment:
                        hashing = piece.segment, blake3()
                    hashing[1].update(view)
                    if piece.offset + piece.size == self.offer.blobs[piece.segment].size:
                        self._blob_digests.append(hashing[1].digest())
                self.raw_bytes += piece.size
                t2 = time.monotonic()
                frame = self._seal(piece, view, digest, buffer, bool(ranges))
                self._stages.read_s += t1 - t0
                self._stages.hash_s += t2 - t1
                pipe.put(buffer, (frame, ranges))

        return read_ahead

    def _long_ranges(self, piece: Piece) -> list[tuple[int, int]]:
        """Where a piece lies in the file; none where its runs are short, which are gathered in any case."""
        ranges = self._state.ranges_of(piece)
        return ranges if all(size >= KV_SENDFILE_BYTES for _, size in ranges) else []

    def _seal(
        self, piece: Piece, view: memoryview, digest: bytes, buffer: memoryview, from_file: bool
    ) -> Sealed:
        place = piece.offset, piece.segment, piece.rows
        t0 = time.monotonic()
        codec, packed = Codec.RAW, None
        if self._packer is not None and piece.type is FrameType.ROWS:
            codec = codec_of(self.offer.shape.caches[piece.segment])
            packed = self._packer.pack(view, codec)
        t1 = time.monotonic()
        if from_file:
            header = self._sealer.next_header(
                piece.type, piece.size, offset=place[0], segment=place[1], rows=place[2]
            )
            frame = self._sealer.prove(header, digest)
        else:
            frame = self._sealer.seal(
                piece.type,
                view if packed is None else packed,
                buffer if self._encrypt else None,
                digest=digest if packed is None else b"",
                offset=place[0],
                segment=place[1],
                rows=place[2],
                raw_len=piece.size,
                codec=Codec.RAW if packed is None else codec,
            )
        self._stages.compress_s += t1 - t0
        self._stages.hash_s += time.monotonic() - t1
        return frame

    def _last_words(self) -> None:
        """Raise what the peer said before it closed, if it said anything."""
        if self._link.readable():
            try:
                self._await(FrameType.ACK)
            except KvError as said:
                if said.reason != "link_lost":
                    raise
