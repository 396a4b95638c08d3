"""Fetching a state that lies at a peer or is on its way, for a turn that runs here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from viiwork.core.holdings import Holding
from viiwork.core.turn import Grant, Outcome, Usage
from viiwork.core.ways import Way
from viiwork.errors import MeshError

from .importing import KEY, LINKS, MODEL, SESSION, TOKEN_BYTES, Bench, until

NEW = 10**15


def holding(n_tokens: int, n_messages: int, generation: int = NEW, where: Any = "slot") -> Holding:
    return Holding(SESSION, MODEL, LINKS[n_messages], "", n_tokens, where, generation, "m/0")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A node that reads 100 tokens a second, so that 10,000 tokens are worth waiting for."""
    made = Bench(tmp_path)
    made.reads_at(0.01)
    yield made
    await made.stop()


def end(bench: Bench, grant: Grant, cached: int, prompt: int) -> None:
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(cached, prompt - cached, 1)))


@pytest.mark.parametrize("where", ["slot", "replica"])
async def test_a_state_that_a_peer_holds_is_pulled_and_imported(bench: Bench, where: str):
    bench.peer_holds("b", holding(10_000, 2, where=where))
    bench.peer.answers = lambda: bench.put(10_000, 2, NEW) and None
    grant = await bench.begin(3)
    assert bench.peer.asked == ["b"] and bench.engine.asked == ["restore 0"]
    end(bench, grant, 10_000, 10_050)
    assert bench.fetcher.as_json() == {"done": 1, "failed": {}}
    assert bench.stats.moves == {"warm": 1}


async def test_the_answer_may_come_before_the_replica_is_in_the_table(bench: Bench):
    bench.peer_holds("b", holding(10_000, 2))
    answered = asyncio.Event()

    async def arrive() -> None:
        with bench.arrivals.arriving(KEY, NEW, 10_000, "b", LINKS[2]):
            await answered.wait()
            bench.put(10_000, 2, NEW)

    receiving = asyncio.create_task(arrive())
    bench.peer.answers = answered.set
    grant = await bench.begin(3)
    assert bench.engine.asked == ["restore 0"]
    end(bench, grant, 10_000, 10_050)
    await receiving


@pytest.mark.parametrize(
    "held",
    [
        holding(10_000, 2, where="ram"),  # only a slot can be saved
        holding(10, 2),  # less than the question costs
        holding(10_000, 6),  # of another branch of the conversation
        holding(200_000, 2),  # does not fit a slot here
    ],
)
async def test_a_state_that_does_not_pay_is_not_asked_for(bench: Bench, held: Holding):
    bench.peer_holds("b", held)
    grant = await bench.begin(3)
    assert bench.peer.asked == [] and bench.engine.asked == []
    end(bench, grant, 0, 10_050)


async def test_nothing_is_pulled_before_it_is_known_what_reading_takes(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.peer_holds("b", holding(10_000, 2))
    grant = await bench.begin(3)
    assert bench.peer.asked == []
    end(bench, grant, 0, 10_050)
    assert bench.stats.not_warm_causes == {"replica_behind": 1}
    await bench.stop()


async def test_a_peer_with_other_weights_is_not_asked(bench: Bench):
    bench.peer_holds("b", holding(10_000, 2), fp="other")
    grant = await bench.begin(3)
    assert bench.peer.asked == []
    end(bench, grant, 0, 10_050)


async def test_a_refused_pull_leaves_a_cold_turn_with_its_cause(bench: Bench):
    bench.peer_holds("b", holding(10_000, 2))
    bench.peer.fault = MeshError("answers with 409")
    grant = await bench.begin(3)
    assert bench.engine.asked == []
    end(bench, grant, 0, 10_050)
    assert bench.stats.not_warm_causes == {"replica_behind": 1}
    assert bench.fetcher.as_json()["failed"] == {"refused": 1}


async def test_a_refused_pull_falls_back_to_the_older_replica(bench: Bench):
    bench.put(5000, 1, NEW - 5)
    bench.peer_holds("b", holding(10_000, 2))
    bench.peer.fault = MeshError("answers with 409")
    grant = await bench.begin(3)
    assert bench.engine.asked == ["restore 0"]
    end(bench, grant, 5000, 10_050)
    assert bench.stats.not_warm_causes == {"replica_behind": 1}


async def test_a_pull_is_given_up_when_reading_would_have_been_as_quick(bench: Bench):
    """30 tokens are 0.3 s; whatever the peer does, the turn goes on then."""
    bench.peer_holds("b", holding(30, 2))
    bench.peer.answers = asyncio.Event().wait
    grant = await bench.begin(3)
    assert bench.peer.asked == ["b"] and bench.engine.asked == []
    end(bench, grant, 0, 40)
    assert bench.fetcher.as_json()["failed"] == {"too_slow": 1}
    assert not bench.arrivals._waiting, "whoever gave up is not kept"


async def test_a_wait_and_the_import_after_it_may_take_what_reading_would(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    limits: list[float] = []

    async def fetch(way: Way, *more: Any) -> str:
        limits.append(more[-1])
        return "replica_behind"

    monkeypatch.setattr(bench.fetcher, "fetch", fetch)
    bench.peer_holds("b", holding(1000, 2))
    end(bench, await bench.begin(3), 0, 1050)
    reading_s = 1000 * 0.01
    assert limits == [pytest.approx(reading_s - bench.restorer.costs.seconds(MODEL, 1000 * TOKEN_BYTES))]


async def test_a_state_no_newer_than_what_is_here_is_not_asked_for(bench: Bench):
    await bench.turn(2, 0, 600)
    here = bench.d.sessions.get(KEY)
    assert here is not None
    bench.peer_holds("b", holding(10_000, 2, here.generation))
    end(bench, await bench.begin(3), 600, 650)
    assert bench.peer.asked == []


async def test_the_tail_of_a_transfer_that_runs_is_waited_for(bench: Bench):
    bench.put(5000, 1, NEW - 5)
    on_its_way = asyncio.Event()

    async def arrive() -> None:
        with bench.arrivals.arriving(KEY, NEW, 10_000, "b", LINKS[2]):
            await on_its_way.wait()
            bench.put(10_000, 2, NEW)

    receiving = asyncio.create_task(arrive())
    await asyncio.sleep(0)
    turn = asyncio.create_task(bench.begin(3))
    await until(lambda: bench.arrivals._waiting)
    assert bench.engine.asked == []
    on_its_way.set()
    grant = await turn
    assert bench.peer.asked == [] and bench.engine.asked == ["restore 0"]
    held = bench.d.sessions.get(KEY)
    assert held is not None and held.generation == NEW
    end(bench, grant, 10_000, 10_050)
    await receiving


async def test_a_transfer_that_breaks_off_ends_the_wait(bench: Bench):
    bench.put(5000, 1, NEW - 5)
    broken = asyncio.Event()

    async def arrive() -> None:
        with bench.arrivals.arriving(KEY, NEW, 10_000, "b", LINKS[2]):
            await broken.wait()

    receiving = asyncio.create_task(arrive())
    await asyncio.sleep(0)
    turn = asyncio.create_task(bench.begin(3))
    await until(lambda: bench.arrivals._waiting)
    broken.set()
    grant = await turn
    held = bench.d.sessions.get(KEY)
    assert held is not None and held.generation == NEW - 5, "the older replica is better than none"
    end(bench, grant, 5000, 10_050)
    assert bench.fetcher.as_json()["failed"] == {"broken_off": 1}
    await receiving


async def test_a_client_that_leaves_while_a_state_is_fetched_leaves_no_lease(bench: Bench):
    bench.peer_holds("b", holding(10_000, 2))
    bench.peer.answers = asyncio.Event().wait
    turn = asyncio.create_task(bench.begin(3))
    await until(lambda: bench.peer.asked)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert bench.d.slots.open_leases == 0 and not bench.importer._running


async def test_a_turn_a_peer_has_just_run_for_us_counts_before_its_report_comes(bench: Bench):
    """Its list is as old as the last poll; what this node forwarded since is known all the same."""
    await bench.turn(1, 0, 500)
    bench.peer_holds("b", holding(500, 1, where="replica", generation=1))
    home = bench.d.slots.lease(bench.d.sessions.get(KEY).ref)  # type: ignore[union-attr, arg-type]
    forwarded = await bench.begin(3)
    assert forwarded.is_forward
    bench.d.finish(forwarded, Outcome("done", 200, usage=Usage(500, 9500, 1)))
    bench.d.slots.release(home)
    bench.peer.answers = lambda: bench.put(10_000, 3, NEW) and None
    grant = await bench.begin(5, prefer=("a",))
    assert bench.peer.asked == ["b"] and bench.engine.asked == ["restore 0"]
    end(bench, grant, 10_000, 10_050)
    assert bench.stats.moves == {"warm": 1}
