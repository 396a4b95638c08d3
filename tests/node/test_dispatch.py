from __future__ import annotations

import asyncio

import pytest

from viiwork.config.model import RoutingSection, Seconds
from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Grant, Outcome, Usage
from viiwork.errors import AllRoutesRefused, QueueFull, QueueTimeout, ShuttingDown
from viiwork.node.dispatch import Dispatcher

DONE = Outcome("done", 200, usage=Usage(0, 100, 11))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bed:
    """A dispatcher with one backend of `slots` slots for model m, and what it told the rest of the node."""

    def __init__(self, slots: int = 1, **routing) -> None:
        self.clock = Clock()
        self.ended: list[tuple[Outcome, Binding | None]] = []
        self.prepared: list[Grant] = []
        self.d = Dispatcher(
            "a",
            RoutingSection(**{"queue_timeout": Seconds(5)} | routing),
            prepare=self.prepare,
            on_end=lambda grant, outcome, binding: self.ended.append((outcome, binding)),
            clock=self.clock,
            wall_ms=lambda: 7,
        )
        if slots:
            self.d.slots.put_backend("m/0", model="m", url="http://e", n_slots=slots, routable=True)

    async def prepare(self, grant: Grant) -> None:
        self.prepared.append(grant)

    def peer(self, name: str, free: int) -> None:
        self.d.peers.put(name, f"http://{name}")
        entry = ModelCapacity("m", slots=free, backends=1, healthy_backends=1)
        report = PeerReport(CapacityReport(name, "1", (entry,)), self.clock.now, self.clock.now)
        self.d.peers.reported(name, report)


async def waiting(bed: Bed, name: str, **kwargs) -> asyncio.Task[Grant]:
    """A request that is in the queue when this returns."""
    before = bed.d.queue.depth("m")
    task = asyncio.create_task(bed.d.acquire(Ask(name, "m", **kwargs)))
    while bed.d.queue.depth("m") == before and not task.done():
        await asyncio.sleep(0)
    return task


async def test_a_released_slot_goes_to_the_request_that_waits_longest():
    bed = Bed()
    first = await bed.d.acquire(Ask("1", "m"))
    second, third = await waiting(bed, "2"), await waiting(bed, "3")
    bed.clock.now += 2
    bed.d.finish(first, DONE)
    grant = await second
    assert grant.slot == 0 and grant.queued_s == 2 and not third.done()
    bed.d.finish(grant, DONE)
    bed.d.finish(await third, DONE)
    assert bed.d.slots.open_leases == 0


async def test_finishing_twice_gives_one_slot_back():
    bed = Bed(slots=2)
    grant, other = await bed.d.acquire(Ask("1", "m")), await bed.d.acquire(Ask("2", "m"))
    bed.d.finish(grant, DONE)
    bed.d.finish(grant, DONE)
    assert bed.d.slots.open_leases == 1 and len(bed.ended) == 1
    bed.d.finish(other, DONE)


async def test_a_client_that_leaves_the_queue_is_gone_at_once():
    bed = Bed()
    first = await bed.d.acquire(Ask("1", "m"))
    second, third = await waiting(bed, "2"), await waiting(bed, "3")
    second.cancel()
    await asyncio.wait((second,))
    assert bed.d.queue.depth("m") == 1
    bed.d.finish(first, DONE)
    bed.d.finish(await third, DONE)
    assert bed.d.slots.open_leases == 0


async def test_a_grant_made_in_the_moment_its_client_leaves_is_given_back():
    bed = Bed()
    first = await bed.d.acquire(Ask("1", "m"))
    second = await waiting(bed, "2")
    bed.d.finish(first, DONE)  # the grant is made, its task has not run yet
    second.cancel()
    await asyncio.wait((second,))
    assert bed.d.slots.open_leases == 0


async def test_a_wait_ends_with_queue_timeout_when_no_slot_opens():
    bed = Bed(queue_timeout=Seconds(0.02))
    await bed.d.acquire(Ask("1", "m"))
    with pytest.raises(QueueTimeout) as caught:
        await bed.d.acquire(Ask("2", "m"))
    assert caught.value.http_status == 429 and caught.value.retry_after_s == 2
    assert bed.d.queue.depth("m") == 0


async def test_waiting_for_a_model_nobody_healthy_serves_ends_with_503():
    bed = Bed(queue_timeout=Seconds(0.02))
    bed.d.slots.put_backend("m/0", model="m", url="http://e", n_slots=1, routable=False)
    with pytest.raises(AllRoutesRefused, match="no healthy backend"):
        await bed.d.acquire(Ask("1", "m"))


async def test_a_full_queue_refuses_at_once():
    bed = Bed(queue_max=1)
    first = await bed.d.acquire(Ask("1", "m"))
    second = await waiting(bed, "2")
    with pytest.raises(QueueFull):
        await bed.d.acquire(Ask("3", "m"))
    bed.d.finish(first, DONE)
    bed.d.finish(await second, DONE)


async def test_a_backend_that_becomes_healthy_wakes_the_queue():
    bed = Bed()
    bed.d.slots.put_backend("m/0", model="m", url="http://e", n_slots=1, routable=False)
    task = await waiting(bed, "1")
    bed.d.slots.put_backend("m/0", model="m", url="http://e", n_slots=1, routable=True)
    bed.d.wake()
    bed.d.finish(await task, DONE)


async def test_a_refusing_peer_is_not_asked_again_while_another_has_room():
    bed = Bed(slots=0)
    bed.peer("b", 5)
    bed.peer("c", 1)
    grant = await bed.d.acquire(Ask("1", "m"))
    assert grant.node == "b"
    bed.d.finish(grant, Outcome("refused", 429))
    second = await bed.d.acquire(Ask("1", "m"), {"b"})
    assert second.node == "c"
    bed.d.finish(second, DONE)
    assert bed.d.peers.open_forwards == 0


async def test_the_last_try_excludes_nobody_and_waits_with_what_is_left_of_one_budget():
    bed = Bed(slots=0, queue_timeout=Seconds(30), forward_retry=1)
    bed.peer("b", 1)
    grant = await bed.d.acquire(Ask("1", "m"))
    grant.queued_s = 29.99
    bed.d.finish(grant, Outcome("refused", 429))
    with pytest.raises(QueueTimeout):
        await bed.d.acquire(Ask("1", "m"), {"b"})


async def test_a_request_everybody_refused_ends_with_503():
    bed = Bed(slots=1, forward_retry=1)
    bed.peer("b", 1)
    with pytest.raises(AllRoutesRefused) as caught:
        await bed.d.acquire(Ask("1", "m"), {"a", "b", "c"})
    assert caught.value.http_status == 503 and caught.value.retry_after_s == 2


async def test_a_successful_turn_binds_its_session_to_the_slot():
    bed = Bed(slots=2)
    grant = await bed.d.acquire(Ask("1", "m", session="s"))
    bed.d.finish(grant, DONE)
    assert bed.ended[-1][1] == Binding("a", SlotRef("m/0", grant.slot), 110, 7)
    again = await bed.d.acquire(Ask("2", "m", session="s"))
    assert again.slot == grant.slot


async def test_a_failed_turn_binds_nothing():
    bed = Bed()
    grant = await bed.d.acquire(Ask("1", "m", session="s"))
    bed.d.finish(grant, Outcome("broken", 200))
    assert bed.d.sessions.get(("s", "m")) is None and bed.d.slots.open_leases == 0


async def test_a_small_request_beside_the_chat_does_not_take_the_sessions_slot_away():
    bed = Bed(slots=2)
    chat = await bed.d.acquire(Ask("1", "m", session="s"))
    bed.d.finish(chat, Outcome("done", 200, usage=Usage(0, 5000, 10)))
    chat_again = await bed.d.acquire(Ask("2", "m", session="s"))
    title = await bed.d.acquire(Ask("3", "m", session="s"))
    assert title.slot != chat_again.slot
    bed.d.finish(title, DONE)
    bed.d.finish(chat_again, Outcome("done", 200, usage=Usage(5000, 100, 10)))
    binding = bed.d.sessions.get(("s", "m"))
    assert binding is not None and binding.ref == SlotRef("m/0", chat.slot)


async def test_a_lease_is_given_back_when_its_preparation_is_cancelled():
    bed = Bed()
    started, never = asyncio.Event(), asyncio.Event()

    async def hang(grant: Grant) -> None:
        started.set()
        await never.wait()

    bed.d._prepare = hang
    task = asyncio.create_task(bed.d.acquire(Ask("1", "m", session="s")))
    await started.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert bed.d.slots.open_leases == 0 and bed.ended[-1][0].result == "client_gone"


async def test_draining_refuses_newcomers_and_waiters_and_ends_when_the_last_grant_does():
    bed = Bed()
    grant = await bed.d.acquire(Ask("1", "m"))
    waiter = await waiting(bed, "2")
    bed.d.drain()
    with pytest.raises(ShuttingDown):
        await waiter
    with pytest.raises(ShuttingDown):
        await bed.d.acquire(Ask("3", "m"))
    idle = asyncio.create_task(bed.d.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    bed.d.finish(grant, DONE)
    await idle


async def test_kv_share_can_take_only_an_idle_slot_and_its_return_wakes_the_queue():
    bed = Bed()
    grant = await bed.d.acquire(Ask("1", "m"))
    assert bed.d.take_idle_slot(SlotRef("m/0", 0)) is None
    bed.d.finish(grant, DONE)
    lease = bed.d.take_idle_slot(SlotRef("m/0", 0))
    assert lease is not None
    task = await waiting(bed, "2")
    bed.d.give_back(lease)
    bed.d.finish(await task, DONE)
