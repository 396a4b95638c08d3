"""Whether a slot still holds a state is asked, not assumed: it may be gone behind the node's back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Outcome, Usage

from .importing import KEY, MODEL, Bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """The session's state is in slot 0, and a replica of it is here too."""
    made = Bench(tmp_path)
    await made.turn(2, 0, 600)
    held = made.d.sessions.get(KEY)
    assert held is not None
    made.put(600, 2, held.generation, source="a")
    yield made
    await made.stop()


def another_task(bench: Bench) -> None:
    bench.engine.ran(0, 77)


def another_task_of_the_same_length(bench: Bench) -> None:
    bench.engine.ran(0, 600)


def erased(bench: Bench) -> None:
    bench.engine.slots_held[0][1] = 0


def restarted(bench: Bench) -> None:
    """So quickly that nobody has noticed: its slots have seen no task."""
    bench.engine.slots_held[0] = [None, None]


def asleep(bench: Bench) -> None:
    bench.engine.sleeping = True


WAYS = [another_task, another_task_of_the_same_length, erased, restarted, asleep]


@pytest.mark.parametrize("evict", WAYS)
async def test_what_the_engine_lost_is_imported_again(bench: Bench, evict: Callable[[Bench], None]):
    evict(bench)
    await bench.turn(3, 600, 650)
    assert bench.engine.asked == ["restore 0"]
    assert bench.held.as_json()["lost"] == 1 and bench.lost == [SlotRef("m/0", 0)]


@pytest.mark.parametrize("evict", WAYS)
async def test_what_is_lost_and_nowhere_else_is_read_anew(bench: Bench, evict: Callable[[Bench], None]):
    bench.replicas.clear()
    evict(bench)
    await bench.turn(3, 0, 650)
    bench.engine.sleeping = False
    assert bench.engine.asked == []
    held = bench.d.sessions.get(KEY)
    assert held is not None and held.n_tokens == 650, "the belief is corrected"


async def test_a_state_that_is_still_there_is_not_imported_again(bench: Bench):
    await bench.turn(3, 600, 650)
    assert bench.engine.asked == [] and bench.held.as_json()["asked"] == 1


async def test_an_engine_is_asked_only_when_there_is_something_to_lose(bench: Bench):
    bench.engine.n_looked = 0
    bench.replicas.clear()
    await bench.turn(3, 600, 650)
    no_session = await bench.d.acquire(Ask("x", MODEL))
    bench.d.finish(no_session, Outcome("done", 200, usage=Usage(0, 100, 1)))
    short = Ask("y", MODEL, session="6" * 32)
    grant = await bench.d.acquire(short)
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(0, 20, 1)))
    assert bench.engine.n_looked == 0


async def test_an_engine_that_does_not_answer_is_believed_to_hold_it(bench: Bench):
    bench.engine.is_deaf = True
    await bench.turn(3, 600, 650)
    assert bench.engine.asked == [] and bench.held.as_json()["unanswered"] == 1


async def test_a_turn_that_nobody_looked_at_is_judged_by_its_length(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.engine.is_deaf = True  # while it is looked at after the turn
    await bench.turn(2, 0, 600)
    bench.engine.is_deaf = False
    held = bench.d.sessions.get(KEY)
    assert held is not None
    bench.put(600, 2, held.generation, source="a")
    grant = await bench.begin(3)
    assert bench.engine.asked == []
    bench.d.finish(grant, Outcome("client_gone"))
    bench.engine.ran(0, 5000)
    await bench.begin(3)
    assert bench.engine.asked == ["restore 0"]
    await bench.stop()


async def test_the_answer_tells_when_a_belief_was_wrong(bench: Bench):
    """Nothing could be asked, and the turn reads everything anew: that is no surprise a second time."""
    bench.engine.is_deaf = True
    await bench.turn(3, 0, 650)
    assert bench.held.as_json()["mistaken"] == 1
    bench.engine.is_deaf = False
    bench.engine.ran(0, 650)
    await bench.turn(3, 650, 700)
    assert bench.held.as_json()["mistaken"] == 1


async def test_a_longer_state_lost_falls_back_to_the_older_replica(bench: Bench):
    """The replica is a turn behind; most of the prompt is still in it."""
    await bench.turn(4, 600, 900)
    bench.engine.ran(0, 3)
    await bench.turn(5, 600, 950)
    assert bench.engine.asked == ["restore 0"]


async def test_a_turn_in_another_slot_takes_its_state_along(tmp_path: Path):
    bench = Bench(tmp_path, n_slots=2)
    await bench.turn(2, 0, 600)
    held = bench.d.sessions.get(KEY)
    assert held is not None and held.ref is not None
    bench.put(600, 2, held.generation, source="a")
    home = bench.d.slots.lease(held.ref)
    grant = await bench.begin(3)
    assert grant.slot != held.ref.slot and bench.engine.asked == [f"restore {grant.slot}"]
    bench.d.slots.release(home)
    await bench.stop()


async def test_what_lies_in_the_engines_ram_is_not_asked_for_in_a_slot(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.d.sessions.ram_cache("m/0", 100_000)
    await bench.turn(2, 0, 600)
    held = bench.d.sessions.get(KEY)
    assert held is not None
    bench.put(600, 2, held.generation, source="a")
    other = await bench.d.acquire(Ask("x", MODEL, session="6" * 32))
    bench.engine.ran(0, 400)
    bench.d.finish(other, Outcome("done", 200, usage=Usage(0, 400, 1)))
    await bench.turn(3, 600, 650)
    assert bench.engine.asked == [] and bench.held.as_json()["asked"] == 0
    await bench.stop()
