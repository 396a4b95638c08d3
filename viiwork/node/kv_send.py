"""Sends a saved state to one peer, and puts on record how that went."""

from __future__ import annotations

import logging
import time
from typing import Literal

from blake3 import blake3

from viiwork.config.model import KvShareSection
from viiwork.core.sessions import SessionKey
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SendDone, SendJob, StateFile
from viiwork.mesh.values import Member
from viiwork.node.kv_paths import KvPaths
from viiwork.node.kv_route import send_over
from viiwork.node.kv_save import Saved
from viiwork.node.kv_stats import KvStats
from viiwork.node.kv_targets import KvPeers
from viiwork.wire.channel import mesh_key
from viiwork.wire.kvoffer import StateOffer, encode_offer

log = logging.getLogger(__name__)


def session_digest(key: SessionKey) -> bytes:
    """How a session on a model is called on the wire and on disk."""
    return blake3("\0".join(key).encode("utf-8", "surrogatepass")).digest()


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

    async def send(self, saved: Saved, member: Member, reason: str) -> SendDone:
        """Raises `KvError`, `ChannelRefused`."""
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
            self.not_sent(saved.key, error)
            raise
        done, took_s = sent.done, time.monotonic() - started
        self._stats.sent.done += 1
        self._stats.sent.n_bytes += done.total_bytes
        self._stats.transferred(
            "send",
            session=session[:8],
            model=model,
            peer=member.name,
            reason=reason,
            generation=saved.binding.generation,
            tokens=done.info.n_tokens,
            kept=done.kept,
            bytes=done.total_bytes,
            raw_bytes=done.raw_bytes,
            wire_bytes=done.wire_bytes,
            save_s=round(saved.save_s, 4),
            seconds=round(took_s, 4),
            encrypted=sent.encrypted,
            path=sent.path.addr,
        )
        log.info(
            "kv_share.sent session=%s model=%s peer=%s reason=%s tokens=%d kept=%d bytes=%d wire_bytes=%d "
            "seconds=%.3f path=%s",
            session[:8],
            model,
            member.name,
            reason,
            done.info.n_tokens,
            done.kept,
            done.total_bytes,
            done.wire_bytes,
            took_s,
            sent.path.addr,
        )
        return done

    def not_sent(self, key: SessionKey, error: ViiworkError | OSError) -> None:
        """Count a state that was not saved, or did not arrive."""
        reason = error.reason if isinstance(error, KvError) else getattr(error, "code", "io_error")
        self._stats.sent.failed[reason] += 1
        self._stats.transferred("send", failed=reason, session=key[0][:8], model=key[1])
        log.info("kv_share.not_sent session=%s model=%s: %s", key[0][:8], key[1], error)


def compress_of(config: KvShareSection) -> Literal["auto", "on", "off"]:
    """`kv_share.compress`, as a job says it."""
    return "on" if config.compress == "on" else "off" if config.compress == "off" else "auto"
