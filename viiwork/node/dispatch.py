"""The dispatcher: owner of slots, sessions, peers and queues at run time; every request passes here twice.

The decisions are `core.router`'s. This module keeps the promises around them: a grant is given back exactly
once, a waiter is woken by what frees a slot, and a request has one queue budget however often it is tried.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator

from viiwork.config.model import RoutingSection
from viiwork.core.peers import PeerTable
from viiwork.core.queue import Waiter, WaitQueue
from viiwork.core.router import Decision, Forward, Local, LocalUnslotted, Refuse, View, Wait, choose
from viiwork.core.sessions import Binding, SessionTable
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.stalls import Running
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.errors import AllRoutesRefused, QueueTimeout, ShuttingDown
from viiwork.limits import RETRIED_REQUESTS_MAX

log = logging.getLogger(__name__)

WAKE_TICK_S = 0.25  # how soon a waiter notices what no event announces: a report that became stale

Prepare = Callable[[Grant], Awaitable[None]]
Ended = Callable[[Grant, Outcome, Binding | None], None]


class Dispatcher:
    """Implements `api.ports.Dispatcher`."""

    def __init__(
        self,
        me: str,
        routing: RoutingSection,
        *,
        prepare: Prepare,
        on_end: Ended,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.slots = SlotTable()
        self.sessions = SessionTable()
        self.peers = PeerTable(routing.stale_after)
        self.queue = WaitQueue(routing.queue_max)
        self._view = View(me, self.slots, self.sessions, self.peers)
        self._me = me
        self._routing = routing
        self._prepare = prepare
        self._on_end = on_end
        self._clock = clock
        self._wall_ms = wall_ms
        self._waiting: dict[Waiter, asyncio.Future[Grant]] = {}
        self._waited_s: OrderedDict[str, float] = OrderedDict()  # of requests that may be tried again
        self._saving: dict[int, tuple[SlotRef, asyncio.Event]] = {}  # kv_share's leases; set when given back
        self._in_slots: dict[int, tuple[Grant, float]] = {}  # lease -> what runs in it, and since when
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._granted = 0
        self.turns = 0

    # -- api.ports.Dispatcher ------------------------------------------------------------------------
    async def acquire(self, ask: Ask, exclude: Collection[str] = ()) -> Grant:
        """See `api.ports.Dispatcher.acquire`."""
        waited_s = await self._until_saved(ask) if ask.session is not None and self._saving else 0.0
        if self._draining:
            raise ShuttingDown(f"{self._me} is shutting down")
        if exclude and ask.forwarded_by is not None:
            raise AllRoutesRefused(f"{self._me} failed to run the forward")  # its entry node tries elsewhere
        now = self._clock()
        decision = choose(self._view, ask, now, exclude)
        if exclude and (isinstance(decision, Wait) or len(exclude) > self._routing.forward_retry):
            if len(exclude) > self._routing.forward_retry + 1:
                raise AllRoutesRefused(f"every node that serves {ask.model!r} refused the request")
            # One last try with nobody excluded: a node that refused may have room again by now.
            decision = choose(self._view, ask, now)
        match decision:
            case Refuse():
                raise decision.error(decision.message)
            case Wait():
                grant = await self._wait(ask, decision)
            case _:
                grant = self._grant(ask, decision, now)
        grant.queued_s += waited_s
        if ask.session is not None and grant.lease and not grant.is_forward:
            try:
                await self._prepare(grant)
            except BaseException:
                self.finish(grant, Outcome("client_gone"))
                raise
        return grant

    def finish(self, grant: Grant, outcome: Outcome) -> None:
        """See `api.ports.Dispatcher.finish`."""
        if grant.finished:
            return
        grant.finished = True
        self._granted -= 1
        if self._granted == 0:
            self._idle.set()
        if outcome.result in ("refused", "unreachable", "stalled"):
            self._remember_wait(grant)
        else:
            self._waited_s.pop(grant.ask.request_id, None)
        binding = (
            self._finish_forward(grant, outcome) if grant.is_forward else self._finish_local(grant, outcome)
        )
        self._on_end(grant, outcome, binding)
        self.wake()

    # -- the rest of the node ------------------------------------------------------------------------
    def take_idle_slot(self, ref: SlotRef) -> int | None:
        """Lease a slot for kv_share's own work, if nobody holds it."""
        if not self.slots.is_free(ref):
            return None
        lease = self.slots.lease(ref)
        self._saving[lease] = ref, asyncio.Event()
        return lease

    def running(self) -> Iterator[Running]:
        """The requests in slots of this node."""
        for grant, since in self._in_slots.values():
            yield Running(grant.ask.request_id, grant.backend, since, grant.answered)

    def give_back(self, lease: int) -> None:
        """End such a lease; once."""
        self.slots.release(lease)
        _, done = self._saving.pop(lease)
        done.set()
        self.wake()

    def wake(self) -> None:
        """Let those waiters run that can run now."""
        if not self._waiting:
            return
        now = self._clock()

        def decide(ask: Ask) -> Decision | None:
            decision = choose(self._view, ask, now)
            return None if isinstance(decision, Wait) else decision

        ready: Iterator[tuple[Waiter, Decision]] = self.queue.runnable(decide)
        for waiter, decision in ready:
            future = self._waiting.pop(waiter, None)
            if future is None or future.done():
                continue  # gave up in this very moment
            if isinstance(decision, Refuse):
                future.set_exception(decision.error(decision.message))
                continue
            if now >= waiter.deadline:  # this process stood still: its time was over before the slot was free
                message = f"no slot for {waiter.ask.model!r} became free in time"
                future.set_exception(QueueTimeout(message))
                continue
            grant = self._grant(waiter.ask, decision, now)
            grant.queued_s += now - waiter.since
            future.set_result(grant)

    async def wake_regularly(self) -> None:
        """Run for the node's life."""
        while True:
            await asyncio.sleep(WAKE_TICK_S)
            self.wake()

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
    def _grant(self, ask: Ask, decision: Decision, now: float) -> Grant:
        match decision:
            case Local(ref):
                lease = self.slots.lease(ref)
                key = (ask.session, ask.model) if ask.session is not None else None
                self.sessions.taken(ref, key)
                url = self.slots.url(ref.backend)
                grant = Grant(ask, self._me, url, ref.backend, ref.slot, lease=lease)
                self._in_slots[lease] = grant, now
            case LocalUnslotted(backend):
                grant = Grant(ask, self._me, self.slots.url(backend), backend)
            case Forward(node):
                number = self.peers.forward_started(node, ask.model, now)
                grant = Grant(ask, node, self.peers.url(node), lease=number)
            case _:
                raise TypeError(f"not a place: {decision}")
        grant.queued_s = self._waited_s.get(ask.request_id, 0.0)
        self._granted += 1
        self._idle.clear()
        return grant

    async def _until_saved(self, ask: Ask) -> float:
        """Wait while kv_share saves the session's own slot; the answer is for how long, in seconds.

        The engine serves nobody during a save, and in another slot the turn would read its prompt anew.
        """
        binding = self.sessions.get((ask.session, ask.model)) if ask.session is not None else None
        if binding is None or binding.ref is None or not ask.needs_slot:
            return 0.0
        saved = next((done for ref, done in self._saving.values() if ref == binding.ref), None)
        if saved is None:
            return 0.0
        since = self._clock()
        await saved.wait()
        return self._clock() - since

    async def _wait(self, ask: Ask, decision: Wait) -> Grant:
        now = self._clock()
        budget_s = max(self._routing.queue_timeout - self._waited_s.get(ask.request_id, 0.0), 0.0)
        waiter = self.queue.enter(ask, now, budget_s)
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = future
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
            self._waiting.pop(waiter, None)
            self.queue.leave(waiter)
            future.cancel()
        self._waited_s.pop(ask.request_id, None)
        still = choose(self._view, ask, self._clock())
        if isinstance(still, Wait) and not still.served:
            raise AllRoutesRefused(f"no healthy backend serves {ask.model!r} at the moment")
        raise QueueTimeout(f"no slot for {ask.model!r} became free within {budget_s:.0f} s")

    def _remember_wait(self, grant: Grant) -> None:
        self._waited_s[grant.ask.request_id] = grant.queued_s
        while len(self._waited_s) > RETRIED_REQUESTS_MAX:
            self._waited_s.popitem(last=False)

    # -- giving back ---------------------------------------------------------------------------------
    def _finish_forward(self, grant: Grant, outcome: Outcome) -> Binding | None:
        model, now = grant.ask.model, self._clock()
        if outcome.result in ("refused", "unreachable", "stalled"):
            # Marked before the forward ends, or the wake would hand the same peer out again.
            self.peers.refused(grant.node, model, now)
        self.peers.forward_ended(grant.node, grant.lease)
        if outcome.result == "done" and outcome.status == 200 and grant.ask.session is not None:
            self.turns += 1
            key = (grant.ask.session, model)
            self.sessions.ran_elsewhere(key, grant.node, self.sessions.next_generation(key, self._wall_ms()))
        return None

    def _finish_local(self, grant: Grant, outcome: Outcome) -> Binding | None:
        self._in_slots.pop(grant.lease, None)
        ref = self.slots.release(grant.lease) if grant.lease else None
        if ref is None or outcome.result != "done" or outcome.status != 200:
            return None
        self.turns += 1
        if grant.ask.session is None:
            return None
        key = (grant.ask.session, grant.ask.model)
        total = outcome.usage.total if outcome.usage is not None else None
        known = self.sessions.get(key)
        if (
            known is not None
            and known.ref is not None
            and known.ref != ref
            and self._keeps(known, total or 0)
        ):
            return None
        binding = Binding(self._me, ref, total or 0, self.sessions.next_generation(key, self._wall_ms()))
        self.sessions.ran_here(key, binding)
        return binding

    def _keeps(self, known: Binding, total: int) -> bool:
        """Does the session keep its slot, though its last turn ran in another one?

        Its other, smaller request (an agent's title beside its chat) must not take the slot away.
        """
        if known.ref is None or not self.slots.is_routable(known.ref):
            return False
        return not self.slots.is_free(known.ref) or total < known.n_tokens // 2
