"""Keeps the state in a save-file of this node as a replica, so that it can come home after an eviction."""

from __future__ import annotations

import time

from blake3 import blake3

from viiwork.kv.buffers import new_buffer
from viiwork.kv.extract import open_state
from viiwork.kv.incoming import Incoming
from viiwork.kv.jobs import KeepJob, ReceiveDone, Stages
from viiwork.kv.link import Cancel
from viiwork.kv.receiver import done_of
from viiwork.kv.store import ReplicaStore
from viiwork.limits import KV_FRAME_MAX_BYTES
from viiwork.wire.channel import FrameType
from viiwork.wire.delta import keep_of, pieces_of


def keep_state(job: KeepJob, store: ReplicaStore, cancel: Cancel) -> ReceiveDone:
    """As if it had been sent and received; only rows that are not held are read. Raises `KvError`."""
    started = time.monotonic()
    stages = Stages()
    with open_state(job.file) as state:
        offer = state.offer()
        incoming = Incoming(store, offer, cancel)
        try:
            have = incoming.have()
            keep = keep_of(offer, state.tokens, have, state.same_rows(have.digests, have.n))
            incoming.begin(keep)
            buffer = new_buffer(KV_FRAME_MAX_BYTES)
            raw_bytes = 0
            for piece in pieces_of(offer, have, keep, incoming.starts):
                cancel.check()
                t0 = time.monotonic()
                view = state.read(piece, buffer)
                t1 = time.monotonic()
                digest = blake3(view).digest()
                t2 = time.monotonic()
                if piece.type is FrameType.BLOB and piece.offset == 0:
                    incoming.begin_blob(offer.blobs[piece.segment])
                incoming.write(piece, view, digest)
                raw_bytes += piece.size
                stages.read_s += t1 - t0
                stages.hash_s += t2 - t1
                stages.write_s += time.monotonic() - t2
            incoming.tokens_done()
            manifest, replaced = incoming.commit()
        finally:
            incoming.close()
    stages.total_s = time.monotonic() - started
    dropped = (*incoming.evicted, *([replaced] if replaced else []))
    return done_of(manifest, keep, raw_bytes, 0, dropped, stages, offer.known)
