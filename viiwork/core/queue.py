"""The wait queue: requests that found every slot taken, first in, first out for each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from viiwork.core.turn import Ask
from viiwork.errors import QueueFull

D = TypeVar("D")


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One request in a queue; compared by identity."""

    ask: Ask
    arrived_at: float  # of the request at this node; earlier than `since` when it was tried before
    since: float
    deadline: float
    earlier_s: float = 0.0  # waited in earlier tries of the same request

    def waited_s(self, now: float) -> float:
        return self.earlier_s + now - self.since


class WaitQueue:
    """Queues of all models, at most `limit` waiters each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queues: dict[str, dict[Waiter, None]] = {}

    def depth(self, model: str) -> int:
        return len(self._queues.get(model, ()))

    def asks(self, model: str) -> Iterator[Ask]:
        """What waits for the model."""
        return (waiter.ask for waiter in self._queues.get(model, ()))

    def enter(
        self, ask: Ask, now: float, wait_s: float, earlier_s: float = 0.0, arrived_at: float | None = None
    ) -> Waiter:
        """Join the model's queue. Raises `QueueFull`.

        A request that was tried before says when it arrived, and stands before all that came later, also in a
        queue that they have filled: losing a race for a slot must not cost it its place. So failed forwards
        come on top of the limit; the node's connections bound them.
        """
        queue = self._queues.setdefault(ask.model, {})
        if len(queue) >= self._limit and arrived_at is None:
            if not queue:
                del self._queues[ask.model]
            raise QueueFull(f"{ask.model}: all slots are busy and {self._limit} requests wait already")
        waiter = Waiter(ask, now if arrived_at is None else arrived_at, now, now + wait_s, earlier_s)
        queue[waiter] = None
        if arrived_at is not None:
            for later in [other for other in queue if other.arrived_at > arrived_at]:
                queue[later] = queue.pop(later)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Take a waiter out, wherever it stands; nothing happens when it is out already."""
        queue = self._queues.get(waiter.ask.model)
        if queue is not None:
            queue.pop(waiter, None)
            if not queue:
                del self._queues[waiter.ask.model]

    def runnable(self, decide: Callable[[Waiter], D | None]) -> Iterator[tuple[Waiter, D]]:
        """Waiters that can run now, in order, each taken out before it is handed over.

        `decide` answers None for one that still has to wait; those behind it get their chance all the same,
        so that a request bound to a full node does not hold up the others. The caller must act on each pair
        before it takes the next one.
        """
        for model in list(self._queues):
            for waiter in list(self._queues.get(model, ())):
                decision = decide(waiter)
                if decision is not None:
                    self.leave(waiter)
                    yield waiter, decision
