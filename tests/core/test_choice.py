from __future__ import annotations

from dataclasses import dataclass

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.capacity import Perf
from viiwork.core.choice import Candidate, Choice, Policy, Question, pick, predictions
from viiwork.core.receipts import reasons
from viiwork.limits import HOLD_MIN_MS

POLICY = Policy()
FAST, SLOW = Perf(100.0, 1000.0, 9), Perf(200.0, 4000.0, 9)  # 1,000 and 250 tokens a second


def host(node: str, free: int = 1, perf: Perf | None = FAST, **more) -> Candidate:
    return Candidate(node, free, perf=perf, **more)


def question(*candidates: Candidate, n_tokens: int = 1000, **more) -> Question:
    return Question("a", "m", n_tokens, candidates, keyed="session" in more, **more)


def chosen(*candidates: Candidate, policy: Policy = POLICY, **more) -> Choice:
    return pick(policy, question(*candidates, **more))


def prices(*candidates: Candidate, **more) -> list[float]:
    return [ms for ms, _ in predictions(question(*candidates, **more))]


# -- predictions -----------------------------------------------------------------------------------
def test_a_prediction_is_overhead_and_what_will_really_be_read_and_the_way_there():
    held = host("b", rtt_ms=5.0, held_tokens=900)
    assert prices(host("a"), held) == [100 + 1000, 100 + 100 + 5]


def test_a_host_that_holds_more_than_the_estimate_reads_nothing():
    assert prices(host("a", held_tokens=5000)) == [100]


def test_a_prediction_is_never_below_a_millisecond():
    assert prices(host("a", perf=Perf(0.0, 1.0)), n_tokens=0) == [1.0]


def test_an_unmeasured_host_is_priced_at_the_upper_medians_full_ones_included():
    hosts = [host("a", perf=None), host("b", perf=FAST), host("c", free=0, perf=SLOW)]
    assert prices(*hosts)[0] == 200 + 4000


def test_nothing_is_predicted_while_nobody_is_measured():
    assert prices(host("a", perf=None), host("b", perf=None)) == []


# -- the fastest -----------------------------------------------------------------------------------
def test_the_faster_host_gets_a_long_prompt_though_it_is_not_the_entry_node():
    assert chosen(host("a", perf=SLOW), host("b")) == Choice("b", "draw")


def test_among_equals_the_entry_node_comes_first():
    assert chosen(host("a", perf=Perf(120.0, 1200.0)), host("b", free=9)) == Choice("a", "entry")


def test_just_outside_the_band_the_entry_node_does_not_count_as_equal():
    assert chosen(host("a", perf=Perf(120.0, 1300.0)), host("b")).node == "b"


def test_equals_without_the_entry_node_are_drawn_by_the_cube_of_their_speed():
    b, c = host("b", perf=Perf(0.0, 1000.0)), host("c", perf=Perf(0.0, 1250.0))
    share_b = 1 / (1 + 0.8**3)
    assert chosen(b, c, draws=(1.0, share_b - 0.001)) == Choice("b", "draw")
    assert chosen(b, c, draws=(1.0, share_b + 0.001)) == Choice("c", "draw")
    assert chosen(b, c, draws=(1.0, 1.0)) == Choice("c", "draw")


def test_a_session_takes_the_same_host_among_equals_whoever_is_asked():
    hosts = [host(name) for name in "abcdef"]
    homes = {
        pick(POLICY, msgspec.structs.replace(question(*hosts, session="s"), me=me)).node for me in "abcdef"
    }
    assert len(homes) == 1
    assert len({chosen(*hosts, session=f"s{n}").node for n in range(40)}) == 6


def test_a_conversation_without_a_name_that_nobody_holds_stays_with_its_entry_node():
    q = msgspec.structs.replace(question(host("a"), host("b"), session="s"), keyed=False)
    assert pick(POLICY, q) == Choice("a", "entry")
    unmeasured = [host("a", perf=None), host("b", 9, perf=None)]
    assert pick(POLICY, msgspec.structs.replace(q, candidates=tuple(unmeasured))) == Choice("a", "entry")


def test_a_session_goes_where_its_prompt_is_among_equals():
    held = host("b", perf=Perf(125.0, 1000.0), held_tokens=500)
    assert chosen(host("a"), held, session="s", n_tokens=500) == Choice("b", "warm")


def test_of_equally_much_what_is_nearest_to_the_engine_counts():
    def order(*where: str) -> str | None:
        held = [host(n, held_tokens=900, held_where=w) for n, w in zip("abc", where, strict=True)]
        return chosen(*held, session="s").node

    assert order("replica", "slot", "ram") == "b" and order("replica", "replica", "ram") == "c"


def test_a_much_faster_host_beats_a_slow_one_that_holds_little():
    assert chosen(host("a"), host("b", perf=SLOW, held_tokens=100), session="s").node == "a"


def test_one_request_in_twenty_finds_out_about_a_host_nobody_measured():
    hosts = [host("a"), host("b", perf=None), host("c", perf=None)]
    assert chosen(*hosts, draws=(0.049, 0.0)) == Choice("b", "explored")
    assert chosen(*hosts, draws=(0.049, 0.999)) == Choice("c", "explored")
    assert chosen(*hosts, draws=(0.05, 0.0)) == Choice("a", "entry")


def test_a_prompt_that_somebody_holds_is_nothing_to_find_out_with():
    assert chosen(host("a", held_tokens=900), host("b", perf=None), draws=(0.0, 0.0)).node == "a"


# -- nothing measured ------------------------------------------------------------------------------
def test_unmeasured_a_request_goes_to_who_holds_it_then_by_session_then_here_then_to_most_room():
    a, b, c = (host(name, free, perf=None) for name, free in (("a", 1), ("b", 2), ("c", 3)))
    warm = host("b", 2, perf=None, held_tokens=1)
    assert chosen(a, warm, c, session="s") == Choice("b", "warm")
    assert chosen(a, b, c, session="s").rule == "rendezvous"
    assert chosen(a, b, c) == Choice("a", "entry")
    assert chosen(b, c) == Choice("c", "most_free")


def test_without_performance_sessions_and_speed_do_not_count():
    plain = Policy(performance=False)
    hosts = [host("a", perf=SLOW), host("b", held_tokens=900)]
    assert chosen(*hosts, session="s", policy=plain) == Choice("a", "entry")
    full = host("a", 0)
    assert chosen(full, host("b", 1), host("c", 2), session="s", policy=plain) == Choice("c", "most_free")


# -- wishes ----------------------------------------------------------------------------------------
def test_a_pin_leaves_no_choice():
    assert chosen(host("a"), host("b", perf=SLOW), pin="b") == Choice("b", "pinned")
    assert chosen(host("a"), host("b", 0), pin="b") == Choice(None, "full")


def test_the_first_preferred_host_with_room_is_taken_and_the_others_are_passed_over():
    hosts = [host("a"), host("b", 0), host("c", state="failing"), host("d", perf=SLOW)]
    assert chosen(*hosts, prefer=("gone", "b", "c", "d", "a")) == Choice("d", "preferred")
    assert chosen(*hosts, prefer=("gone", "b")).rule == "entry"


def test_a_failing_host_is_full_while_another_serves_and_better_than_none():
    failing = host("b", 9, state="failing")
    assert chosen(host("a", 0), failing) == Choice(None, "full")
    assert chosen(failing) == Choice("b", "most_free")
    assert chosen(host("a", state="excluded"), failing) == Choice("b", "most_free")


# -- waiting for a warm home -----------------------------------------------------------------------
def test_a_full_host_that_holds_the_prompt_is_waited_for_as_long_as_that_saves():
    home, other = host("b", 0, held_tokens=900), host("a")
    assert chosen(other, home, session="s", budget_ms=20_000.0) == Choice("b", "hold", 900.0)
    assert chosen(other, home, session="s", waited_ms=500.0, budget_ms=20_000.0).hold_ms == 400.0
    assert chosen(other, home, session="s", waited_ms=900.0, budget_ms=20_000.0) == Choice("a", "rendezvous")


def test_the_wait_for_a_warm_host_ends_with_the_queue_budget():
    home = host("b", 0, held_tokens=900)
    assert chosen(host("a"), home, budget_ms=300.0).hold_ms == 300.0
    assert chosen(host("a"), home, budget_ms=0.0) == Choice("a", "entry")


def test_a_wait_that_saves_next_to_nothing_is_not_begun():
    home = host("b", 0, held_tokens=int(HOLD_MIN_MS) - 1)
    assert chosen(host("a"), home, budget_ms=20_000.0).node == "a"


def test_a_full_fleet_is_waited_for_at_the_warm_host_first():
    home = host("b", 0, held_tokens=900)
    assert chosen(host("a", 0), home, budget_ms=20_000.0) == Choice("b", "hold", 900.0)
    assert chosen(host("a", 0), home, waited_ms=900.0, budget_ms=20_000.0) == Choice(None, "full")


def test_a_failing_or_refusing_host_is_not_waited_for():
    for state in ("failing", "excluded"):
        home = host("b", 0, held_tokens=900, state=state)
        assert chosen(host("a"), host("c"), home, budget_ms=20_000.0) == Choice("a", "entry")


def test_nothing_is_waited_for_where_the_policy_says_so():
    home = host("b", 0, held_tokens=900)
    assert chosen(host("a"), home, budget_ms=20_000.0, policy=Policy(hold=False)) == Choice("a", "entry")


@dataclass(frozen=True)
class Wait:
    """A turn that waits for its home until `opens_at_ms`, and goes elsewhere when that takes too long."""

    warm_ms: float
    cold_ms: float
    opens_at_ms: float

    def cost_ms(self) -> float:
        saves_ms = self.cold_ms - self.warm_ms
        return self.opens_at_ms + self.warm_ms if self.opens_at_ms <= saves_ms else saves_ms + self.cold_ms


@given(st.integers(0, 50_000), st.integers(0, 50_000), st.floats(0, 1e6))
def test_waiting_costs_at_most_twice_the_better_way_whenever_the_home_opens(n_tokens, held, opens_at_ms):
    home, other = host("b", 0, held_tokens=held), host("a")
    q = question(other, home, n_tokens=n_tokens, budget_ms=1e9)
    warm_ms, cold_ms = (ms for ms, _ in reversed(predictions(q)))
    choice = pick(POLICY, q)
    assert choice.hold_ms <= cold_ms - warm_ms
    if choice.rule == "hold":
        wait = Wait(warm_ms, cold_ms, opens_at_ms)
        assert wait.cost_ms() <= 2 * min(cold_ms, opens_at_ms + warm_ms) + 1e-6


# -- what always holds -----------------------------------------------------------------------------
perfs = st.none() | st.builds(Perf, st.floats(0, 1e5), st.floats(1, 1e5), st.integers(0, 99))
hosts = st.lists(
    st.builds(
        Candidate,
        st.sampled_from("abcdefgh"),
        st.integers(0, 3),
        st.floats(0, 100),
        perfs,
        st.integers(0, 5000),
        st.just("slot"),
        st.sampled_from(["", "", "", "excluded", "failing"]),
    ),
    max_size=8,
    unique_by=lambda c: c.node,
).map(lambda cs: tuple(sorted(cs, key=lambda c: c.node)))
draw = st.floats(0, 1, exclude_max=True)
questions = st.builds(
    Question,
    st.just("a"),
    st.just("m"),
    st.integers(0, 5000),
    hosts,
    st.none() | st.sampled_from(["s", "t"]),
    st.booleans(),
    st.none() | st.sampled_from("abz"),
    st.lists(st.sampled_from("abcz"), max_size=3).map(tuple),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.tuples(draw, draw),
)
policies = st.builds(Policy, st.booleans(), st.floats(1, 5), st.floats(0, 1), st.booleans())


@given(policies, questions)
def test_a_request_never_runs_on_a_full_excluded_or_unknown_host(policy: Policy, q: Question):
    choice = pick(policy, q)
    by_name = {c.node: c for c in q.candidates}
    if choice.node is None:
        assert choice.hold_ms == 0
        return
    candidate = by_name[choice.node]
    assert candidate.state != "excluded"
    assert (choice.hold_ms > 0) == (choice.rule == "hold") == (candidate.free == 0)
    assert choice.hold_ms <= q.budget_ms
    assert q.pin in (None, choice.node)
    if candidate.state == "failing" and q.pin is None:
        assert all(c.state for c in q.candidates)


@given(policies, questions)
def test_a_request_waits_only_when_no_host_that_may_run_it_has_room(policy: Policy, q: Question):
    if pick(policy, q).node is None:
        able = [c for c in q.candidates if not c.state] or q.candidates
        assert not any(
            c.free > 0 and c.state != "excluded" and q.pin in (None, c.node)
            for c in (q.candidates if q.pin else able)
        )


@given(policies, questions)
def test_every_candidate_gets_a_reason_and_the_chosen_one_alone_is_taken(policy: Policy, q: Question):
    choice = pick(policy, q)
    told = reasons(policy, q, choice)
    assert [reason.candidate for reason in told] == list(q.candidates)
    taken = [r.candidate.node for r in told if r.why in ("taken", "waited for")]
    assert taken == ([] if choice.node is None else [choice.node])


@given(questions, st.integers(0, 7), st.integers(1, 5000), st.floats(0, 100))
def test_a_prediction_falls_with_what_is_held_and_grows_with_prompt_and_distance(q, i, more, rtt_ms):
    before = predictions(q)
    if not before:
        return
    i %= len(q.candidates)
    c, ms = q.candidates[i], before[i][0]

    def changed(**facts) -> float:
        other = msgspec.structs.replace(c, **facts)
        return predictions(
            msgspec.structs.replace(q, candidates=(*q.candidates[:i], other, *q.candidates[i + 1 :]))
        )[i][0]

    assert changed(held_tokens=c.held_tokens + more) <= ms <= changed(rtt_ms=c.rtt_ms + rtt_ms)
    assert predictions(msgspec.structs.replace(q, n_tokens=q.n_tokens + more))[i][0] >= ms


# -- what a replica is worth -----------------------------------------------------------------------
def importing(ms_per_1k: float | None) -> Perf:
    return Perf(100.0, 1000.0, 9, ms_per_1k)


def test_a_replica_costs_what_its_node_says_restoring_takes():
    held = host("b", perf=importing(200.0), held_tokens=900, held_where="replica")
    assert prices(host("a"), held) == [1100, 100 + 100 + 180]


def test_a_node_that_does_not_say_what_restoring_takes_is_guessed_between_nothing_and_reading():
    held = host("b", perf=importing(None), held_tokens=900, held_where="replica")
    (price,) = prices(held)
    assert 200 < price < 1100


def test_restoring_never_counts_for_more_than_reading():
    held = host("b", perf=importing(9000.0), held_tokens=1000, held_where="replica")
    assert prices(held) == [1100]


def test_a_replica_longer_than_the_prompt_costs_no_more_than_the_prompt():
    held = host("b", perf=importing(200.0), held_tokens=5000, held_where="replica")
    assert prices(held) == [100 + 200]


def test_what_lies_in_a_slot_or_in_ram_costs_nothing():
    for where in ("slot", "ram"):
        assert prices(host("b", perf=importing(200.0), held_tokens=1000, held_where=where)) == [100]


def test_a_busy_home_hands_over_when_restoring_elsewhere_is_faster_than_its_wait_may_last():
    home = host("b", free=0, perf=importing(100.0), held_tokens=1000, held_where="slot")
    cheap = host("c", perf=importing(15.0), held_tokens=1000, held_where="replica")
    assert chosen(home, cheap).node == "c"
    dear = host("c", perf=importing(800.0), held_tokens=1000, held_where="replica")
    held_out = chosen(home, dear, budget_ms=60_000.0)
    assert (held_out.node, held_out.rule, held_out.hold_ms) == ("b", "hold", 800.0)


def test_the_node_with_the_state_in_its_slot_comes_before_the_one_that_must_restore_it():
    slot = host("b", perf=importing(500.0), held_tokens=1000, held_where="slot")
    stored = host("c", perf=importing(500.0), held_tokens=1000, held_where="replica")
    assert chosen(stored, slot).node == "b"


def test_a_slow_node_with_a_replica_does_not_beat_a_fast_one_that_reads():
    slow = Perf(200.0, 30_000.0, 9, 20_000.0)
    stored = host("c", perf=slow, held_tokens=1000, held_where="replica")
    assert chosen(host("a"), stored).node == "a"
