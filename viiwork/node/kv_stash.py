"""Keeps a session's state on this node before another session takes its slot."""

from __future__ import annotations

import asyncio
import time

from viiwork.config.model import KvShareSection
from viiwork.core.capacity import Perf
from viiwork.core.manners import Manners
from viiwork.core.replicas import Replica, ReplicaTable
from viiwork.core.sessions import SessionKey
from viiwork.core.slot_states import SlotState, SlotStates
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Grant
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.limits import KV_PREFILL_GUESS_MS_PER_1K, KV_SAVE_GUESS_S_PER_GB, KV_STASH_GAIN
from viiwork.node.background import Background, remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayouts
from viiwork.node.kv_replicas import take_in
from viiwork.node.kv_save import Saved, Saver
from viiwork.node.kv_send import kept_of, state_file
from viiwork.node.kv_stats import KvStats, Transfer, reason_of, stages_of
from viiwork.node.kv_targets import Targets


class Stash:
    """Saves what nobody else has, when that costs the new turn far less than it saves the old session."""

    def __init__(
        self,
        me: str,
        config: KvShareSection,
        dispatcher: Dispatcher,
        layouts: EngineLayouts,
        worker: KvWorker,
        saver: Saver,
        targets: Targets,
        manners: Manners,
        states: SlotStates,
        stats: KvStats,
    ) -> None:
        self._me = me
        self._config = config
        self._dispatcher = dispatcher
        self._layouts = layouts
        self._worker = worker
        self._saver = saver
        self._targets = targets
        self._manners = manners
        self._states = states
        self._stats = stats
        self._replicas: ReplicaTable = dispatcher.book.replicas
        self._background = Background()

    async def stop(self) -> None:
        await self._background.stop()

    async def before(self, grant: Grant) -> None:
        """Called before the granted turn touches its slot; faults are counted, not raised."""
        if grant.slot is None:
            return
        ref = SlotRef(grant.backend, grant.slot)
        state, layout = self._states.get(ref), self._layouts.get(ref.backend)
        if state is None or layout is None or not self._is_last_copy(grant, ref, state):
            return
        n_bytes = layout.shape.token_bytes * state.binding.n_tokens
        bound_s = self._bound_s(ref, state, n_bytes)
        if bound_s <= 0 or self._replicas.n_bytes + n_bytes > self._config.memory:
            return
        try:
            async with asyncio.timeout(bound_s):
                saved = await self._saver.save_leased(state.key, state.binding, layout)
        except (ViiworkError, OSError, TimeoutError) as error:
            self._not_kept(state.key, error)
            return
        self._background.go(self._keep(saved))  # the turn need not wait for it

    def _is_last_copy(self, grant: Grant, ref: SlotRef, state: SlotState) -> bool:
        key, binding, ask = state.key, state.binding, grant.ask
        if not state.is_owed or binding.n_tokens < self._config.min_tokens or key == (ask.session, ask.model):
            return False
        if ask.chain is not None and binding.tip in ask.chain.links:
            return False  # the turn builds upon it, and most of it stays
        replica = self._replicas.get(key)
        if replica is not None and replica.generation >= binding.generation:
            return False
        return not self._dispatcher.sessions.replaces(ref) and not self._targets.holders(
            key, binding.generation
        )

    def _bound_s(self, ref: SlotRef, state: SlotState, n_bytes: int) -> float:
        """How long the save may keep the new turn waiting; 0 = it is not worth it, or not affordable now."""
        n_tokens, now = state.binding.n_tokens, time.monotonic()
        perf: Perf | None = self._dispatcher.speeds.perf(state.key[1], now)
        rate = perf.prefill_ms_per_1k if perf is not None else KV_PREFILL_GUESS_MS_PER_1K
        lost_s = rate * n_tokens / 1e6
        save_s = self._manners.save_s(ref.backend, n_tokens)
        if save_s is None:
            save_s = n_bytes / 1e9 * KV_SAVE_GUESS_S_PER_GB
        is_worth_it = save_s * KV_STASH_GAIN <= lost_s
        return lost_s if is_worth_it and not self._manners.wait_s(ref.backend, n_tokens, now) else 0.0

    async def _keep(self, saved: Saved) -> None:
        try:
            done = await self._worker.keep(state_file(saved, self._me))
        except KvError as error:
            self._not_kept(saved.key, error)
            return
        finally:
            await remove_file(saved.path)
        binding = saved.binding
        facts = done.replica, saved.key, done.n_tokens, done.total_bytes, binding.generation, self._me
        replica = Replica(*facts, binding.tip, binding.scope, kept_of(done.known))
        await take_in(replica, done.dropped, self._replicas, self._worker)
        self._stats.ended(
            Transfer(
                what="keep",
                session=saved.key[0],
                model=saved.key[1],
                generation=binding.generation,
                tokens=done.n_tokens,
                kept=done.kept,
                state_bytes=done.total_bytes,
                raw_bytes=done.raw_bytes,
                took_s=done.stages.total_s,
                stages_s=stages_of(done.stages, **saved.stages_s),
            )
        )

    def _not_kept(self, key: SessionKey, error: BaseException) -> None:
        reason = reason_of(error)
        self._stats.ended(
            Transfer(what="keep", session=key[0], model=key[1], reason=reason, detail=str(error) or reason)
        )
