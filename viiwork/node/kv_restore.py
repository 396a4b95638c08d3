"""Puts a replica into a leased slot: rendered by the worker, restored by the engine, counted to the byte."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from viiwork.core.replicas import Replica
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef
from viiwork.core.ways import ImportCosts
from viiwork.errors import KvError
from viiwork.kv.client import KvWorker
from viiwork.limits import KV_IMPORT_MAX_S
from viiwork.node.background import Background, remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayout
from viiwork.node.kv_save import EngineGates
from viiwork.node.kv_stats import KvStats, Transfer, stages_of


class Restorer:
    """Does it, and learns what it costs."""

    def __init__(
        self,
        me: str,
        dispatcher: Dispatcher,
        worker: KvWorker,
        gates: EngineGates,
        stats: KvStats,
        on_restored: Callable[[Replica, Binding, float], None] = lambda *_: None,
    ) -> None:
        """`on_restored` hears what is in which slot now, and how long the engine stood."""
        self._me = me
        self._dispatcher = dispatcher
        self._worker = worker
        self._gates = gates
        self._stats = stats
        self._on_restored = on_restored
        self._background = Background()
        self.costs = ImportCosts()

    async def stop(self) -> None:
        await self._background.stop()

    async def restore(
        self, replica: Replica, layout: EngineLayout, ref: SlotRef, within_s: float, useful: int = 0
    ) -> Binding:
        """What the slot holds then. Raises `KvError`, `EngineError`, `OSError` or `TimeoutError`; what it
        held before may be gone in any case but that of `not_held`. `useful` tokens are the prompt's, 0 = all.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                n_tokens, stood_s = await self._restore(replica, layout, ref, useful)
        except TimeoutError:
            self.costs.took(layout.view.model, replica.n_bytes, time.monotonic() - started)
            raise
        self.costs.took(layout.view.model, replica.n_bytes, time.monotonic() - started)
        tip = replica.tip if n_tokens == replica.n_tokens else ""
        binding = Binding(self._me, ref, n_tokens, replica.generation, tip, replica.scope)
        self._dispatcher.sessions.ran_here(replica.key, binding)
        self._on_restored(replica, binding, stood_s)
        return binding

    async def _restore(
        self, replica: Replica, layout: EngineLayout, ref: SlotRef, useful: int
    ) -> tuple[int, float]:
        started = time.monotonic()
        name = f"in-{uuid.uuid4().hex}"
        path = layout.save_dir / name
        try:
            target = layout.target(ref.slot)
            rendered = await self._worker.render(replica.name, target, path, at_most=useful)
            render_s = time.monotonic() - started
            async with self._gates.of(ref.backend):
                queued_s = time.monotonic() - started - render_s
                if self._dispatcher.sessions.replaces(ref):
                    # A restore overwrites what the slot holds; one token of another prompt saves it to RAM.
                    await layout.client.warm_up(ref.slot, KV_IMPORT_MAX_S)
                done = await layout.client.restore(ref.slot, name, KV_IMPORT_MAX_S)
        finally:
            self._background.go(remove_file(path))  # the turn need not wait for it
        self._stats.stalled(ref.backend, done.ms / 1000)
        if done.n_restored != rendered.n_tokens or done.n_read != rendered.total_bytes:
            raise KvError(
                "restore_short",
                f"the engine restored {done.n_restored} of {rendered.n_tokens} tokens, "
                f"{done.n_read} of {rendered.total_bytes} bytes",
            )
        self._stats.ended(
            Transfer(
                what="import",
                session=replica.key[0],
                model=replica.key[1],
                generation=replica.generation,
                peer=replica.source,
                tokens=done.n_restored,
                state_bytes=rendered.total_bytes,
                took_s=time.monotonic() - started,
                stages_s=stages_of(None, render=render_s, queued=queued_s, restore=done.ms / 1000),
            )
        )
        return rendered.n_tokens, done.ms / 1000
