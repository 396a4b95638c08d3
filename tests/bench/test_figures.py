"""What turns and two nodes' status add up to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.made_results import work_phase, work_run
from viiwork.bench.agents import Turn
from viiwork.bench.figures import Tallies, pooled, run_of, workload_of


def turn(cached: int | None, *, moved: bool = False, compacted: bool = False, failed: str = "") -> Turn:
    prompt = 1000 if cached is not None else None
    return Turn(0, 0.0, 0.5, "a", cached, prompt, moved, compacted, failed)


def status(sent: int, *last: dict[str, Any], **more: Any) -> dict[str, Any]:
    tally = {"done": sent, "wire_bytes": 1000 * sent, "stages_s": {"send": 0.5 * sent}, "failed": {}}
    return {"kv_share": {"sent": tally, "last": list(last)} | more}


def send(at: float, seconds: float, n_bytes: int = 5, **more: Any) -> dict[str, Any]:
    return {"at_unix_s": at, "what": "send", "took_s": seconds, "raw_bytes": n_bytes} | more


def test_moves_are_warm_partly_or_cold_and_compacted_ones_are_none_of_it():
    turns = [
        turn(0),
        turn(950, moved=True),
        turn(900, moved=True),
        turn(899, moved=True),
        turn(299, moved=True),
        turn(0, moved=True),
        turn(0, moved=True, compacted=True),
        turn(None, moved=True),
        turn(0, failed="status 503"),
        turn(0, failed="status 503"),
    ]
    run = run_of(7, 10.0, turns, Tallies(2))
    assert (run.moves, run.warm, run.partly, run.cold) == (5, 2, 1, 2)
    assert (run.turns, run.untold, run.compactions, run.moved_compactions) == (8, 1, 1, 1)
    assert run.failed == {"status 503": 2}
    assert (run.reused_tokens, run.moved_prompt_tokens) == (3048, 5000)
    assert len(run.ttft_s) == 8 and len(run.moved_ttft_s) == 5


def test_only_what_happened_during_the_run_counts():
    tallies = Tallies(2)
    old = send(1.0, 9.0)
    tallies.told(0, status(10, old, stall_s={"m/0": 1.0}, not_warm_causes={"no_replica": 2}))
    tallies.told(1, status(0))
    fresh, failed = send(2.0, 0.25, 70), send(3.0, 0.1, result="failed")
    later = status(13, old, fresh, failed, stall_s={"m/0": 1.5}, not_warm_causes={"no_replica": 3})
    tallies.told(0, later)
    tallies.told(0, later)
    tallies.told(1, status(2, {"what": "import", "took_s": 0.5, "at_unix_s": 4.0}))
    run = run_of(1, 10.0, [], tallies)
    assert (run.sends, run.wire_bytes, run.stall_s) == (5, [3000, 2000], [0.5, 0.0])
    assert (run.send_s, run.send_bytes, run.import_s) == ([0.25], [70], [0.5])
    assert run.send_stages_s == {"send": 2.5} and run.not_warm_causes == {"no_replica": 1}


def test_goodput_is_what_went_out_between_two_looks():
    tallies = Tallies(2)
    for node in (0, 1):
        tallies.told(node, status(0))
    tallies.sample(0.0)
    tallies.told(0, status(4))
    tallies.sample(1.0)
    tallies.told(1, status(1))
    tallies.sample(3.0)
    found = [(s.at_s, s.seconds, s.a_bytes, s.b_bytes) for s in run_of(1, 3.0, [], tallies).goodput]
    assert found == [(1.0, 1.0, 4000, 0), (3.0, 2.0, 0, 1000)]


@pytest.mark.parametrize(
    "shared",
    [None, [], {"sent": 3, "last": None}, {"last": ["x"], "stall_s": [1]}, {"sent": {"done": "many"}}],
)
def test_a_status_of_another_shape_counts_nothing(shared: object):
    tallies = Tallies(2)
    for node in (0, 1, 0, 1):
        tallies.told(node, {"kv_share": shared})
    run = run_of(1, 1.0, [], tallies)
    assert (run.sends, run.send_s, run.wire_bytes, run.stall_s) == (0, [], [0, 0], [0.0, 0.0])


def test_all_runs_together_are_in_units_of_the_modelled_system():
    found = pooled(workload_of(work_phase("p", work_run(), work_run(warm=38, cold=1)).workload or {}))
    assert (found.turns, found.moves) == (400, 80)
    assert found.by_warmth == {"warm": 77, "partly": 2, "cold": 1}
    assert found.send_mib == [256.0] * 6 and found.import_s == [1.0] * 4
    assert found.mbps == (128.0, 64.0) and found.stall_share == pytest.approx(0.03)
