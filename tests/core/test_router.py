from __future__ import annotations

from dataclasses import replace

from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.core.peers import PeerTable
from viiwork.core.router import Forward, Local, LocalUnslotted, Refuse, View, Wait, choose
from viiwork.core.sessions import Binding, SessionTable
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.turn import Ask, Held
from viiwork.errors import NoFreeSlot, NotServedHere, UnknownModel

NOW = 100.0


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
    assert choose(view(local=0, peers={"b": 0}), ask(), NOW) == Wait(served=True)


def test_a_stale_peer_is_unknown_and_not_routed_to():
    v = view(local=None, peers={"b": 5}, asked_at=NOW - 4)
    assert choose(v, ask(), NOW) == Wait(served=False)


def test_a_report_exactly_as_old_as_the_limit_is_stale():
    v = view(local=None)
    v.peers.put("b", "http://b")
    entry = ModelCapacity("m", slots=1, backends=1, healthy_backends=1)
    v.peers.reported("b", PeerReport(CapacityReport("b", "1", (entry,)), NOW - 3, NOW - 3))
    assert choose(v, ask(), NOW) == Wait(served=False)


def test_forwards_begun_since_the_report_was_asked_for_are_subtracted():
    v = view(local=None, peers={"b": 1})
    v.peers.forward_started("b", "m", NOW - 0.1)
    assert choose(v, ask(), NOW) == Wait(served=True)


def test_forwards_begun_before_the_question_are_in_the_report_already():
    v = view(local=None, peers={"b": 1}, asked_at=NOW - 0.1)
    v.peers.forward_started("b", "m", NOW - 0.2)
    assert choose(v, ask(), NOW) == Forward("b")


def test_a_refusal_counts_until_a_report_asked_for_after_it():
    v = view(local=None, peers={"b": 2})
    v.peers.refused("b", "m", NOW)
    assert choose(v, ask(), NOW) == Wait(served=True)
    report(v.peers, "b", 2, NOW - 0.1)  # was under way when the refusal came
    assert choose(v, ask(), NOW) == Wait(served=True)
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
    assert choose(v, ask(), NOW, {"a", "b", "c"}) == Wait(served=True)


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
