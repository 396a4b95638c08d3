"""kv_share as one part of the node: its pieces wired together, its section of the status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from viiwork.config.model import KvShareSection
from viiwork.core.capacity import KvIdentity
from viiwork.core.manners import Manners
from viiwork.core.replicas import Replica
from viiwork.core.sessions import Binding
from viiwork.core.slot_states import SlotStates
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Grant, Outcome
from viiwork.engine.slots import SlotsClient
from viiwork.engine.supervisor import BackendView
from viiwork.errors import KvError
from viiwork.kv.client import KvWorker
from viiwork.mesh.direct import DirectClient
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.values import Member
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_held import HeldStates
from viiwork.node.kv_import import Importer, key_of
from viiwork.node.kv_layouts import EngineLayouts, StateFacts
from viiwork.node.kv_metrics import KvMetrics
from viiwork.node.kv_paths import KvPaths, LinkHost
from viiwork.node.kv_prompt import Prompts
from viiwork.node.kv_pull import Fetcher
from viiwork.node.kv_pulled import PullServer
from viiwork.node.kv_push import Pusher
from viiwork.node.kv_receive import Receiver
from viiwork.node.kv_restore import Restorer
from viiwork.node.kv_save import EngineGates, Saver
from viiwork.node.kv_send import Sender
from viiwork.node.kv_stash import Stash
from viiwork.node.kv_stats import KvStats
from viiwork.node.kv_targets import KvPeers, Targets
from viiwork.node.kv_verdicts import Verdicts

log = logging.getLogger(__name__)


class KvShare:
    """Everything of kv_share that lives in the control process."""

    def __init__(
        self,
        config: KvShareSection,
        worker: KvWorker,
        peers: KvPeers,
        secrets: tuple[bytes, ...],
        origins: MeshOrigins,
        dispatcher: Dispatcher,
        facts: StateFacts,
        state_dir: Path,
        client_of: Callable[[str, int], SlotsClient],
        host: LinkHost,
    ) -> None:
        self._member = peers.member
        self._config = config
        self._worker = worker
        self._dispatcher = dispatcher
        self._active = False  # enabled, and its worker came up
        self._off = ""  # why it is not active although enabled
        self._stats = KvStats()
        self._replicas = dispatcher.book.replicas
        self._layouts = EngineLayouts(worker, facts, Verdicts(state_dir), client_of, dispatcher)
        gates = self._gates = EngineGates()
        self.prompts = Prompts(worker)
        self.paths = KvPaths(peers.me, config, peers.client, secrets, origins, host, self._partners)
        manners = self._manners = Manners(config.stall_share)
        states = self._states = SlotStates()
        stats, layouts = self._stats, self._layouts
        targets = self._targets = Targets(config, peers, dispatcher, layouts)
        saver = Saver(peers.me, dispatcher, gates, manners, states, stats)
        sender = Sender(config, peers, worker, self.paths, stats)
        self._pusher = Pusher(config, dispatcher, layouts, saver, sender, targets, manners, states, stats)
        self._stash = Stash(
            peers.me, config, dispatcher, layouts, worker, saver, targets, manners, states, stats
        )
        self.receiver = Receiver(
            peers.me,
            config,
            secrets,
            origins,
            dispatcher,
            self._replicas,
            self._layouts,
            worker,
            self._stats,
        )
        self._restorer = Restorer(peers.me, dispatcher, worker, gates, stats, self._restored)
        self._held = HeldStates(dispatcher, layouts, states.unknown)
        asks = DirectClient(peers.me, peers.client, secrets)
        self._fetcher = Fetcher(
            dispatcher, self._replicas, self.receiver.arrivals, self.paths, asks, peers.member
        )
        self._importer = Importer(
            peers.me,
            dispatcher,
            self._replicas,
            self._layouts,
            worker,
            self._restorer,
            self._held,
            self._fetcher,
            self._stats,
            config.min_tokens,
            self.prompts,
        )
        self.pulls = PullServer(
            config,
            peers,
            origins,
            dispatcher,
            self._replicas,
            layouts,
            worker,
            sender,
            self._pusher,
        )

        self.metrics = KvMetrics(
            self._stats, self._replicas, worker, self.paths, lambda: self._active
        ).families

    async def start(self) -> None:
        """Start the worker; a node that cannot run one serves all the same, without sharing."""
        if not self._config.enabled:
            return
        try:
            await self._worker.start()
            self._active = True
        except KvError as error:
            self._off = str(error)
            log.warning("kv_share.off: %s", error)

    async def stop(self) -> None:
        await self._pusher.stop()
        await self.paths.stop()
        await self.receiver.stop()
        await self._importer.stop()
        await self._held.stop()
        await self._restorer.stop()
        await self._stash.stop()
        await self._layouts.stop()
        if self._active:
            await self._worker.stop()

    # -- what the node tells -------------------------------------------------------------------------
    def backend_changed(self, view: BackendView) -> None:
        if self._active:
            self._layouts.changed(view)

    def engine_restarted(self, backend: str) -> None:
        """A new process, which holds nothing yet."""
        self._states.backend_unknown(backend)

    def backend_gone(self, backend: str, model: str) -> None:
        self._states.backend_unknown(backend)
        self._gates.forget(backend)
        self._held.backend_gone(backend)
        self._manners.forget(backend)
        self._layouts.removed(backend, model)

    def occupies(self, backend: str) -> bool:
        """Does a save or restore stop this engine now?"""
        return self._gates.is_closed(backend)

    def worker_restarted(self) -> None:
        """A new worker holds no replicas."""
        self._replicas.clear()

    async def prepare(self, grant: Grant) -> None:
        if self._active:
            await self._stash.before(grant)
            await self._importer.prepare(grant)

    async def hand_over(self, backend: str | None = None) -> None:
        """See `Pusher.hand_over`."""
        if self._active:
            await self._pusher.hand_over(backend)

    def peer_gone(self, node: str) -> None:
        self._targets.peer_gone(node)

    def turn_ended(self, grant: Grant, outcome: Outcome, binding: Binding | None) -> None:
        if not self._active:
            return
        self._importer.turn_ended(grant, outcome, binding)
        key = key_of(grant)
        is_lasting = self._dispatcher.book.is_lasting(grant.ask)
        self._note_slot(grant, outcome, binding, is_lasting)
        if key is None:
            return
        if not grant.ask.kv_share:
            self._pusher.withhold(key)
        elif binding is not None and is_lasting:
            self._pusher.turn_ended(key, binding)

    def _note_slot(self, grant: Grant, outcome: Outcome, binding: Binding | None, is_lasting: bool) -> None:
        """What the turn left in its slot."""
        key = key_of(grant)
        if grant.is_forward or not grant.ask.needs_slot:
            return
        if not grant.ask.pinnable or grant.slot is None:
            self._states.backend_unknown(grant.backend)  # the engine chose the slot
        elif key is None or binding is None:
            self._states.unknown(SlotRef(grant.backend, grant.slot))
        else:
            cached = outcome.usage.cached if outcome.usage is not None else None
            self._states.ran(key, binding, cached, shared=grant.ask.kv_share, lasting=is_lasting)

    def _restored(self, replica: Replica, binding: Binding, restore_s: float) -> None:
        self._states.restored(replica.key, binding, replica.kept)
        if binding.ref is not None:
            self._manners.restored(binding.ref.backend, restore_s, time.monotonic())

    def _partners(self) -> list[Member]:
        """Members whose engines could restore a state of this node's."""
        found = []
        for name, heard in self._dispatcher.peers.reports().items():
            for entry in heard.report.models:
                own = self._layouts.identity(entry.name)
                if own is not None and entry.kv is not None and entry.kv.matches(own):
                    found.append(self._member(name))
                    break
        return [member for member in found if member is not None]

    # -- what others ask -----------------------------------------------------------------------------
    def identity(self, model: str) -> KvIdentity | None:
        return self._layouts.identity(model) if self._active else None

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = {"enabled": self._config.enabled, "at_unix_s": round(time.time(), 3)}
        if self._off:
            body["off"] = self._off
        body["replicas"] = len(self._replicas)
        body["replica_bytes"] = self._replicas.n_bytes
        body["memory_bytes"] = int(self._config.memory)
        body["models"] = self._layouts.status()
        if why_not := self._layouts.why_not():
            body["not_portable"] = why_not
        body["links"] = self.paths.status()
        body["held"] = self._held.as_json()
        body["pulls"] = self._fetcher.as_json() | self.pulls.as_json()
        body["pushing"] = self._pusher.pushing
        body["manners"] = self._manners.as_json(time.monotonic())
        return body | self._stats.as_json() | {"worker": asdict(self._worker.stats())}
