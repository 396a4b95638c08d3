"""Sends a saved state to one peer, and puts on record how that went."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from blake3 import blake3

from viiwork.config.model import KvShareSection
from viiwork.core.sessions import SessionKey
from viiwork.core.slot_states import Kept
from viiwork.errors import ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SendDone, SendJob, StateFile
from viiwork.limits import KV_RECURRENT_AT_ONCE_S
from viiwork.mesh.values import Member
from viiwork.node.kv_paths import KvPaths
from viiwork.node.kv_route import send_over
from viiwork.node.kv_save import Saved
from viiwork.node.kv_stats import KvStats, Transfer, reason_of, stages_of
from viiwork.node.kv_targets import KvPeers
from viiwork.wire.channel import mesh_key
from viiwork.wire.kvoffer import StateOffer, encode_offer
from viiwork.wire.replica import Mark


def session_digest(key: SessionKey) -> bytes:
    """How a session on a model is called on the wire and on disk."""
    return blake3("\0".join(key).encode("utf-8", "surrogatepass")).digest()


def kept_of(marks: Iterable[Mark]) -> tuple[Kept, ...]:
    """Marks as decisions know them, the oldest first."""
    found = (Kept(mark.generation, mark.source, mark.keep) for mark in marks)
    return tuple(sorted(found, key=lambda mark: mark.generation))


def state_file(saved: Saved, source: str) -> StateFile:
    """A save as the worker takes it."""
    return StateFile(
        path=str(saved.path),
        session=session_digest(saved.key),
        model_fp=saved.layout.model_fp,
        generation=saved.binding.generation,
        created_unix_s=time.time(),
        source=source,
        known=saved.known,
        n_written=saved.n_bytes,
        n_saved=saved.n_tokens,
    )


class Sender:
    """One transfer a call; the file stays the caller's."""

    def __init__(
        self, config: KvShareSection, peers: KvPeers, worker: KvWorker, paths: KvPaths, stats: KvStats
    ) -> None:
        self._config = config
        self._peers = peers
        self._worker = worker
        self._paths = paths
        self._stats = stats

    def is_slow(self, member: Member, n_bytes: int) -> bool:
        """Would a recurrent part of so many bytes, all new after each turn, keep the link busy for long?"""
        return n_bytes > self._paths.bytes_per_s(member) * KV_RECURRENT_AT_ONCE_S

    async def send(self, saved: Saved, member: Member, why: str, stages_s: dict[str, float]) -> SendDone:
        """`stages_s`: how long it took before. Raises `KvError`, `ChannelRefused`."""
        session, model = saved.key
        started = time.monotonic()
        offer = StateOffer(
            session=session,
            model=model,
            generation=saved.binding.generation,
            n_tokens=saved.binding.n_tokens,
            model_fp=saved.layout.model_fp.hex(),
            state=saved.layout.identity().state,
            tip=saved.binding.tip,
            scope=saved.binding.scope,
        )
        job = SendJob(
            file=state_file(saved, self._peers.me),
            compress=compress_of(self._config),
            key=mesh_key(self._peers.client.key or b""),
            local_name=self._peers.me,
            peer_name=member.name,
            encrypt=True,  # unless the path needs none
        )
        try:
            sent = await send_over(self._paths, self._worker, member, encode_offer(offer), job)
        except (ViiworkError, OSError) as error:
            self.not_sent(saved.key, error, member.name)
            raise
        done = sent.done
        self._stats.ended(
            Transfer(
                what="send",
                session=session,
                model=model,
                why=why,
                generation=saved.binding.generation,
                peer=member.name,
                path=sent.path.addr,
                encrypted=sent.encrypted,
                tokens=done.info.n_tokens,
                kept=done.kept,
                state_bytes=done.total_bytes,
                raw_bytes=done.raw_bytes,
                wire_bytes=done.wire_bytes,
                took_s=time.monotonic() - started,
                stages_s=stages_of(done.stages, **stages_s),
            )
        )
        return done

    def not_sent(self, key: SessionKey, error: ViiworkError | OSError, peer: str = "") -> None:
        """Count a state that was not saved, or did not arrive at a peer."""
        reason = reason_of(error)
        self._stats.ended(
            Transfer(what="send", session=key[0], model=key[1], reason=reason, detail=str(error), peer=peer)
        )


def compress_of(config: KvShareSection) -> Literal["auto", "on", "off"]:
    """`kv_share.compress`, as a job says it."""
    return "on" if config.compress == "on" else "off" if config.compress == "off" else "auto"
