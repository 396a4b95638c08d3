"""The dispatcher between several nodes: waiting for a warm one, full ones, failing ones, lost ones."""

from __future__ import annotations

import asyncio

import pytest

from viiwork.config.model import Seconds
from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport, Perf
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Grant, Outcome, Usage
from viiwork.errors import AllRoutesRefused, NoFreeSlot, QueueTimeout

from .test_dispatch import DONE, Bed, waiting

FULL = Outcome("refused", 429)
FAST = Perf(100.0, 1000.0)
LONG = 40_000  # bytes of a prompt of 10,000 tokens: 10 s to read


def peer(bed: Bed, name: str, free: int, perf: Perf | None = FAST) -> None:
    bed.d.peers.put(name, f"http://{name}")
    entry = ModelCapacity(
        "m", slots=max(free, 1), busy=0 if free else 1, backends=1, healthy_backends=1, perf=perf
    )
    report = PeerReport(CapacityReport(name, "1", (entry,)), bed.clock.now, bed.clock.now)
    bed.d.peers.reported(name, report)


def measure(bed: Bed, overhead_s: float = 0.1, per_1k_s: float = 1.0) -> None:
    """This node reads 1,000 tokens a second."""
    for n_tokens in (1, 1, 1, 1000, 2000, 3000, 4000, 5000):
        bed.d.speeds.sample("m", overhead_s + per_1k_s * n_tokens / 1000, n_tokens, bed.clock.now)


def turn(name: str, **kwargs) -> Ask:
    return Ask(name, "m", session="s", body_bytes=LONG, **kwargs)


async def at_home(bed: Bed) -> None:
    """The session's first turn ran here; its slot holds 9,000 tokens."""
    grant = await bed.d.acquire(turn("first", pin="a"))
    bed.d.finish(grant, Outcome("done", 200, usage=Usage(0, 8990, 11)))


async def queued(bed: Bed, ask: Ask, exclude=()) -> asyncio.Task[Grant]:
    task = asyncio.create_task(bed.d.acquire(ask, exclude))
    while not bed.d.queue.depth("m") and not task.done():
        await asyncio.sleep(0)
    return task


async def test_a_turn_waits_for_its_own_slot_though_a_peer_has_room():
    bed = Bed()
    measure(bed)
    peer(bed, "b", 5)
    await at_home(bed)
    other = await bed.d.acquire(turn("beside", pin="a"))
    task = await queued(bed, turn("2"))
    bed.clock.now += 1.0
    bed.d.finish(other, DONE)
    grant = await task
    assert (grant.node, grant.slot, grant.queued_s) == ("a", 0, 1.0)
    bed.d.finish(grant, DONE)


async def test_when_the_wait_has_cost_what_it_could_save_the_peer_is_taken():
    bed = Bed(queue_timeout=Seconds(60))
    measure(bed)
    peer(bed, "b", 5)
    await at_home(bed)
    other = await bed.d.acquire(turn("beside", pin="a"))
    task = await queued(bed, turn("2"))
    bed.clock.now += 8.0
    peer(bed, "b", 5)
    bed.d.wake()
    assert not task.done() and bed.d.queue.depth("m") == 1
    bed.clock.now += 1.1
    peer(bed, "b", 5)
    bed.d.wake()
    grant = await task
    assert grant.node == "b" and grant.queued_s == pytest.approx(9.1)
    bed.d.finish(grant, DONE)
    bed.d.finish(other, DONE)


async def test_the_end_of_the_wait_needs_no_event():
    bed = Bed()
    for n_tokens in (1, 1, 1, 1000, 2000, 3000):
        bed.d.speeds.sample("m", 0.001 + 0.005 * n_tokens / 1000, n_tokens, bed.clock.now)
    peer(bed, "b", 5, Perf(1.0, 5.0))
    await at_home(bed)
    await bed.d.acquire(turn("beside", pin="a"))
    bed.d._clock = asyncio.get_running_loop().time
    bed.clock.now = bed.d._clock()
    peer(bed, "b", 5, Perf(1.0, 5.0))
    grant = await bed.d.acquire(turn("2"))  # about 45 ms later, by its own timer
    assert grant.node == "b" and grant.queued_s > 0.02


async def test_a_full_queue_does_not_keep_a_turn_from_the_node_that_is_only_colder():
    bed = Bed(queue_max=0)
    measure(bed)
    peer(bed, "b", 5)
    await at_home(bed)
    await bed.d.acquire(turn("beside", pin="a"))
    assert (await bed.d.acquire(turn("2"))).node == "b"


async def test_a_peer_that_holds_the_prompt_may_let_the_turn_wait_and_then_counts_against_the_one_budget():
    bed = Bed(queue_timeout=Seconds(12))
    measure(bed)
    peer(bed, "b", 1)
    first = await bed.d.acquire(turn("1", pin="b"))
    bed.d.finish(first, Outcome("done", 200, usage=Usage(0, 8990, 11)))
    peer(bed, "b", 0)
    grant = await bed.d.acquire(turn("2"))
    assert grant.node == "b" and grant.wait_ms == pytest.approx(9000, abs=2)
    assert bed.d.queue.depth("m") == 0  # it counts as waiting where it waits
    bed.clock.now += 9.0
    peer(bed, "b", 0)
    bed.d.finish(grant, Outcome("refused", 429, duration_s=9.0))
    cold = await bed.d.acquire(turn("2"), ["b"])
    assert (cold.node, cold.queued_s) == ("a", 9.0)
    bed.d.finish(cold, FULL)
    bed.d.slots.lease(SlotRef("m/0", 0))
    with pytest.raises(QueueTimeout, match="within 3 s"):
        task = await queued(bed, turn("2"), ["b", "a"])
        bed.clock.now += 3.0
        await task


async def test_a_forward_that_may_wait_gets_the_next_slot_in_its_turn():
    bed = Bed()
    running = await bed.d.acquire(Ask("1", "m"))
    own = await waiting(bed, "2")
    forward = await waiting(bed, "3", forwarded_by="b", wait_ms=60_000)
    assert bed.d.queue.depth("m") == 2
    bed.clock.now += 1.5
    bed.d.finish(running, DONE)
    bed.d.finish(await own, DONE)
    grant = await forward
    assert grant.node == "a" and grant.queued_s == 1.5
    bed.d.finish(grant, DONE)


async def test_a_forward_that_waited_in_vain_is_refused_as_one_that_may_not_wait():
    bed = Bed()
    await bed.d.acquire(Ask("1", "m"))
    with pytest.raises(NoFreeSlot):
        await bed.d.acquire(Ask("2", "m", forwarded_by="b"))
    with pytest.raises(NoFreeSlot) as caught:
        await bed.d.acquire(Ask("3", "m", forwarded_by="b", wait_ms=20))
    assert caught.value.http_status == 429 and bed.d.queue.depth("m") == 0


async def test_a_client_that_leaves_while_its_forward_waits_here_is_gone_at_once():
    bed = Bed()
    await bed.d.acquire(Ask("1", "m"))
    forward = await waiting(bed, "2", forwarded_by="b", wait_ms=60_000)
    forward.cancel()
    await asyncio.wait((forward,))
    assert bed.d.queue.depth("m") == 0


async def test_a_waiter_whose_time_ran_out_while_the_machine_slept_is_answered_and_not_run():
    bed = Bed(queue_timeout=Seconds(30))
    running = await bed.d.acquire(Ask("1", "m"))
    late = await waiting(bed, "2")
    bed.clock.now += 10.0
    in_time = await waiting(bed, "3")
    bed.clock.now += 25.0
    bed.d.finish(running, DONE)
    with pytest.raises(QueueTimeout):
        await late
    bed.d.finish(await in_time, DONE)
    assert bed.d.slots.open_leases == 0


async def test_a_fleet_that_is_merely_full_never_answers_that_every_node_refused():
    bed = Bed(slots=0, queue_timeout=Seconds(1000))
    exclude: list[str] = []
    ask = Ask("1", "m")
    with pytest.raises(QueueTimeout) as caught:
        for _ in range(100):
            bed.clock.now += 1.0
            peer(bed, "b", 1)  # room by its report, taken when the request comes
            grant = await bed.d.acquire(ask, exclude)
            bed.d.finish(grant, FULL)
            exclude.append(grant.node)
    assert caught.value.http_status == 429


async def test_nodes_that_fail_end_the_tries_with_503():
    bed = Bed(slots=0)
    for name in "bcd":
        peer(bed, name, 1)
    exclude: list[str] = []
    with pytest.raises(AllRoutesRefused):
        for _ in range(5):
            grant = await bed.d.acquire(Ask("1", "m"), exclude)
            bed.d.finish(grant, Outcome("unreachable"))
            exclude.append(grant.node)
    assert len(exclude) == 3


async def test_a_node_that_fails_fast_does_not_draw_the_requests_and_recovers_by_itself():
    bed = Bed(slots=0)
    seen: list[str] = []

    async def one(name: str) -> str:
        peer(bed, "b", 50, perf=None)  # a failing host always has room
        peer(bed, "c", 5, perf=None)
        grant = await bed.d.acquire(Ask(name, "m"))
        bed.d.finish(grant, Outcome("done", 500 if grant.node == "b" and bed.clock.now < 130 else 200))
        seen.append(grant.node)
        return grant.node

    for n in range(100):
        bed.clock.now += 0.1
        await one(f"{n}")
    assert seen.count("b") <= 8, seen
    bed.clock.now = 170.0
    assert [await one("x"), await one("y"), await one("z")] == ["b", "b", "b"]


async def test_an_engine_that_refuses_while_its_slots_are_free_is_not_well():
    bed = Bed(slots=4)
    peer(bed, "b", 1, perf=None)
    for n in range(2):
        bed.d.finish(await bed.d.acquire(Ask(f"{n}", "m")), Outcome("refused", 503))
    grant = await bed.d.acquire(Ask("3", "m"))
    assert grant.node == "b"
    bed.d.finish(grant, DONE)
    bed.clock.now += 2.0
    peer(bed, "b", 1, perf=None)
    assert (await bed.d.acquire(Ask("4", "m"))).node == "a"  # the trial
    assert (await bed.d.acquire(Ask("5", "m"))).node == "b"  # meanwhile


async def test_only_streamed_turns_that_ended_well_measure_the_speed():
    bed = Bed(slots=1)
    told = Usage(0, 1000, 5)
    for outcome in (
        Outcome("done", 200, 1.0, False, usage=told),
        Outcome("done", 500, 1.0, True, usage=told),
        Outcome("broken", 200, 1.0, True, usage=told),
        Outcome("client_gone", 200, 1.0, True, usage=told),
        Outcome("done", 200, None, True, usage=told),
        Outcome("done", 200, 1.0, True),
    ):
        for n in range(5):
            bed.d.finish(await bed.d.acquire(Ask(f"{n}", "m")), outcome)
    bed.clock.now += 40  # whatever back-off those failures left is over
    assert bed.d.perf("m") is None
    for n in range(5):
        bed.d.finish(await bed.d.acquire(Ask(f"{n}", "m")), Outcome("done", 200, 1.0, True, usage=told))
    bed.clock.now += 1  # it is worked out once a second
    assert bed.d.perf("m") == Perf(1.0, 1000.0, 5)


async def test_a_node_told_not_to_go_by_performance_publishes_none():
    bed = Bed(performance=False)
    measure(bed)
    assert bed.d.perf("m") is None


async def test_unanswered_requests_at_a_peer_that_left_or_fell_silent_are_lost():
    bed = Bed(slots=0)
    for name in "bcd":
        peer(bed, name, 1)
    grants = {}
    bed.clock.now += 0.5
    for n in range(3):
        grant = await bed.d.acquire(Ask(f"{n}", "m"))
        grants[grant.node] = grant
    grants["d"].answered = True
    bed.clock.now += 9.0
    peer(bed, "c", 1)
    bed.d.node_died("b")
    assert bed.d.lost_forwards(10.0) == [grants["b"].ask.request_id]
    bed.clock.now += 9.5
    assert bed.d.lost_forwards(10.0) == [grants["b"].ask.request_id]
    bed.clock.now += 1.0
    assert set(bed.d.lost_forwards(10.0)) == {grants["b"].ask.request_id, grants["c"].ask.request_id}
    for grant in grants.values():
        bed.d.finish(grant, Outcome("stalled"))
    assert bed.d.lost_forwards(0.0) == [] and bed.d.peers.open_forwards == 0


async def test_a_peer_that_took_its_leave_may_end_what_it_runs_but_not_for_ever():
    bed = Bed(slots=0)
    peer(bed, "b", 1)
    grant = await bed.d.acquire(Ask("1", "m"))
    bed.d.node_left("b")
    bed.clock.now += 60.0
    assert bed.d.lost_forwards(5.0) == [] and not bed.d.is_served("m")
    bed.clock.now += 61.0
    assert bed.d.lost_forwards(5.0) == ["1"]
    bed.d.finish(grant, Outcome("stalled"))


async def test_a_receipt_tells_the_tries_the_wait_and_the_refusal():
    bed = Bed(slots=1)
    peer(bed, "b", 1, perf=None)
    here = await bed.d.acquire(Ask("1", "m"))
    bed.d.finish(here, Outcome("unreachable"))
    there = await bed.d.acquire(Ask("1", "m"), ["a"])
    bed.d.finish(there, Outcome("done", 200, usage=Usage(0, 9, 1)))
    steps = bed.d.receipts.get("1").steps
    assert [(s.node, s.outcome.result) for s in steps] == [("a", "unreachable"), ("b", "done")]
    assert [c.state for c in steps[1].question.candidates] == ["excluded", ""]

    bed.d.slots.lease(SlotRef("m/0", 0))
    task = await queued(bed, Ask("2", "m", pin="a"))
    bed.clock.now += 100.0
    bed.d.wake()
    with pytest.raises(QueueTimeout):
        await task
    receipt = bed.d.receipts.get("2")
    assert receipt.error.startswith("queue_timeout: ") and [s.node for s in receipt.steps] == [""]


async def test_every_choice_between_nodes_is_told_with_what_it_was_made_of():
    bed = Bed(slots=1)
    told = []
    bed.d._on_decided = lambda request_id, question, choice: told.append((request_id, choice.node))
    running = await bed.d.acquire(Ask("1", "m"))
    task = await waiting(bed, "2")
    bed.d.finish(running, DONE)
    bed.d.finish(await task, DONE)
    bed.d.finish(await bed.d.acquire(Ask("3", "m", forwarded_by="b")), DONE)  # nothing to choose there
    assert told == [("1", "a"), ("2", None), ("2", "a")]


async def test_while_nobody_has_room_a_wake_asks_for_one_waiter_only():
    bed = Bed()
    running = await bed.d.acquire(Ask("0", "m"))
    tasks = [await waiting(bed, f"{n}") for n in range(1, 51)]
    asked = []
    choose_for = bed.d._choose
    bed.d._choose = lambda ask, *args: asked.append(ask.request_id) or choose_for(ask, *args)
    bed.d.wake()
    assert asked == ["1"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    bed.d.finish(running, DONE)


async def test_a_request_that_comes_back_from_a_lost_node_stands_before_all_that_came_later():
    bed = Bed()
    peer(bed, "b", 1, None)
    bed.clock.now += 0.1
    running = await bed.d.acquire(Ask("running", "m"))
    lost = await bed.d.acquire(Ask("lost", "m"))
    assert (running.node, lost.node) == ("a", "b")
    bed.clock.now += 0.1
    later = await queued(bed, Ask("later", "m"))
    bed.clock.now += 4.0
    bed.d.finish(lost, Outcome("stalled", duration_s=4.1))
    again = asyncio.create_task(bed.d.acquire(Ask("lost", "m"), ["b"]))
    while bed.d.queue.depth("m") < 2 and not again.done():
        await asyncio.sleep(0)
    bed.d.finish(running, DONE)
    first = await again
    assert first.node == "a" and not later.done()
    bed.d.finish(first, DONE)
    bed.d.finish(await later, DONE)
