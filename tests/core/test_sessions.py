from __future__ import annotations

from viiwork.core.sessions import Binding, SessionTable
from viiwork.core.slots import SlotRef

S, T = ("s", "m"), ("t", "m")
SLOT, OTHER = SlotRef("m/0", 0), SlotRef("m/0", 1)


def bound(generation: int = 1, ref: SlotRef = SLOT) -> Binding:
    return Binding("a", ref, 100, generation)


def test_another_sessions_turn_in_the_slot_ends_the_binding():
    table = SessionTable()
    table.ran_here(S, bound())
    table.taken(SLOT, T)
    assert table.get(S) is None and table.occupant(SLOT) is None


def test_a_turn_without_a_session_ends_the_binding_too():
    table = SessionTable()
    table.ran_here(S, bound())
    table.taken(SLOT, None)
    assert table.get(S) is None


def test_the_sessions_own_next_turn_keeps_the_binding():
    table = SessionTable()
    table.ran_here(S, bound())
    table.taken(SLOT, S)
    assert table.get(S) == bound()


def test_a_session_that_moved_to_another_slot_leaves_the_old_one():
    table = SessionTable()
    table.ran_here(S, bound())
    table.ran_here(S, bound(2, OTHER))
    assert table.occupant(SLOT) is None and table.occupant(OTHER) == S


def test_an_engine_restart_forgets_what_its_slots_held():
    table = SessionTable()
    table.ran_here(S, bound())
    table.ran_here(T, bound(ref=SlotRef("n/0", 0)))
    table.engine_restarted("m/0")
    assert table.get(S) is None and table.get(T) is not None


def test_a_turn_on_another_node_keeps_what_a_slot_here_still_holds():
    table = SessionTable()
    table.ran_here(S, bound())
    table.ran_elsewhere(S, "b", 5)
    assert table.get(S) == Binding("b", SLOT, 100, 1)


def test_a_node_that_left_is_nobodys_home():
    table = SessionTable()
    table.ran_elsewhere(S, "b", 5)
    table.ran_here(T, bound())
    table.ran_elsewhere(T, "b", 5)
    table.node_gone("b")
    assert table.get(S) is None and table.get(T) == Binding("", SLOT, 100, 1)


def test_generations_grow_whatever_the_clock_says():
    table = SessionTable()
    table.ran_here(S, bound(generation=1000))
    assert table.next_generation(S, wall_ms=5) == 1001
    assert table.next_generation(S, wall_ms=9000) == 9000


def test_the_table_forgets_the_session_unused_longest():
    table = SessionTable(limit=2)
    for number in range(3):
        table.ran_here((str(number), "m"), bound(ref=SlotRef("m/0", number)))
    assert len(table) == 2 and table.get(("0", "m")) is None
    assert table.occupant(SlotRef("m/0", 0)) is None
