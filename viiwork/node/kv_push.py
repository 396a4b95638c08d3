"""The sending side of kv_share: after a turn, the session's state goes ahead to the peer its next turn may
land on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from viiwork.config.model import KvShareSection
from viiwork.core.replicas import path_allowed, targets
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slots import SlotRef
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SendJob, StateFile
from viiwork.limits import KV_PUSHES_AT_ONCE, KV_SAVE_S, KV_SLOT_SETTLE_S
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member
from viiwork.node.background import Background, remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_paths import KvPaths
from viiwork.node.kv_route import send_over
from viiwork.node.kv_stats import KvStats, Transfer, stages_of
from viiwork.wire.channel import mesh_key
from viiwork.wire.kvoffer import StateOffer, encode_offer

log = logging.getLogger(__name__)

SETTLE_POLL_S = 0.02


def session_digest(key: SessionKey) -> bytes:
    """How a session on a model is called on the wire and on disk."""
    return blake3("\0".join(key).encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class KvPeers:
    """How this node reaches and proves itself to its peers."""

    me: str
    client: PeerClient
    member: Callable[[str], Member | None]


class EngineGates:
    """One save or restore at a time per engine: each of them stops all its slots."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def of(self, backend: str) -> asyncio.Lock:
        return self._locks[backend]

    def is_closed(self, backend: str) -> bool:
        """Whether a save or restore runs there now."""
        return backend in self._locks and self._locks[backend].locked()

    def forget(self, backend: str) -> None:
        """The backend is gone for good."""
        self._locks.pop(backend, None)


class Pusher:
    """Sends states; one push a session at a time, a newer turn following an unfinished push."""

    def __init__(
        self,
        config: KvShareSection,
        peers: KvPeers,
        dispatcher: Dispatcher,
        layouts: EngineLayouts,
        worker: KvWorker,
        gates: EngineGates,
        stats: KvStats,
        paths: KvPaths,
    ) -> None:
        self._config = config
        self._peers = peers
        self._paths = paths
        self._dispatcher = dispatcher
        self._layouts = layouts
        self._worker = worker
        self._gates = gates
        self._stats = stats
        self._running: dict[SessionKey, asyncio.Task[None]] = {}
        self._again: set[SessionKey] = set()
        self._background = Background()
        self._room = asyncio.Semaphore(KV_PUSHES_AT_ONCE)

    def turn_ended(self, key: SessionKey, binding: Binding) -> None:
        """A turn left `binding.n_tokens` tokens in its slot."""
        if binding.ref is None or binding.n_tokens < self._config.min_tokens:
            return
        if key in self._running:
            self._again.add(key)
            return
        task = self._running[key] = self._background.go(self._push(key))
        task.add_done_callback(lambda task: self._pushed(key, task))

    def withhold(self, key: SessionKey) -> None:
        """The session's newest turn must not leave this node: a push that has not saved yet would send it."""
        self._again.discard(key)
        if task := self._running.pop(key, None):
            task.cancel()

    async def stop(self) -> None:
        self._again.clear()
        await self._background.stop()

    async def _push(self, key: SessionKey) -> None:
        while True:
            self._again.discard(key)
            async with self._room:
                await self._push_newest(key)
            if key not in self._again:
                # Not left to the task's end alone: a turn that ends before that would be overlooked.
                self._pushed(key, asyncio.current_task())
                return

    def _pushed(self, key: SessionKey, task: asyncio.Task[None] | None) -> None:
        if self._running.get(key) is task:
            del self._running[key]

    async def _push_newest(self, key: SessionKey) -> None:
        binding = self._dispatcher.sessions.get(key)
        if binding is None or binding.ref is None:
            return
        layout = self._layouts.get(binding.ref.backend)
        members = self._targets(key, binding)
        if layout is None or not members:
            self._stats.sent.skipped["not_portable" if layout is None else "no_peer"] += 1
            return
        name = f"out-{uuid.uuid4().hex}"
        path = layout.save_dir / name
        try:
            self._check_space(layout, binding)
            stages_s = await self._save(key, binding, binding.ref, layout, name)
            if stages_s is None:
                return
            for member in members:
                await self._send(key, binding, layout, str(path), member, stages_s)
                stages_s = {}  # of the first one alone, so that sums count a save once
        except (ViiworkError, OSError) as error:
            reason = error.reason if isinstance(error, KvError) else getattr(error, "code", "io_error")
            self._stats.ended(
                Transfer(what="send", session=key[0], model=key[1], reason=reason, detail=str(error))
            )
        finally:
            await remove_file(path)

    def _targets(self, key: SessionKey, binding: Binding) -> list[Member]:
        """Members to send to, those whose address forbids it counted and left out."""
        session, model = key
        serving = self._dispatcher.peers.serving(model, time.monotonic())
        own = self._layouts.identity(model)
        allowed = []
        for node, entry in serving:
            member = self._peers.member(node)
            if member is None:
                continue
            secured = self._peers.client.key is not None
            if why := path_allowed(member.addr, secured=secured, open_lan=self._config.open):
                self._stats.sent.skipped["path_not_allowed"] += 1
                log.debug("kv_share.not_allowed peer=%s: %s", node, why)
                continue
            allowed.append((node, entry))
        chosen = targets(session, model, own, binding.n_tokens, allowed, self._config.replicas)
        return [member for node in chosen if (member := self._peers.member(node)) is not None]

    def _check_space(self, layout: EngineLayout, binding: Binding) -> None:
        need = layout.shape.token_bytes * binding.n_tokens
        there = os.statvfs(layout.save_dir)
        free = there.f_bavail * there.f_frsize
        if free < need * 1.1:
            raise KvError("no_space", f"a save of about {need} bytes, {free} are free in {layout.save_dir}")

    async def _save(
        self, key: SessionKey, binding: Binding, ref: SlotRef, layout: EngineLayout, name: str
    ) -> dict[str, float] | None:
        """Save the slot while nobody else may use it, and how long that took by stage.

        None when the session has moved on.
        """
        wanted_at = time.monotonic()
        async with self._gates.of(ref.backend):
            lease = self._dispatcher.take_idle_slot(ref)
            if lease is None or self._dispatcher.sessions.get(key) != binding:
                if lease is not None:
                    self._dispatcher.give_back(lease)
                self._stats.sent.skipped["slot_busy"] += 1
                return None  # the turn that runs there now will push when it ends
            try:
                await self._until_settled(layout, ref)
                queued_s = time.monotonic() - wanted_at
                done = await layout.client.save(ref.slot, name, KV_SAVE_S)
            finally:
                self._dispatcher.give_back(lease)
        self._stats.stalled(ref.backend, done.ms / 1000)
        size = (layout.save_dir / name).stat().st_size
        if size != done.n_written:
            raise KvError("bad_file", f"the engine wrote {size} of {done.n_written} bytes")
        return {"queued": queued_s, "save": done.ms / 1000}

    async def _until_settled(self, layout: EngineLayout, ref: SlotRef) -> None:
        """The engine frees a slot a moment after its last byte; a save before that would be put off."""
        until = time.monotonic() + KV_SLOT_SETTLE_S
        while True:
            busy = {slot.id for slot in await layout.client.slots() if slot.is_processing}
            if ref.slot not in busy:
                return
            if time.monotonic() > until:
                raise KvError("slot_busy", f"slot {ref.slot} of {ref.backend} does not come to rest")
            await asyncio.sleep(SETTLE_POLL_S)

    async def _send(
        self,
        key: SessionKey,
        binding: Binding,
        layout: EngineLayout,
        path: str,
        member: Member,
        stages_s: dict[str, float],
    ) -> None:
        session, model = key
        started = time.monotonic()
        offer = StateOffer(
            session=session,
            model=model,
            generation=binding.generation,
            n_tokens=binding.n_tokens,
            model_fp=layout.model_fp.hex(),
            state=layout.identity().state,
            tip=binding.tip,
            scope=binding.scope,
        )
        job = SendJob(
            file=StateFile(
                path=path,
                session=session_digest(key),
                model_fp=layout.model_fp,
                generation=binding.generation,
                created_unix_s=time.time(),
                source=self._peers.me,
            ),
            compress=compress_of(self._config),
            key=mesh_key(self._peers.client.key or b""),
            local_name=self._peers.me,
            peer_name=member.name,
            encrypt=True,  # unless the path needs none
        )
        sent = await send_over(self._paths, self._worker, member, encode_offer(offer), job)
        done = sent.done
        self._stats.ended(
            Transfer(
                what="send",
                session=session,
                model=model,
                peer=member.name,
                path=sent.path.addr,
                encrypted=sent.encrypted,
                tokens=done.info.n_tokens,
                kept=done.kept,
                state_bytes=done.total_bytes,
                raw_bytes=done.raw_bytes,
                wire_bytes=done.wire_bytes,
                took_s=time.monotonic() - started,
                stages_s=stages_s | stages_of(done.stages),
            )
        )


def compress_of(config: KvShareSection) -> Literal["auto", "on", "off"]:
    """`kv_share.compress`, as a job says it."""
    return "on" if config.compress == "on" else "off" if config.compress == "off" else "auto"
