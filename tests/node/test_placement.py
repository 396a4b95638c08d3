"""Where a request runs when something stands in the way of its first choice."""

from __future__ import annotations

import asyncio

import pytest

from viiwork.config.model import RoutingSection, Seconds
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Grant, Outcome, Usage
from viiwork.errors import AllRoutesRefused, QueueTimeout, ShuttingDown
from viiwork.node.dispatch import Dispatcher

LONG = Outcome("done", 200, usage=Usage(0, 5000, 10))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def nothing(grant: Grant) -> None:
    pass


def dispatcher(*backends: str, slots: int = 1, clock: Clock | None = None, **routing) -> Dispatcher:
    d = Dispatcher(
        "a",
        RoutingSection(**{"queue_timeout": Seconds(30)} | routing),
        prepare=nothing,
        on_end=lambda grant, outcome, binding: None,
        clock=clock or Clock(),
        wall_ms=lambda: 7,
    )
    for backend in backends:
        put(d, backend, slots=slots)
    return d


def put(d: Dispatcher, backend: str, *, slots: int = 1, routable: bool = True) -> None:
    d.slots.put_backend(backend, model="m", url=f"http://{backend}", n_slots=slots, routable=routable)


async def turn(d: Dispatcher, session: str = "s") -> Grant:
    grant = await d.acquire(Ask("1", "m", session=session))
    d.finish(grant, LONG)
    return grant


async def queued(d: Dispatcher, ask: Ask) -> asyncio.Task[Grant]:
    task = asyncio.create_task(d.acquire(ask))
    while not d.queue.depth("m"):
        await asyncio.sleep(0)
    return task


async def test_a_session_whose_backend_is_down_moves_to_the_slot_that_serves_it():
    d = dispatcher("m/0", "m/1")
    first = await turn(d)
    put(d, first.backend, routable=False)
    second = await turn(d)
    assert second.backend != first.backend
    binding = d.sessions.get(("s", "m"))
    assert binding is not None and binding.ref == SlotRef(second.backend, 0)


async def test_a_session_whose_slot_is_no_more_moves_to_one_that_is():
    d = dispatcher("m/0", slots=2)
    await turn(d, "other")
    await turn(d)
    put(d, "m/0", slots=1)
    await turn(d)
    binding = d.sessions.get(("s", "m"))
    assert binding is not None and binding.ref == SlotRef("m/0", 0)


async def test_queue_time_counts_also_when_a_try_between_did_not_have_to_wait():
    clock = Clock()
    d = dispatcher("m/0", clock=clock)
    holder = await d.acquire(Ask("0", "m"))
    task = await queued(d, Ask("1", "m"))
    clock.now += 29.99
    d.finish(holder, LONG)
    grant = await task
    d.finish(grant, Outcome("refused", 429))
    grant = await d.acquire(Ask("1", "m"), ["a"])
    assert grant.queued_s == pytest.approx(29.99)
    d.finish(grant, Outcome("refused", 429))
    await d.acquire(Ask("2", "m"))
    with pytest.raises(QueueTimeout):
        await d.acquire(Ask("1", "m"), ["a"])


async def test_a_forward_gets_one_try_here():
    d = dispatcher("m/0", "m/1")
    ask = Ask("1", "m", forwarded_by="b")
    d.finish(await d.acquire(ask), Outcome("unreachable"))
    with pytest.raises(AllRoutesRefused):
        await d.acquire(ask, ["a"])


async def test_a_turn_that_comes_while_its_slot_is_being_saved_waits_for_it():
    clock = Clock()
    d = dispatcher("m/0", slots=2, clock=clock)
    first = await turn(d)
    assert first.slot is not None
    lease = d.take_idle_slot(SlotRef("m/0", first.slot))
    assert lease is not None
    next_turn = asyncio.create_task(d.acquire(Ask("2", "m", session="s")))
    await asyncio.sleep(0)
    other = await d.acquire(Ask("3", "m", session="t"))
    assert other.slot != first.slot and not next_turn.done()
    clock.now += 0.5
    d.give_back(lease)
    grant = await next_turn
    assert (grant.slot, grant.queued_s) == (first.slot, 0.5)
    d.finish(grant, LONG)


async def test_a_turn_that_waits_for_a_save_hears_of_the_shutdown():
    d = dispatcher("m/0")
    await turn(d)
    lease = d.take_idle_slot(SlotRef("m/0", 0))
    assert lease is not None
    task = asyncio.create_task(d.acquire(Ask("2", "m", session="s")))
    await asyncio.sleep(0)
    d.drain()
    d.give_back(lease)
    with pytest.raises(ShuttingDown):
        await task
