"""Which state a turn begins with, what a failed import leaves, and what is said of a change of host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Outcome, Usage
from viiwork.errors import KvError
from viiwork.limits import KV_NO_REUSE_MAX

from .importing import KEY, LINKS, MODEL, Bench, until

NEW = 10**15  # a generation newer than any turn here


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.stop()


async def test_a_newer_replica_is_restored_before_the_turn_runs(bench: Bench):
    await bench.turn(1, 0, 500)
    bench.put(900, 2, NEW)
    grant = await bench.begin(3)
    assert bench.engine.asked == ["restore 0"]
    held = bench.d.sessions.get(KEY)
    assert held is not None and (held.n_tokens, held.generation, held.tip) == (900, NEW, LINKS[2])
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(900, 20, 1)))
    assert bench.stats.moves["warm"] == 1


async def test_an_older_replica_is_not_restored_over_a_state_the_slot_holds(bench: Bench):
    bench.put(300, 1, 5)
    await bench.turn(2, 300, 600)
    bench.engine.asked.clear()
    await bench.turn(3, 600, 700)
    assert bench.engine.asked == []


async def test_the_binding_has_as_many_tokens_as_were_rendered(bench: Bench):
    bench.put(900, 2, NEW)
    bench.worker.fewer = 100
    await bench.begin(3)
    held = bench.d.sessions.get(KEY)
    assert held is not None and held.n_tokens == 800
    assert held.tip == "", "the newest turn is not whole in it"


@pytest.mark.parametrize("reason", ["no_replica", "worker_died", "corrupt"])
async def test_a_replica_that_could_not_be_imported_is_dropped(bench: Bench, reason: str):
    bench.put(900, 2, NEW)
    bench.worker.faults = [reason]
    grant = await bench.begin(3)
    assert bench.replicas.get(KEY) is None
    await until(lambda: bench.worker.dropped)
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(0, 900, 1)))
    assert bench.stats.not_warm_causes == {f"import_failed:{reason}": 1}


@pytest.mark.parametrize("ram_tokens, asked", [(10_000, ["warm up 0", "restore 0"]), (0, ["restore 0"])])
async def test_a_restore_first_lets_the_engine_save_what_the_slot_holds(
    bench: Bench, ram_tokens: int, asked: list[str]
):
    bench.d.sessions.ram_cache("m/0", ram_tokens)
    other = await bench.d.acquire(Ask("o", MODEL, session="other"))
    bench.d.finish(other, Outcome("done", 200, usage=Usage(0, 500, 1)))
    bench.put(900, 2, NEW)
    await bench.begin(3)
    assert bench.engine.asked == asked


async def test_an_import_that_costs_more_than_reading_is_passed_over_and_said_so(bench: Bench):
    bench.reads_at(0.0001)
    bench.restorer.costs.took(MODEL, 900_000, 60.0)
    bench.put(900, 2, NEW)
    await bench.turn(3, 0, 910)
    assert bench.engine.asked == []
    assert bench.stats.not_warm_causes == {"not_worth_it": 1}


async def test_an_import_that_was_slow_once_is_tried_again(bench: Bench):
    bench.reads_at(0.001)
    bench.restorer.costs.took(MODEL, 900_000, 5.0)
    for n in range(60):
        bench.put(900, 2, NEW + n)
        bench.d.sessions.engine_restarted("m/0")
        await bench.turn(3, 0, 910)
        if bench.engine.asked:
            break
    assert bench.engine.asked == ["restore 0"]


async def test_an_import_is_given_no_more_time_than_reading_would_take(bench: Bench):
    bench.reads_at(0.0001)
    bench.worker.takes_s = 60.0
    bench.put(900, 2, NEW)
    grant = await bench.begin(3)
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(0, 910, 1)))
    assert bench.stats.not_warm_causes == {"import_too_slow": 1}
    assert bench.restorer.costs.seconds(MODEL, 900_000) > 0.4, "it has learned what an import takes here"


# -- what a change of host was ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cached", "prompt", "how", "cause"),
    [
        (900, 990, "warm", None),
        (900, 2000, "partly", "long_prompt"),
        (300, 990, "partly", "diverged"),
        (0, 990, "cold", "no_reuse"),
    ],
)
async def test_an_imported_turn_is_judged_by_what_the_engine_counted(
    bench: Bench, cached: int, prompt: int, how: str, cause: str | None
):
    bench.put(900, 2, NEW)
    await bench.turn(3, cached, prompt)
    assert bench.stats.moves == {how: 1}
    assert bench.stats.not_warm_causes == ({cause: 1} if cause else {})


async def test_a_move_without_any_state_here_is_judged_too(bench: Bench):
    await bench.turn(1, 0, 500)
    bench.d.sessions.ran_elsewhere(KEY, "b", NEW)
    bench.d.sessions.engine_restarted("m/0")
    bench.d.sessions.ran_elsewhere(KEY, "b", NEW)
    await bench.turn(3, 0, 900)
    assert bench.stats.moves == {"cold": 1} and bench.stats.not_warm_causes == {"no_replica": 1}


async def test_a_move_that_only_the_entry_node_knows_of_is_judged(bench: Bench):
    """The node's own reports of its peers are as old as the last poll."""
    await bench.turn(3, 0, 900, forwarded_by="b", home="b")
    assert bench.stats.moves == {"cold": 1} and bench.stats.not_warm_causes == {"no_replica": 1}
    await bench.turn(5, 900, 950, forwarded_by="b", home="b")
    assert bench.stats.moves == {"cold": 1}, "the newest turn ran here, whatever an entry node remembers"


async def test_a_move_whose_replica_made_room_for_others_says_so(bench: Bench):
    bench.put(900, 2, NEW)
    bench.replicas.evicted(f"b{NEW}")
    bench.d.sessions.ran_elsewhere(KEY, "b", NEW)
    await bench.turn(3, 0, 900)
    assert bench.stats.not_warm_causes == {"evicted": 1}


async def test_a_move_to_an_engine_that_cannot_take_states_says_so(bench: Bench):
    bench.layouts.layout = None
    bench.put(900, 2, NEW)
    await bench.turn(3, 0, 900)
    assert bench.stats.not_warm_causes == {"not_portable": 1}


async def test_a_move_back_to_an_old_state_of_its_own_is_behind(bench: Bench):
    await bench.turn(1, 0, 500)
    bench.d.sessions.ran_elsewhere(KEY, "b", NEW)
    await bench.turn(5, 500, 1500)
    assert bench.stats.moves == {"partly": 1}
    assert set(bench.stats.not_warm_causes) <= {"long_prompt", "replica_behind"}


async def test_a_state_that_arrives_during_the_turn_tells_where_the_session_came_from(bench: Bench):
    grant = await bench.begin(3)
    bench.put(900, 2, 5)
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(0, 920, 1)))
    assert bench.stats.moves == {"cold": 1} and bench.stats.not_warm_causes == {"no_replica": 1}


async def test_turns_that_stay_are_no_moves(bench: Bench):
    await bench.turn(1, 0, 500)
    await bench.turn(3, 500, 600)
    assert not bench.stats.moves


async def test_a_prompt_that_was_edited_says_nothing_against_the_model(bench: Bench):
    """Nothing of an edited conversation can be reused, however well restoring works."""
    for n in range(KV_NO_REUSE_MAX + 1):
        bench.put(900, 6, NEW + n)
        bench.d.sessions.engine_restarted("m/0")
        await bench.turn(3, 0, 900)
    assert bench.layouts.stopped == {}


async def test_restores_that_give_no_reuse_stop_and_later_turns_cost_nothing_more(bench: Bench):
    """Fifty changes of host to an engine that restores with 200 and answers `cache_n` 0."""
    for n in range(50):
        bench.put(900, 2, NEW + n)
        bench.d.sessions.engine_restarted("m/0")
        await bench.turn(3, 0, 900)
    assert bench.engine.asked == ["restore 0"] * KV_NO_REUSE_MAX
    assert "no reuse" in bench.layouts.stopped[MODEL]
    assert bench.stats.moves == {"cold": 50}
    assert bench.stats.not_warm_causes == {"no_reuse": KV_NO_REUSE_MAX, "not_portable": 50 - KV_NO_REUSE_MAX}


async def test_a_fault_of_the_restore_empties_the_slot_in_our_books(bench: Bench):
    await bench.turn(1, 0, 500)
    bench.put(900, 2, NEW)
    bench.engine.fault = KvError("restore_refused")
    grant = await bench.begin(3)
    assert bench.d.sessions.get(KEY) is None
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(0, 900, 1)))
    assert bench.stats.not_warm_causes == {"import_failed:restore_refused": 1}


async def test_a_conversation_that_parts_from_another_begins_with_the_replica_of_that(bench: Bench):
    parent = bench.put(900, 2, NEW)
    await bench.turn(3, 900, 950, session="fork")
    assert bench.engine.asked == ["restore 0"]
    assert bench.d.sessions.occupant(SlotRef("m/0", 0)) == ("fork", MODEL)
    assert bench.replicas.get(KEY) == parent, "its own conversation may go on as well"
    assert bench.stats.moves["warm"] == 1


@pytest.mark.parametrize("generation, asked", [(5, []), (NEW, ["restore 1"])])
async def test_a_parent_of_which_an_engine_here_holds_as_much_is_not_restored_beside_it(
    tmp_path: Path, generation: int, asked: list[str]
):
    bench = Bench(tmp_path, n_slots=2)
    bench.d.sessions.ram_cache("m/0", 10_000)  # which is why the fork gets a slot of its own
    await bench.turn(2, 0, 900)
    bench.put(950, 3, generation)
    await bench.begin(3, session="fork")
    assert [done for done in bench.engine.asked if "restore" in done] == asked
    await bench.stop()


async def test_a_parents_replica_that_was_too_slow_is_kept_for_its_own_conversation(bench: Bench):
    parent = bench.put(900, 2, NEW)
    bench.engine.fault = TimeoutError()
    await bench.begin(3, session="fork")
    assert bench.replicas.get(KEY) == parent
