"""The importing side of kv_share: before a turn runs in its slot, the best state of its session is brought
there if that pays; afterwards the engine's own counts say what it was worth.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from viiwork.core.holdings import still_right
from viiwork.core.moves import Turn, cause_of, home_of
from viiwork.core.replicas import PARTLY_SHARE, Replica, ReplicaTable, warmth
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.core.ways import Way, best_way, worth_s
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.limits import KV_NO_REUSE_MAX
from viiwork.node.background import Background
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_held import HeldStates
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_prompt import Prompts
from viiwork.node.kv_pull import Fetcher
from viiwork.node.kv_replicas import drop
from viiwork.node.kv_restore import Restorer
from viiwork.node.kv_stats import KvStats, Transfer, reason_of

log = logging.getLogger(__name__)

PREFILL_ALPHA = 0.3  # weight of the newest turn in a model's prefill time
PREFILL_MIN_TOKENS = 256  # a turn that reads fewer measures the overhead


@dataclass(slots=True)
class _Running:
    """A turn in a slot of this node, from its grant to its end."""

    key: SessionKey
    turn: Turn
    replica: Replica | None = None  # what was restored for it


class Importer:
    """Owner of what is known of the turns that run here, as kv_share is concerned."""

    def __init__(
        self,
        me: str,
        dispatcher: Dispatcher,
        replicas: ReplicaTable,
        layouts: EngineLayouts,
        worker: KvWorker,
        restorer: Restorer,
        held: HeldStates,
        fetcher: Fetcher,
        stats: KvStats,
        min_tokens: int,
        prompts: Prompts,
    ) -> None:
        self._me = me
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._layouts = layouts
        self._worker = worker
        self._restorer = restorer
        self._held = held
        self._fetcher = fetcher
        self._stats = stats
        self._min_tokens = min_tokens
        self._prompts = prompts
        self._background = Background()
        self._running: dict[int, _Running] = {}  # by lease
        self._read_s: dict[str, float] = {}  # model -> seconds a prompt token, until it has a score
        self._no_reuse: dict[str, int] = {}  # model -> imports in a row of which nothing was reused

    async def stop(self) -> None:
        await self._background.stop()

    # -- before a turn -------------------------------------------------------------------------------
    async def prepare(self, grant: Grant) -> None:
        """Bring the session's state into the granted slot, if that pays; faults are counted, not raised."""
        ask = grant.ask
        if ask.session is None or grant.slot is None:
            return
        key, ref = (ask.session, ask.model), SlotRef(grant.backend, grant.slot)
        running = self._running[grant.lease] = _Running(key, Turn(self._home(key) or ask.home))
        turn = running.turn
        binding, replica = self._dispatcher.sessions.get(key), self._replicas.get(key)
        here = binding if binding is not None and binding.ref == ref else None
        if here is not None:
            turn.n_held, turn.is_prefix = _right(ask, here), _begins(ask, here)
        elif replica is None:
            replica = self._of_another(ask)
        if replica is None and not self._fetcher.has_any(key):
            if here is None:
                turn.cause = "evicted" if self._replicas.was_evicted(key) else "no_replica"
            return  # nothing to lose: no engine is asked
        layout = self._layouts.get(ref.backend)
        if layout is None or not ask.pinnable:
            if not turn.n_held:
                turn.cause = "not_portable" if layout is None else "not_pinnable"
                self._stats.imports.skipped[turn.cause] += 1
            return
        if here is not None and not await self._still_there(here, key, ref, layout):
            here, turn.n_held = None, 0
        if here is not None and not here.n_tokens and not _is_newer(replica, here):
            return  # nobody counted what it holds: it is as good as anything older
        await self._choose(grant, running, here, replica, layout)

    def _of_another(self, ask: Ask) -> Replica | None:
        """The replica of the conversation this one parted from, unless an engine here has as new a state."""
        links = ask.chain.links if ask.chain is not None else ()
        of_model = (replica for replica in self._replicas if replica.key[1] == ask.model)
        found = (replica for replica in of_model if replica.key[0] == ask.parent or replica.tip in links)
        best = max(found, key=lambda replica: _right(ask, replica), default=None)
        here = self._dispatcher.sessions.get(best.key) if best is not None else None
        return best if here is None or not here.is_here or _is_newer(best, here) else None

    async def _still_there(self, here: Binding, key: SessionKey, ref: SlotRef, layout: EngineLayout) -> bool:
        if here.n_tokens < self._min_tokens or self._dispatcher.sessions.is_from_ram(ref, key):
            return True
        if await self._held.is_held(here, layout):
            return True
        log.info(
            "kv_share.lost session=%s model=%s slot=%s/%d tokens=%d",
            key[0][:8],
            key[1],
            ref.backend,
            ref.slot,
            here.n_tokens,
        )
        self._dispatcher.sessions.emptied(ref)
        return False

    async def _choose(
        self,
        grant: Grant,
        running: _Running,
        here: Binding | None,
        replica: Replica | None,
        layout: EngineLayout,
    ) -> None:
        ask, turn, read_s = grant.ask, running.turn, self._seconds_a_token(grant.ask.model)
        slot = Way("slot", turn.n_held)
        ways = []
        if replica is not None and (here is None or _is_newer(replica, here)):
            n_tokens = _right(ask, replica)
            cost_s = self._restorer.costs.seconds(ask.model, replica.n_bytes)
            ways.append(Way("import", n_tokens, cost_s))
        newer_than = max(
            here.generation if here is not None else -1, replica.generation if ways and replica else -1
        )
        fetch = self._fetcher.ways(ask, running.key, newer_than, layout, self._restorer.costs)
        best = best_way(slot, [*ways, *fetch], read_s)
        if best.kind in ("tail", "pull"):
            assert read_s is not None  # nothing is waited for before that is known
            import_s = self._restorer.costs.seconds(ask.model, best.n_tokens * layout.shape.token_bytes)
            limit_s = (best.n_tokens - slot.n_tokens) * read_s - import_s
            failed = await self._fetcher.fetch(best, ask, running.key, newer_than, layout, limit_s)
            replica = self._replicas.get(running.key)
            if failed:
                turn.cause, turn.is_behind = failed, True
                best = best_way(slot, ways, read_s)
            else:
                best = best._replace(kind="import")
        elif fetch:
            turn.is_behind = max(way.n_tokens for way in fetch) > best.n_tokens
        if best.kind == "slot" or replica is None:
            self._passed_over(turn, ways, ask.model)
            return
        await self._import(grant, running, replica, layout, worth_s(best, slot, read_s))

    def _passed_over(self, turn: Turn, ways: list[Way], model: str) -> None:
        """Nothing is restored; say why, unless the slot has it all."""
        if any(way.n_tokens > turn.n_held for way in ways):
            turn.cause = turn.cause or "not_worth_it"
            self._stats.imports.skipped["not_worth_it"] += 1
            self._restorer.costs.passed_over(model)
        elif not turn.n_held and not turn.cause:
            turn.cause = "diverged" if ways else "replica_behind" if turn.is_behind else "no_replica"

    async def _import(
        self, grant: Grant, running: _Running, replica: Replica, layout: EngineLayout, within_s: float
    ) -> None:
        ask, turn = grant.ask, running.turn
        ref = SlotRef(grant.backend, grant.slot or 0)
        useful = await self._prompts.common_tokens(ask, layout, replica)
        if useful is not None and useful <= turn.n_held:
            turn.cause = turn.cause if turn.n_held else "diverged"
            return
        try:
            # In the slot it is this conversation's, though another one's may have been taken.
            taken = replace(replica, key=running.key)
            binding = await self._restorer.restore(taken, layout, ref, within_s, useful or 0)
        except (ViiworkError, OSError, TimeoutError) as error:
            self._failed(grant, running, replica, ref, error)
            return
        running.replica = replica
        turn.home = turn.home or replica.source  # whoever made it may have left
        turn.cause, turn.n_held, turn.n_restored = "", 0, binding.n_tokens
        turn.is_prefix = _begins(ask, replica)

    def _failed(
        self, grant: Grant, running: _Running, replica: Replica, ref: SlotRef, error: BaseException
    ) -> None:
        reason = reason_of(error)
        if reason == "not_held":  # nothing that was kept is of the prompt, and the slot is as it was
            running.turn.cause = running.turn.cause if running.turn.n_held else "diverged"
            if replica.key == running.key:
                self._forget(replica)
            return
        self._stats.ended(
            Transfer(
                what="import",
                session=replica.key[0],
                model=replica.key[1],
                reason=reason,
                detail=str(error) or reason,
                request=grant.ask.request_id,
                peer=replica.source,
            )
        )
        turn = running.turn
        turn.cause = "import_too_slow" if isinstance(error, TimeoutError) else f"import_failed:{reason}"
        turn.n_held = 0
        # Whatever the slot held may be gone: a failed restore empties it.
        self._dispatcher.sessions.emptied(ref)
        # The turn now runs without it; restored later, it would replace the newer state that leaves behind.
        if replica.key == running.key or isinstance(error, KvError):
            self._forget(replica)

    # -- after it ------------------------------------------------------------------------------------
    def turn_ended(self, grant: Grant, outcome: Outcome, binding: Binding | None) -> None:
        """Say what a session's change of host was worth, and learn from what the engine counted."""
        if grant.is_forward:
            return
        running = self._running.pop(grant.lease, None)
        usage, model = outcome.usage, grant.ask.model
        if usage is None or usage.cached is None or usage.prefilled is None:
            return
        if outcome.streamed and outcome.ttft_s is not None and usage.prefilled >= PREFILL_MIN_TOKENS:
            rate = outcome.ttft_s / usage.prefilled
            before = self._read_s.get(model, rate)
            self._read_s[model] = before + PREFILL_ALPHA * (rate - before)
        if (layout := self._layouts.get(grant.backend)) is not None:
            cost_ms = self._restorer.costs.ms_per_1k(model, layout.shape.token_bytes)
            self._dispatcher.speeds.imports(model, cost_ms)
        if running is None:
            return
        turn, key = running.turn, running.key
        if not turn.home and (late := self._replicas.get(key)) is not None:
            turn.home = late.source  # its client was faster than the state, and all news of it
        if turn.home not in ("", self._me):
            self._judge_move(grant, running, usage.cached, usage.cached + usage.prefilled)
        elif turn.n_held >= self._min_tokens and usage.cached < PARTLY_SHARE * turn.n_held:
            self._held.mistaken()
            log.info("kv_share.not_held session=%s model=%s tokens=%d", key[0][:8], model, turn.n_held)
        if running.replica is not None and turn.is_prefix:
            self._judge_reuse(model, running.replica, usage.cached)
        if binding is not None and binding.n_tokens >= self._min_tokens:
            self._held.turn_ended(key, binding)

    def _judge_move(self, grant: Grant, running: _Running, cached: int, prompt: int) -> None:
        found = warmth(cached, prompt)
        cause = cause_of(running.turn, cached) if found != "warm" else ""
        self._stats.moved(found, cause, cached)
        log.info(
            "kv_share.move request=%s how=%s session=%s model=%s from=%s reused=%d of=%d%s",
            grant.ask.request_id,
            found,
            running.key[0][:8],
            grant.ask.model,
            running.turn.home,
            cached,
            prompt,
            f" cause={cause}" if cause else "",
        )

    def _judge_reuse(self, model: str, replica: Replica, cached: int) -> None:
        # A restore that answers 200 proves nothing: some models' states give no reuse whatever they say.
        if cached > 0:
            self._no_reuse.pop(model, None)
            return
        self._forget(replica)
        self._no_reuse[model] = self._no_reuse.get(model, 0) + 1
        if self._no_reuse[model] >= KV_NO_REUSE_MAX:
            why = f"{KV_NO_REUSE_MAX} restored states in a row gave no reuse (cache_n 0)"
            self._layouts.not_portable(model, why)
            self._no_reuse.pop(model)

    # -- inside --------------------------------------------------------------------------------------
    def _home(self, key: SessionKey) -> str:
        replica = self._replicas.get(key)
        states = self._dispatcher.book.at_peers(key).items()
        in_engines = [(node, state.generation) for node, state in states if state.where != "replica"]
        binding = self._dispatcher.sessions.get(key)
        return home_of(self._me, binding, [replica] if replica is not None else [], in_engines)

    def _seconds_a_token(self, model: str) -> float | None:
        perf = self._dispatcher.speeds.perf(model, time.monotonic())
        return perf.prefill_ms_per_1k / 1e6 if perf is not None else self._read_s.get(model)

    def _forget(self, replica: Replica) -> None:
        self._replicas.remove(replica.name)
        self._background.go(drop(replica.name, self._worker))


def _right(ask: Ask, state: Binding | Replica) -> int:
    """Tokens of the state that are a prefix of the prompt; a replica may be of another session."""
    session = state.key[0] if isinstance(state, Replica) else ask.session or ""
    return still_right(ask, session, state.tip, state.n_tokens)


def _begins(ask: Ask, state: Binding | Replica) -> bool:
    """Is nothing known that speaks against all of the state being a prefix of the prompt?"""
    return ask.chain is None or not state.tip or state.tip in ask.chain.links


def _is_newer(replica: Replica | None, here: Binding) -> bool:
    return replica is not None and replica.generation > here.generation


def key_of(grant: Grant) -> SessionKey | None:
    """The session a grant's turn belongs to."""
    return (grant.ask.session, grant.ask.model) if grant.ask.session is not None else None
