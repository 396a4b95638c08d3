from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport, Perf
from viiwork.core.choice import Policy
from viiwork.core.peers import PeerTable
from viiwork.core.router import Forward, Local, LocalUnslotted, Refuse, Terms, View, Wait
from viiwork.core.router import choose as decide
from viiwork.core.sessions import Binding, SessionTable
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.turn import Ask, Held, Usage
from viiwork.errors import NoFreeSlot, NotServedHere, UnknownModel
from viiwork.limits import CANDIDATES_MAX

NOW = 100.0


def choose(view: View, ask: Ask, now: float, exclude=(), **terms):
    return decide(view, ask, Terms(now, **terms), exclude).decision


def view(*, local: int | None = 1, peers: dict[str, int] | None = None, asked_at: float = NOW - 0.5) -> View:
    """This node `a` with `local` slots of model m (None: not served), and peers with so many free ones."""
    slots, table = SlotTable(), PeerTable(3.0)
    if local is not None:
        slots.put_backend("m/0", model="m", url="http://e", n_slots=local, routable=True)
    for name, free in (peers or {}).items():
        table.put(name, f"http://{name}")
        report(table, name, free, asked_at)
    return View("a", slots, SessionTable(), table)


def report(peers: PeerTable, name: str, free: int, asked_at: float, rtt_s: float = 0.001) -> None:
    entry = ModelCapacity("m", slots=max(free, 1), busy=max(free, 1) - free, backends=1, healthy_backends=1)
    peers.reported(name, PeerReport(CapacityReport(name, "1", (entry,)), asked_at, asked_at + rtt_s, rtt_s))


def ask(**kwargs) -> Ask:
    return Ask("r1", "m", **kwargs)


def test_a_free_local_slot_comes_before_any_peer():
    assert choose(view(peers={"b": 9}), ask(), NOW) == Local(SlotRef("m/0", 0))


def test_a_full_node_forwards_to_the_peer_with_most_free_slots():
    v = view(local=0, peers={"b": 1, "c": 3})
    assert choose(v, ask(), NOW) == Forward("c")


def test_equally_free_peers_are_told_apart_by_round_trip_time():
    v = view(local=None, peers={"b": 1, "c": 1})
    report(v.peers, "b", 2, NOW - 0.2, rtt_s=0.02)
    report(v.peers, "c", 2, NOW - 0.2, rtt_s=0.01)
    assert choose(v, ask(), NOW) == Forward("c")


def test_an_unknown_model_is_refused_with_its_name():
    decision = choose(view(local=None, peers={"b": 1}), Ask("r", "nope"), NOW)
    assert isinstance(decision, Refuse) and decision.error is UnknownModel and "'nope'" in decision.message


def test_nobody_free_means_wait():
    assert choose(view(local=0, peers={"b": 0}), ask(), NOW) == Wait(served=True, full=True)


def test_a_stale_peer_is_unknown_and_not_routed_to():
    v = view(local=None, peers={"b": 5}, asked_at=NOW - 4)
    assert choose(v, ask(), NOW) == Wait(served=False, full=True)


def test_a_report_exactly_as_old_as_the_limit_is_stale():
    v = view(local=None)
    v.peers.put("b", "http://b")
    entry = ModelCapacity("m", slots=1, backends=1, healthy_backends=1)
    v.peers.reported("b", PeerReport(CapacityReport("b", "1", (entry,)), NOW - 3, NOW - 3))
    assert choose(v, ask(), NOW) == Wait(served=False, full=True)


def test_forwards_begun_since_the_report_was_asked_for_are_subtracted():
    v = view(local=None, peers={"b": 1})
    v.peers.forward_started("b", "m", NOW - 0.1)
    assert choose(v, ask(), NOW) == Wait(served=True, full=True)


def test_forwards_begun_before_the_question_are_in_the_report_already():
    v = view(local=None, peers={"b": 1}, asked_at=NOW - 0.1)
    v.peers.forward_started("b", "m", NOW - 0.2)
    assert choose(v, ask(), NOW) == Forward("b")


def test_a_refusal_counts_until_a_report_asked_for_after_it():
    v = view(local=None, peers={"b": 2})
    v.peers.refused("b", "m", NOW)
    assert choose(v, ask(), NOW) == Wait(served=True, full=True)
    report(v.peers, "b", 2, NOW - 0.1)  # was under way when the refusal came
    assert choose(v, ask(), NOW) == Wait(served=True, full=True)
    report(v.peers, "b", 2, NOW + 0.1)
    assert choose(v, ask(), NOW + 0.2) == Forward("b")


def test_a_forward_runs_here_or_is_refused_but_never_waits_or_hops_on():
    forwarded = ask(forwarded_by="b")
    assert choose(view(peers={"c": 5}), forwarded, NOW) == Local(SlotRef("m/0", 0))
    full = choose(view(local=0, peers={"c": 5}), forwarded, NOW)
    assert isinstance(full, Refuse) and full.error is NoFreeSlot
    gone = choose(view(local=None, peers={"c": 5}), forwarded, NOW)
    assert isinstance(gone, Refuse) and gone.error is NotServedHere


def test_excluded_nodes_are_passed_over_this_node_included():
    v = view(local=1, peers={"b": 1, "c": 1})
    assert choose(v, ask(), NOW, {"a", "b"}) == Forward("c")
    assert choose(v, ask(), NOW, {"a", "b", "c"}) == Wait(served=True, full=False)


def test_a_session_returns_to_its_slot():
    v = view(local=3)
    v.sessions.ran_here(("s", "m"), Binding("a", SlotRef("m/0", 2), 100, 1))
    assert choose(v, ask(session="s"), NOW) == Local(SlotRef("m/0", 2))


def test_a_session_whose_slot_is_taken_runs_in_another_one():
    v = view(local=2)
    v.sessions.ran_here(("s", "m"), Binding("a", SlotRef("m/0", 0), 100, 1))
    v.slots.lease(SlotRef("m/0", 0))
    assert choose(v, ask(session="s"), NOW) == Local(SlotRef("m/0", 1))


def test_a_session_goes_to_the_node_of_its_last_turn_while_that_has_room():
    v = replace(view(local=1, peers={"b": 1}), held=lambda ask: {"b": Held(100, "slot")})
    assert choose(v, ask(session="s"), NOW) == Forward("b")
    v.peers.forward_started("b", "m", NOW)
    assert choose(v, ask(session="s"), NOW) == Local(SlotRef("m/0", 0))


def test_others_take_the_slot_that_holds_no_session_then_the_one_idle_longest():
    v = view(local=3)
    for slot, session in ((1, "t"), (0, "s")):
        lease = v.slots.lease(SlotRef("m/0", slot))
        v.sessions.ran_here((session, "m"), Binding("a", SlotRef("m/0", slot), 100, 1))
        v.slots.release(lease)
    assert choose(v, ask(), NOW) == Local(SlotRef("m/0", 2))
    v.slots.lease(SlotRef("m/0", 2))
    assert choose(v, ask(), NOW) == Local(SlotRef("m/0", 1))


def test_the_backend_with_most_room_comes_first():
    v = view(local=2)
    v.slots.put_backend("m/1", model="m", url="http://f", n_slots=2, routable=True)
    v.slots.lease(SlotRef("m/0", 1))
    assert choose(v, ask(), NOW) == Local(SlotRef("m/1", 0))


def test_a_request_without_need_of_a_slot_runs_on_a_full_backend():
    v = view(local=1)
    v.slots.lease(SlotRef("m/0", 0))
    assert choose(v, ask(needs_slot=False), NOW) == LocalUnslotted("m/0")
    full_peer = view(local=None, peers={"b": 0})
    assert choose(full_peer, ask(needs_slot=False), NOW) == Forward("b")


def measured(v: View, **nodes: tuple[int, Perf]) -> View:
    """Peers with so many free slots and this speed."""
    for name, (free, perf) in nodes.items():
        v.peers.put(name, f"http://{name}")
        entry = ModelCapacity("m", slots=free + 1, busy=1, backends=1, healthy_backends=1, perf=perf)
        v.peers.reported(name, PeerReport(CapacityReport(name, "1", (entry,)), NOW, NOW, 0.001))
    return v


FAST, SLOW = Perf(100.0, 1000.0), Perf(100.0, 9000.0)


def test_a_long_prompt_goes_to_the_faster_peer():
    v = replace(measured(view(), b=(1, FAST)), perf=lambda model, now: SLOW)
    assert choose(v, ask(body_bytes=40_000), NOW) == Forward("b")
    assert choose(v, ask(body_bytes=4), NOW) == Local(SlotRef("m/0", 0))


def test_the_estimate_of_the_prompt_follows_what_answers_told_of_the_model():
    v = replace(measured(view(), b=(1, FAST)), perf=lambda model, now: Perf(100.0, 1400.0))
    decided = decide(v, ask(body_bytes=4000), Terms(NOW))
    assert decided.question.n_tokens == 1000
    for _ in range(60):
        v.sizes.learn("m", 8000, Usage(1000, 0, 1))
    assert decide(v, ask(body_bytes=4000), Terms(NOW)).question.n_tokens == pytest.approx(500, abs=2)


def test_a_turn_waits_here_for_its_own_full_node_and_at_a_peer_for_that_one():
    held = {"a": Held(9000, "slot")}
    v = replace(measured(view(local=0), b=(1, FAST)), perf=lambda model, now: FAST, held=lambda ask: held)
    v.slots.put_backend("m/0", model="m", url="http://e", n_slots=1, routable=True)
    v.slots.lease(SlotRef("m/0", 0))
    turn = ask(session="s", body_bytes=40_000)
    waits = choose(v, turn, NOW, budget_ms=20_000.0)
    assert isinstance(waits, Wait) and not waits.full and waits.hold_ms == pytest.approx(9001, abs=2)
    assert choose(v, turn, NOW, budget_ms=20_000.0, waited_ms=9002.0) == Forward("b")
    elsewhere = replace(
        measured(view(), b=(0, FAST)),
        perf=lambda model, now: FAST,
        held=lambda ask: {"b": Held(9000, "slot")},
    )
    assert choose(elsewhere, turn, NOW, budget_ms=20_000.0) == Forward("b", 8999)


def test_a_pinned_host_that_does_not_serve_the_model_is_refused_with_both_names():
    v = view(peers={"b": 1})
    for name in ("z", "b.example"):
        decision = choose(v, ask(pin=name), NOW)
        assert isinstance(decision, Refuse) and decision.error is UnknownModel
        assert repr(name) in decision.message and "'m'" in decision.message
    assert choose(v, ask(pin="b"), NOW) == Forward("b")
    assert choose(v, ask(pin="a"), NOW) == Local(SlotRef("m/0", 0))
    not_here = choose(view(local=None, peers={"b": 1}), ask(pin="a"), NOW)
    assert isinstance(not_here, Refuse) and not_here.error is UnknownModel


def test_a_full_or_stale_pinned_host_is_waited_for():
    assert choose(view(peers={"b": 0}), ask(pin="b"), NOW) == Wait(served=True)
    assert choose(view(peers={"b": 1}, asked_at=NOW - 9), ask(pin="b"), NOW) == Wait(served=True)


def test_a_pin_and_a_preference_hold_for_requests_without_need_of_a_slot_too():
    v = view(peers={"b": 0})
    assert choose(v, ask(needs_slot=False, pin="b"), NOW) == Forward("b")
    assert choose(v, ask(needs_slot=False), NOW) == LocalUnslotted("m/0")


def test_a_node_whose_requests_fail_stands_behind_the_others_until_its_back_off_is_over():
    v = view(peers={"b": 9, "c": 1})
    for _ in range(2):
        v.failures.failed("a", "m", NOW)
        v.failures.failed("b", "m", NOW)
    assert choose(v, ask(), NOW) == Forward("c")
    assert choose(v, ask(needs_slot=False), NOW) == Forward("c")
    assert choose(v, ask(), NOW + 2.1) == Local(SlotRef("m/0", 0))


def test_a_forward_that_may_wait_does_so_unless_nothing_here_serves():
    v = view(local=1)
    v.slots.lease(SlotRef("m/0", 0))
    assert choose(v, ask(forwarded_by="b", wait_ms=500), NOW) == Wait(served=True)
    down = choose(view(local=0), ask(forwarded_by="b", wait_ms=0), NOW)
    assert isinstance(down, Refuse) and down.error is NoFreeSlot
    v.slots.put_backend("m/0", model="m", url="http://e", n_slots=1, routable=False)
    down = choose(v, ask(forwarded_by="b", wait_ms=500), NOW)
    assert isinstance(down, Refuse) and down.error is NoFreeSlot


def test_of_very_many_hosts_those_that_hold_the_prompt_and_have_room_are_compared():
    v = view(local=1, peers={f"p{n:03}": n % 7 for n in range(200)})
    v = replace(v, held=lambda ask: {"p000": Held(5, "slot")})
    question = decide(v, ask(session="s"), Terms(NOW)).question
    names = [c.node for c in question.candidates]
    assert len(names) == CANDIDATES_MAX and names[0] == "a" and "p000" in names
    assert all(c.free >= 5 for c in question.candidates if c.node not in ("a", "p000"))


def test_without_performance_a_session_stays_with_its_entry_node():
    v = replace(
        measured(view(), b=(1, FAST)),
        perf=lambda model, now: SLOW,
        held=lambda ask: {"b": Held(9000, "slot")},
        policy=Policy(performance=False),
    )
    assert choose(v, ask(session="s", body_bytes=40_000), NOW) == Local(SlotRef("m/0", 0))


@given(
    st.integers(0, 2) | st.none(),
    st.dictionaries(st.sampled_from("bcdef"), st.tuples(st.integers(0, 2), st.booleans(), st.booleans())),
    st.sets(st.sampled_from("abcdef")),
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
)
def test_a_request_goes_only_where_there_is_a_slot_or_a_peer_with_room(local, peers, exclude, sticky, draw):
    v = view(local=local)
    for name, (free, is_fresh, serves) in peers.items():
        v.peers.put(name, "http://x")
        entry = ModelCapacity("m", slots=free, backends=1, healthy_backends=int(serves), perf=FAST)
        at = NOW if is_fresh else NOW - 5
        v.peers.reported(name, PeerReport(CapacityReport(name, "1", (entry,)), at, at))
    turn = ask(session="s" if sticky else None, body_bytes=9000)
    decision = choose(v, turn, NOW, exclude, draws=(draw, draw))
    match decision:
        case Local(ref):
            assert "a" not in exclude and v.slots.is_free(ref)
        case Forward(node):
            free, is_fresh, serves = peers[node]
            assert node not in exclude and free > 0 and is_fresh and serves
        case Wait():
            assert not (local and "a" not in exclude)
            assert not any(f and fresh and s and n not in exclude for n, (f, fresh, s) in peers.items())
        case Refuse():
            assert local is None and not peers


def test_a_forward_that_ends_frees_its_slot_before_the_next_report():
    v = view(local=0, peers={"b": 1}, asked_at=NOW - 2)
    number = v.peers.forward_started("b", "m", NOW - 1)
    report(v.peers, "b", 0, NOW - 0.5)
    assert isinstance(choose(v, ask(), NOW), Wait)
    v.peers.forward_ended("b", number)
    assert choose(v, ask(), NOW) == Forward("b")
    v.peers.forward_started("b", "m", NOW)
    assert isinstance(choose(v, ask(), NOW), Wait)


def test_forwards_that_end_never_free_more_slots_than_a_peer_has():
    v = view(local=0, peers={"b": 1}, asked_at=NOW - 2)
    numbers = [v.peers.forward_started("b", "m", NOW - 1.5) for _ in range(3)]
    report(v.peers, "b", 1, NOW - 0.5)
    for number in numbers:
        v.peers.forward_ended("b", number)
    (peer,) = v.peers.candidates("m", NOW)
    assert peer.free == 1
