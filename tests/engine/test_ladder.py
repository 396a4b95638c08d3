"""The ladder: plain calls, no process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.engine.events import (
    Answered,
    Event,
    Exited,
    ForeignAnswered,
    GateOpened,
    HardFailure,
    Heard,
    ProbeFailed,
    ProbeNow,
    ProbeOk,
    ProofFailed,
    Prove,
    Proved,
    Silent,
    Spawn,
    SpawnFailed,
    Stalled,
    Stop,
    Succeeded,
    Tick,
    WarmedUp,
    WarmUp,
    WarmUpFailed,
    WrongCards,
)
from viiwork.engine.ladder import Ladder, Rules

RULES = Rules(startup_timeout_s=100, max_failures=3, max_respawns=3, respawn_grace_s=60)


def healthy(now: float = 0.0, rules: Rules = RULES) -> Ladder:
    ladder = Ladder(rules)
    assert ladder.on(GateOpened(), now) == [Spawn()]
    assert ladder.on(Answered(), now) == [WarmUp()]
    assert ladder.on(WarmedUp(), now) == []
    assert ladder.status == "healthy"
    return ladder


def test_nothing_happens_before_the_gate_opens() -> None:
    ladder = Ladder(RULES)
    assert (ladder.status, ladder.phase, ladder.next_tick(0.0)) == ("starting", "queued", None)
    assert ladder.on(Tick(), 1e9) == []


def test_failed_probes_do_not_count_while_starting() -> None:
    ladder = Ladder(RULES)
    ladder.on(GateOpened(), 0.0)
    for _ in range(10):
        assert ladder.on(ProbeFailed("503"), 1.0) == []
    assert (ladder.status, ladder.phase) == ("starting", "loading")


@pytest.mark.parametrize("warming", [False, True])
def test_startup_timeout_covers_loading_and_warm_up(warming: bool) -> None:
    ladder = Ladder(RULES)
    ladder.on(GateOpened(), 0.0)
    if warming:
        ladder.on(Answered(), 50.0)
    assert ladder.next_tick(60.0) == 100.0
    assert ladder.on(Tick(), 99.0) == []
    assert ladder.on(Tick(), 100.0) == [Stop(5.0)]
    assert ladder.reason == "not ready within 100 s"


def test_one_failed_probe_takes_a_backend_out_of_routing_and_one_good_one_puts_it_back() -> None:
    ladder = healthy()
    assert ladder.on(ProbeFailed("timeout"), 1.0) == []
    assert (ladder.status, ladder.reason) == ("unhealthy", "timeout")
    ladder.on(ProbeOk(), 2.0)
    assert (ladder.status, ladder.reason) == ("healthy", "")


def test_strikes_must_be_in_a_row() -> None:
    ladder = healthy()
    for _ in range(5):
        ladder.on(ProbeFailed("x"), 1.0)
        ladder.on(ProbeFailed("x"), 1.0)
        ladder.on(ProbeOk(), 1.0)
    assert ladder.status == "healthy"
    effects = [ladder.on(ProbeFailed("x"), 1.0) for _ in range(3)]
    assert effects == [[], [], [Stop(5.0)]] and ladder.status == "respawn"


def test_giving_up_waits_for_requests_in_flight_but_not_longer_than_the_grace() -> None:
    for drained_at, in_flight in ((5.0, 0), (61.0, 7)):
        ladder = healthy()
        for _ in range(3):
            assert ladder.on(ProbeFailed("x"), 1.0, in_flight=2) == []
        assert ladder.on(Tick(), 4.0, in_flight=1) == []
        assert ladder.on(Tick(), drained_at, in_flight) == [Stop(5.0)]


def test_process_that_ends_while_draining_is_respawned() -> None:
    ladder = healthy()
    for _ in range(3):
        ladder.on(ProbeFailed("x"), 1.0, in_flight=1)
    ladder.on(Exited("exited"), 2.0)
    assert ladder.reason == "3 probes failed: x"
    assert ladder.on(Tick(), 3.0) == [Spawn()]


def test_respawns_are_spaced_twice_as_far_each_time_until_the_budget_is_spent() -> None:
    ladder = healthy()
    now, gaps = 10.0, []
    while ladder.status != "dead":
        ladder.on(Exited("crash"), now)
        due = ladder.next_tick(now)
        assert due is not None
        if ladder.status == "respawn":
            gaps.append(due - now)
            now = due
            assert ladder.on(Tick(), now) == [Spawn()]
            now += 20.0
    assert gaps == [1.0, 2.0, 4.0] and ladder.respawns == 3


def test_dead_backend_is_tried_again_after_ever_longer_waits() -> None:
    ladder = healthy(rules=Rules(max_respawns=0, startup_timeout_s=1e9))
    now, waits = 0.0, []
    for _ in range(6):
        now += 50.0
        ladder.on(Exited("crash"), now)
        assert ladder.status == "dead"
        due = ladder.next_tick(now)
        assert due is not None
        waits.append(due - now)
        now = due
        assert ladder.on(Tick(), now) == [Spawn()]
    assert waits == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    ladder.on(Answered(), now)
    ladder.on(WarmedUp(), now)
    assert ladder.status == "healthy"


def test_ten_minutes_of_health_give_the_budget_back() -> None:
    ladder = healthy()
    ladder.on(Exited("crash"), 1.0)
    ladder.on(Tick(), 2.0)
    ladder.on(Answered(), 3.0)
    ladder.on(WarmedUp(), 3.0)
    assert ladder.respawns == 1 and ladder.next_tick(3.0) == 603.0
    ladder.on(Tick(), 602.0)
    assert ladder.respawns == 1
    ladder.on(Tick(), 603.0)
    assert ladder.respawns == 0 and ladder.next_tick(603.0) is None


def test_recovering_often_does_not_give_the_budget_back() -> None:
    ladder, now = healthy(), 0.0
    for _ in range(3):
        now += 100.0
        ladder.on(Exited("crash"), now)
        now += 10.0
        ladder.on(Tick(), now)
        ladder.on(Answered(), now)
        ladder.on(WarmedUp(), now)
    ladder.on(Exited("crash"), now + 1.0)
    assert ladder.status == "dead"


def test_quick_exit_before_ready_has_one_free_retry() -> None:
    ladder = Ladder(RULES)
    ladder.on(GateOpened(), 0.0)
    assert ladder.on(Exited("bind failed"), 9.0) == [Spawn()]
    assert ladder.respawns == 0
    ladder.on(Exited("bind failed"), 10.0)
    assert (ladder.status, ladder.respawns) == ("respawn", 1)


def test_late_exit_before_ready_has_no_free_retry() -> None:
    ladder = Ladder(RULES)
    ladder.on(GateOpened(), 0.0)
    assert ladder.on(Exited("oom"), 10.0) == []
    assert ladder.status == "respawn"


def test_usage_error_is_dead_for_good() -> None:
    for event in (Exited("exit 1", usage="bad flag"), SpawnFailed("bad flag", is_usage=True)):
        ladder = Ladder(RULES)
        ladder.on(GateOpened(), 0.0)
        assert ladder.on(event, 1.0) == []
        assert (ladder.status, ladder.reason, ladder.next_tick(1.0)) == ("dead", "bad flag", None)


def test_words_of_an_engine_that_served_are_no_usage_error() -> None:
    ladder = healthy()
    ladder.on(Exited("crash", usage="error: invalid argument"), 5.0)
    assert ladder.status == "respawn"


def test_stranger_on_the_port_costs_a_move_and_no_respawn() -> None:
    ladder = Ladder(RULES)
    ladder.on(GateOpened(), 0.0)
    assert ladder.on(ForeignAnswered("process 1"), 1.0) == [Stop(0.0)]
    assert ladder.on(Exited("killed"), 1.1) == [Spawn()]
    assert ladder.respawns == 0
    ladder.on(ForeignAnswered("process 1"), 2.0)
    ladder.on(Exited("killed"), 2.1)
    assert (ladder.status, ladder.respawns) == ("respawn", 1)


def test_hard_failure_needs_a_failed_probe_to_count() -> None:
    ladder = healthy()
    assert ladder.on(HardFailure("reset"), 1.0) == [ProbeNow()]
    ladder.on(ProbeOk(), 1.1)
    assert ladder.on(ProbeFailed("x"), 2.0) == [] and ladder.status == "unhealthy"
    assert ladder.on(HardFailure("reset"), 3.0) == [ProbeNow()]
    assert ladder.on(ProbeFailed("x"), 3.1) == [Stop(5.0)]


def test_an_engine_that_lost_a_request_is_unroutable_until_it_runs_a_token() -> None:
    ladder = healthy()
    assert ladder.on(Stalled(), 1.0, in_flight=3) == [Prove()]
    assert (ladder.status, ladder.phase) == ("unhealthy", "proving")
    assert ladder.on(Stalled(), 1.0, in_flight=2) == [], "lost by the same fault"
    ladder.on(ProbeOk(), 2.0)
    assert ladder.status == "unhealthy", "/health outlives the thread that computes"
    ladder.on(Proved(), 3.0)
    assert (ladder.status, ladder.phase, ladder.reason) == ("healthy", "", "")


def test_an_engine_that_lost_a_request_and_runs_no_token_ends_without_waiting() -> None:
    ladder = healthy()
    ladder.on(Stalled(), 1.0, in_flight=3)
    assert ladder.on(ProofFailed("no answer"), 11.0, in_flight=3) == [Stop(5.0)]
    assert (ladder.status, ladder.reason) == ("respawn", "it lost a request, and then: no answer")


def test_two_lost_requests_without_a_success_between_end_an_engine_whatever_it_proved() -> None:
    ladder = healthy()
    ladder.on(Stalled(), 1.0)
    ladder.on(Succeeded(), 2.0)
    assert ladder.status == "healthy"
    assert ladder.on(Stalled(), 3.0, in_flight=3) == [Prove()]
    ladder.on(Proved(), 3.5)
    assert ladder.on(Stalled(), 4.0, in_flight=3) == [Stop(5.0)]


def test_a_silent_engine_leaves_routing_at_once_and_comes_back_when_it_is_heard() -> None:
    ladder = healthy()
    assert ladder.on(Silent("no answer"), 1.0, in_flight=2) == []
    assert (ladder.status, ladder.phase, ladder.reason) == ("unhealthy", "silent", "no answer")
    ladder.on(ProbeFailed("no answer"), 2.0, in_flight=2)
    ladder.on(Heard(), 3.0)
    assert (ladder.status, ladder.phase, ladder.reason) == ("healthy", "", "")


def test_requests_a_silent_engine_lost_are_not_held_against_it() -> None:
    ladder = healthy()
    ladder.on(Silent("no answer"), 1.0)
    for _ in range(5):
        assert ladder.on(Stalled(), 2.0) == []
    ladder.on(Heard(), 3.0)
    assert ladder.status == "healthy"


def test_an_engine_silent_for_too_long_is_given_up_though_its_health_is_answered() -> None:
    ladder = healthy()
    ladder.on(Silent("no answer"), 1.0, in_flight=2)
    assert ladder.on(ProbeOk(), 5.0, in_flight=2) == []
    assert ladder.on(ProbeOk(), 10.0, in_flight=2) == []
    assert ladder.on(ProbeOk(), 15.0, in_flight=2) == [Stop(5.0)], "what stands still is not waited for"


def test_an_answered_load_poll_does_not_heal_a_failed_probe() -> None:
    ladder = healthy()
    ladder.on(ProbeFailed("500"), 1.0)
    ladder.on(Heard(), 2.0)
    assert ladder.status == "unhealthy"


@pytest.mark.parametrize("event", [ProbeOk(), Exited("x"), Heard(), Stalled(), Tick(), GateOpened()])
def test_a_draining_backend_does_nothing_more(event: Event) -> None:
    ladder = healthy()
    ladder.retire()
    assert ladder.on(event, 1.0, in_flight=1) == []
    assert (ladder.status, ladder.next_tick(1.0)) == ("draining", None)


def test_engine_on_the_wrong_cards_is_given_up_after_its_requests() -> None:
    ladder = healthy()
    assert ladder.on(WrongCards("on card 3"), 1.0, in_flight=1) == []
    assert ladder.on(Tick(), 2.0, in_flight=0) == [Stop(5.0)]
    assert (ladder.status, ladder.reason) == ("respawn", "on card 3")


def test_failed_warm_up_is_a_failed_start() -> None:
    ladder = Ladder(RULES)
    ladder.on(GateOpened(), 0.0)
    ladder.on(Answered(), 1.0)
    assert ladder.on(WarmUpFailed("500"), 2.0) == [Stop(5.0)]
    ladder.on(Exited("asked to"), 3.0)
    assert (ladder.status, ladder.reason) == ("respawn", "500")


EVENTS: list[Event] = [
    SpawnFailed("x", False), Answered(), ForeignAnswered("x"), WarmedUp(), WarmUpFailed("x"), ProbeOk(),
    ProbeFailed("x"), HardFailure("x"), Stalled(), Succeeded(), Exited("x"), Tick(), Silent("x"), Heard(),
    Proved(), ProofFailed("x"),
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 30), st.integers(0, 1)), max_size=60))
def test_whatever_happens_there_is_one_process_at_most_and_always_a_way_back(
    history: list[tuple[Event, float, int]],
) -> None:
    ladder, now, running, stopping = Ladder(RULES), 0.0, False, False
    effects = ladder.on(GateOpened(), now)
    for event, wait, in_flight in history:
        now += wait
        for effect in effects:
            if effect == Spawn():
                assert not running, "two processes of one backend"
                running, stopping = True, False
            stopping = stopping or isinstance(effect, Stop)
        if isinstance(event, Exited | SpawnFailed):
            if not running:
                continue
            running = stopping = False
        effects = ladder.on(event, now, in_flight)
    if not running and Spawn() not in effects:
        assert ladder.next_tick(now) is not None, "nobody would ever start it again"
    elif ladder.status == "respawn" and not stopping and not any(isinstance(e, Stop) for e in effects):
        assert ladder.next_tick(now) is not None, "nobody would ever stop it"
