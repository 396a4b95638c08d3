"""The dispatcher: owner of slots, sessions, peers and queues at run time; every request passes here twice.

The decisions are `core.router`'s. This module keeps the promises around them: a grant is given back exactly
once, a waiter is woken by what frees a slot, and a request has one queue budget however often it is tried.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator

from viiwork.config.model import RoutingSection
from viiwork.core.capacity import Perf
from viiwork.core.choice import Choice, Policy, Question
from viiwork.core.holdings import scope_of
from viiwork.core.peers import PeerTable
from viiwork.core.queue import Waiter, WaitQueue
from viiwork.core.receipts import Receipts, Step
from viiwork.core.router import (
    Decided,
    Forward,
    Local,
    LocalUnslotted,
    Refuse,
    Terms,
    View,
    Wait,
    choose,
)
from viiwork.core.score import Speeds
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.stalls import Running
from viiwork.core.tries import Tries
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.errors import AllRoutesRefused, NoFreeSlot, QueueFull, QueueTimeout, ShuttingDown, ViiworkError
from viiwork.limits import FULL_ANSWERS_MAX, LEFT_DRAIN_S, QUEUE_LATE_S
from viiwork.node.clock import wall_ms
from viiwork.node.sessions import NodeSessions
from viiwork.node.slot_loans import SlotLoans

log = logging.getLogger(__name__)

WAKE_TICK_S = 0.25  # how soon a waiter notices what no event announces: a report that became stale

Prepare = Callable[[Grant], Awaitable[None]]
Ended = Callable[[Grant, Outcome, Binding | None], None]
Decides = Callable[[str, Question, Choice], None]  # with the request's id


def policy_of(routing: RoutingSection) -> Policy:
    """How nodes are chosen, as the config has it."""
    return Policy(performance=routing.performance)


OUT_OF_TIME_S = 1e9  # waited for longer than any budget: nothing is held out for


class Dispatcher:
    """Implements `api.ports.Dispatcher`."""

    def __init__(
        self,
        me: str,
        routing: RoutingSection,
        *,
        prepare: Prepare,
        on_end: Ended,
        ask_peers: Callable[[], Awaitable[None]] | None = None,
        on_decided: Decides | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = wall_ms,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`on_decided` hears each choice between nodes; `draw` gives random numbers from 0 to 1."""
        self.slots = SlotTable()
        self.book = NodeSessions(me, wall_ms())
        self.sessions = self.book.table
        self.peers = PeerTable(routing.stale_after)
        self.queue = WaitQueue(routing.queue_max)
        self.speeds = Speeds()
        self.receipts = Receipts()
        self.policy = policy_of(routing)
        self._view = View(
            me, self.slots, self.sessions, self.peers, self.policy, self.book.held, self.speeds.perf
        )
        self._sizes, self._failures = self._view.sizes, self._view.failures
        self._me = me
        self._routing = routing
        self._prepare = prepare
        self._on_end = on_end
        self._ask_peers = ask_peers
        self._on_decided = on_decided
        self._clock = clock
        self._wall_ms = wall_ms
        self._draw = draw
        self._waiting: dict[Waiter, asyncio.Future[Grant]] = {}
        self._tries = Tries()
        self._loans = SlotLoans(self.slots)
        self._in_slots: dict[int, tuple[Grant, float]] = {}  # lease -> what runs in it, and since when
        self._left: dict[str, float] = {}  # peers that took their leave, and when
        self._before: dict[int, Binding] = {}  # lease -> where the session was when its turn began
        self._forwarded: dict[int, Grant] = {}  # number -> what runs at a peer
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._granted = 0
        self.turns = 0

    # -- api.ports.Dispatcher ------------------------------------------------------------------------
    async def acquire(self, ask: Ask, exclude: Collection[str] = ()) -> Grant:
        """See `api.ports.Dispatcher.acquire`."""
        if self._ask_peers is not None and self.book.conversations.is_unknown(ask):
            await self._ask_peers()  # a conversation that grew elsewhere: cheaper to ask than to read it anew
        ask = self.book.identified(ask)
        try:
            return await self._acquire(ask, exclude)
        except BaseException as error:
            self.book.ended(ask)
            if isinstance(error, ViiworkError):
                self.receipts.refused(ask, f"{error.code}: {error}")
            raise

    async def _acquire(self, ask: Ask, exclude: Collection[str]) -> Grant:
        waited_s = await self._until_saved(ask) if ask.session is not None and self._loans else 0.0
        if self._draining:
            raise ShuttingDown(f"{self._me} is shutting down")
        if exclude and ask.forwarded_by is not None:
            raise AllRoutesRefused(f"{self._me} failed to run the forward")  # its entry node tries elsewhere
        now = self._clock()
        tried = self._tries.get(ask.request_id)
        if tried.n_full >= FULL_ANSWERS_MAX:
            raise QueueTimeout(f"{tried.n_full} times the free slots for {ask.model!r} were taken on the way")
        decided = self._choose(ask, now, tried.waited_s, exclude)
        n_failed = len(exclude) - tried.n_full  # a node that is merely full costs no try
        if exclude and (isinstance(decided.decision, Wait) or n_failed > self._routing.forward_retry):
            if n_failed > self._routing.forward_retry + 1:
                raise AllRoutesRefused(f"every node that serves {ask.model!r} refused the request")
            # One last try with nobody excluded: a node that refused may have room again by now.
            decided = self._choose(ask, now, tried.waited_s)
        if isinstance(decided.decision, (Wait, Refuse)):
            grant = await self._wait_or_refuse(ask, decided, now)
        else:
            grant = self._grant(ask, decided, now)
        grant.queued_s += waited_s
        if ask.session is not None and grant.lease and not grant.is_forward:
            try:
                await self._prepare(grant)
            except BaseException:
                self.finish(grant, Outcome("client_gone"))
                raise
        return grant

    async def _wait_or_refuse(self, ask: Ask, decided: Decided, now: float) -> Grant:
        decision = decided.decision
        if isinstance(decision, Refuse):
            raise decision.error(decision.message)
        try:
            return await self._wait(ask, decided)
        except QueueFull:
            if isinstance(decision, Wait) and decision.hold_ms == math.inf:
                raise
        # Others wait here already; a node that would only be slower takes it at once.
        decided = self._choose(ask, now, OUT_OF_TIME_S)
        if isinstance(decided.decision, (Wait, Refuse)):
            raise QueueFull(f"{ask.model}: all slots are busy and {self._routing.queue_max} requests wait")
        return self._grant(ask, decided, now)

    def _choose(self, ask: Ask, now: float, waited_s: float, exclude: Collection[str] = ()) -> Decided:
        budget_ms = max(self._routing.queue_timeout - waited_s, 0.0) * 1000
        terms = Terms(now, waited_s * 1000, budget_ms, (self._draw(), self._draw()))
        return choose(self._view, ask, terms, exclude)

    def finish(self, grant: Grant, outcome: Outcome) -> None:
        """See `api.ports.Dispatcher.finish`."""
        if grant.finished:
            return
        grant.finished = True
        self._granted -= 1
        if self._granted == 0:
            self._idle.set()
        if outcome.result in ("refused", "unreachable", "stalled"):
            self._tries.failed(grant, outcome, self._clock())
        else:
            self._tries.forget(grant.ask.request_id)
        self._learn(grant, outcome)
        self.receipts.ended(grant, outcome)
        binding = (
            self._finish_forward(grant, outcome) if grant.is_forward else self._finish_local(grant, outcome)
        )
        self.book.ended(grant.ask)
        self._on_end(grant, outcome, binding)
        self.wake()

    # -- the rest of the node ------------------------------------------------------------------------
    def perf(self, model: str) -> Perf | None:
        """The measured speed of a model here, as peers may hear it."""
        return self.speeds.perf(model, self._clock()) if self.policy.performance else None

    def take_idle_slot(self, ref: SlotRef) -> int | None:
        """Lease a slot for kv_share's own work, if nobody holds it; also of a backend that drains."""
        return self._loans.lend(ref)

    def is_at_rest(self, ref: SlotRef) -> bool:
        """Does no request run in the slot? A save of kv_share may."""
        return self.slots.is_free(ref) or self._loans.is_lent(ref)

    def is_wanted(self, ref: SlotRef, model: str) -> bool:
        """Does a request wait that could run in the slot, or for such a lease on it to end?"""
        waiting = self.queue.asks(model) if self.slots.is_routable(ref) else ()
        return any(ask.pin in (None, self._me) for ask in waiting) or self._loans.is_awaited(ref)

    def running(self) -> Iterator[Running]:
        """The requests in slots of this node."""
        for grant, since in self._in_slots.values():
            yield Running(grant.ask.request_id, grant.backend, since, grant.answered)

    def node_died(self, node: str) -> None:
        """A peer is dead; what it ran for us is lost."""
        self.peers.remove(node, self._clock())

    def node_left(self, node: str) -> None:
        """A peer said that it leaves: it takes no more, and what it runs for us ends."""
        self._left[node] = self._clock()
        self.peers.remove(node, self._clock())

    def lost_forwards(self, silent_s: float) -> list[str]:
        """Ids of unanswered requests at peers that are gone, or have not reported for so long.

        A peer that took its leave lets what it runs end first, and is given the time for it.
        """
        now = self._clock()
        self._left = {node: at for node, at in self._left.items() if now - at < LEFT_DRAIN_S}
        lost = []
        for grant in self._forwarded.values():
            if not grant.answered:
                age_s = self.peers.silent_s(grant.node, now)
                if (age_s is None and grant.node not in self._left) or (age_s or 0.0) >= silent_s:
                    lost.append(grant.ask.request_id)
        return lost

    def give_back(self, lease: int) -> None:
        """End such a lease; once."""
        self.slots.release(lease)
        self._loans.end(lease)
        self.wake()

    def wake(self) -> None:
        """Let those waiters run that can run now."""
        if not self._waiting:
            return
        now = self._clock()
        full: set[str] = set()  # models nobody has room for: what holds for one waiter holds for all

        def decide(waiter: Waiter) -> Decided | None:
            ask = waiter.ask
            if now > waiter.deadline + QUEUE_LATE_S:
                return Decided(Refuse(QueueTimeout, f"no slot for {ask.model!r} became free in time"))
            if ask.needs_slot and ask.model in full:
                return None
            decided = self._choose(ask, now, waiter.waited_s(now))
            if not isinstance(decided.decision, Wait):
                return decided
            if decided.decision.full:
                full.add(ask.model)
            return None

        for waiter, decided in self.queue.runnable(decide):
            future = self._waiting.pop(waiter, None)
            if future is None or future.done():
                continue  # gave up in this very moment
            if isinstance(decided.decision, Refuse):
                future.set_exception(decided.decision.error(decided.decision.message))
                continue
            future.set_result(self._grant(waiter.ask, decided, now, waiter.waited_s(now)))

    async def wake_regularly(self) -> None:
        """Run for the node's life."""
        while True:
            await asyncio.sleep(WAKE_TICK_S)
            self.wake()

    def knows(self, model: str) -> bool:
        """Is it a model of this node or of a member, served at the moment or not?"""
        return self.slots.serves(model) or self.peers.knows(model, self._clock())

    def is_served(self, model: str) -> bool:
        """Does anybody healthy serve it, however full?"""
        if self.slots.any_routable(model) is not None:
            return True
        return any(True for _ in self.peers.serving(model, self._clock()))

    def drain(self) -> None:
        """Take no more requests; those under way may end."""
        self._draining = True
        for waiter, future in list(self._waiting.items()):
            self.queue.leave(waiter)
            if not future.done():
                future.set_exception(ShuttingDown(f"{self._me} is shutting down"))
        self._waiting.clear()

    @property
    def draining(self) -> bool:
        return self._draining

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    # -- granting ------------------------------------------------------------------------------------
    def _grant(self, ask: Ask, decided: Decided, now: float, waited_s: float | None = None) -> Grant:
        """Take the place decided on; `waited_s` of the queue budget is used up."""
        match decided.decision:
            case Local(ref):
                lease = self.slots.lease(ref)
                key = (ask.session, ask.model) if ask.session is not None else None
                if key is not None and (binding := self.sessions.get(key)) is not None:
                    self._before[lease] = binding
                self.sessions.taken(ref, key, ask.chain.links if ask.chain is not None else ())
                url = self.slots.url(ref.backend)
                grant = Grant(ask, self._me, url, ref.backend, ref.slot, lease=lease)
                self._in_slots[lease] = grant, now
            case LocalUnslotted(backend):
                grant = Grant(ask, self._me, self.slots.url(backend), backend)
            case Forward(node, wait_ms):
                number = self.peers.forward_started(node, ask.model, now)
                grant = Grant(ask, node, self.peers.url(node), lease=number, wait_ms=wait_ms)
                self._forwarded[number] = grant
            case _:
                raise TypeError(f"not a place: {decided.decision}")
        if waited_s is None:
            waited_s = self._tries.get(ask.request_id).waited_s
        grant.queued_s = waited_s
        if self._failures.is_any:
            self._failures.granted(grant.node, ask.model, now)
        step = self._noted(ask, decided, now)
        step.node, step.backend, step.queued_ms = grant.node, grant.backend, waited_s * 1000
        self._granted += 1
        self._idle.clear()
        return grant

    def _noted(self, ask: Ask, decided: Decided, now: float) -> Step:
        """Put a decision on record."""
        question, choice = decided.question, decided.choice
        if self._on_decided is not None and question is not None and choice is not None:
            self._on_decided(ask.request_id, question, choice)
        return self.receipts.add(ask, now, question, choice)

    async def _until_saved(self, ask: Ask) -> float:
        """Wait while kv_share saves the session's own slot; the answer is for how long, in seconds.

        The engine serves nobody during a save, and in another slot the turn would read its prompt anew.
        """
        binding = self.sessions.get((ask.session, ask.model)) if ask.session is not None else None
        if binding is None or binding.ref is None or not ask.needs_slot:
            return 0.0
        since = self._clock()
        if not await self._loans.until_back(binding.ref):
            return 0.0
        return self._clock() - since

    async def _wait(self, ask: Ask, decided: Decided) -> Grant:
        now, loop = self._clock(), asyncio.get_running_loop()
        earlier_s, _, arrived_at = self._tries.get(ask.request_id)
        budget_s = max(self._routing.queue_timeout - earlier_s, 0.0)
        if ask.forwarded_by is not None:
            budget_s = min(budget_s, ask.wait_ms / 1000)
        waiter = self.queue.enter(ask, now, budget_s, earlier_s, arrived_at)
        future: asyncio.Future[Grant] = loop.create_future()
        self._waiting[waiter] = future
        self._noted(ask, decided, now)
        # Another node may be taken from a certain moment on, which no event announces.
        hold_ms = decided.decision.hold_ms if isinstance(decided.decision, Wait) else math.inf
        timer = loop.call_later(hold_ms / 1000, self.wake) if hold_ms < math.inf else None
        try:
            await asyncio.wait((future,), timeout=budget_s)
            if future.done():
                return future.result()
        except BaseException:
            # Cancelled: a grant that was made in this very moment must not be lost.
            if future.done() and not future.cancelled() and future.exception() is None:
                self.finish(future.result(), Outcome("client_gone"))
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.pop(waiter, None)
            self.queue.leave(waiter)
            future.cancel()
        self._tries.forget(ask.request_id)
        return self._in_time(ask, waiter)

    def _in_time(self, ask: Ask, waiter: Waiter) -> Grant:
        """What a request is granted whose queue time has just run out, while it held out for one node."""
        now = self._clock()
        still = self._choose(ask, now, OUT_OF_TIME_S)
        if not isinstance(still.decision, (Wait, Refuse)) and now <= waiter.deadline + QUEUE_LATE_S:
            return self._grant(ask, still, now, waiter.waited_s(now))
        if ask.forwarded_by is not None:
            raise NoFreeSlot(f"no slot for {ask.model!r} became free within {ask.wait_ms} ms")
        if isinstance(still.decision, Wait) and not still.decision.served:
            raise AllRoutesRefused(f"no healthy backend serves {ask.model!r} at the moment")
        raise QueueTimeout(
            f"no slot for {ask.model!r} became free within {waiter.deadline - waiter.since:.0f} s"
        )

    # -- giving back ---------------------------------------------------------------------------------
    def _learn(self, grant: Grant, outcome: Outcome) -> None:
        """What a request's end tells about its node's speed and health, and about the size of prompts."""
        ask, now = grant.ask, self._clock()
        node, model, result = grant.node, ask.model, outcome.result
        if result == "done" and outcome.status == 200:
            if self._failures.is_any and self._failures.succeeded(node, model):
                log.info("route.recovered node=%s model=%s", node, model)
            usage = outcome.usage
            if not ask.needs_slot or usage is None:
                return
            self._sizes.learn(model, ask.body_bytes, usage)
            ttft_s, prefilled = outcome.ttft_s, usage.prefilled
            if not grant.is_forward and outcome.streamed and ttft_s is not None and prefilled is not None:
                self.speeds.sample(model, ttft_s, prefilled, now)
            return
        # An engine that refuses while its slots are free, or a peer that says more than "full", is not well.
        refusal = result == "refused" and not (grant.is_forward and outcome.status == 429)
        is_fault = result in ("unreachable", "stalled", "broken") or outcome.status >= 500
        if (is_fault or refusal) and result != "client_gone" and self._failures.failed(node, model, now):
            log.warning("route.failing node=%s model=%s: others come first for a while", node, model)

    def _finish_forward(self, grant: Grant, outcome: Outcome) -> Binding | None:
        model, now = grant.ask.model, self._clock()
        if outcome.result in ("refused", "unreachable", "stalled"):
            # Marked before the forward ends, or the wake would hand the same peer out again.
            self.peers.refused(grant.node, model, now)
        self.peers.forward_ended(grant.node, grant.lease)
        del self._forwarded[grant.lease]
        if outcome.result == "done" and outcome.status == 200 and grant.ask.session is not None:
            self.turns += 1
            key = (grant.ask.session, model)
            generation = self.sessions.next_generation(key, self._wall_ms())
            total = outcome.usage.total if outcome.usage is not None else None
            self.sessions.ran_elsewhere(key, grant.node, generation, total or 0)
            self.book.ran(grant, outcome, generation, self._clock())
        return None

    def _finish_local(self, grant: Grant, outcome: Outcome) -> Binding | None:
        self._in_slots.pop(grant.lease, None)
        before = self._before.pop(grant.lease, None)
        ref = self.slots.release(grant.lease) if grant.lease else None
        if ref is None or outcome.result != "done" or outcome.status != 200:
            return None
        self.turns += 1
        if grant.ask.session is None:
            return None
        key = (grant.ask.session, grant.ask.model)
        total = outcome.usage.total if outcome.usage is not None else None
        known = self.sessions.get(key)
        generation = self.sessions.next_generation(key, self._wall_ms())
        self.book.ran(grant, outcome, generation, self._clock(), before)
        if (
            known is not None
            and known.ref is not None
            and known.ref != ref
            and self._keeps(known, total or 0)
        ):
            return None
        chain, scope = grant.ask.chain, scope_of(grant.ask.session_key)
        tip = chain.links[-1] if chain is not None else ""
        binding = Binding(self._me, ref, total or 0, generation, tip, scope)
        cached = outcome.usage.cached if outcome.usage is not None else None
        self.sessions.ran_here(key, binding, self._clock(), cached)
        return binding

    def _keeps(self, known: Binding, total: int) -> bool:
        """Does the session keep its slot, though its last turn ran in another one?

        Its other, smaller request (an agent's title beside its chat) must not take the slot away.
        """
        if known.ref is None or not self.slots.is_routable(known.ref):
            return False
        return not self.slots.is_free(known.ref) or total < known.n_tokens // 2
