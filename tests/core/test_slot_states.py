from __future__ import annotations

from viiwork.core.sessions import Binding
from viiwork.core.slot_states import Kept, SlotStates
from viiwork.core.slots import SlotRef
from viiwork.limits import KV_MARKS_MAX

KEY, OTHER = ("s", "m"), ("t", "m")
SLOT, NEXT = SlotRef("m/0", 0), SlotRef("m/0", 1)


def binding(n_tokens: int, generation: int, ref: SlotRef = SLOT) -> Binding:
    return Binding("a", ref, n_tokens, generation)


def saved(*turns: tuple[int, int | None]) -> SlotStates:
    """Turns of (tokens, cached), each saved after it: generations 1, 2, ..."""
    states = SlotStates()
    for generation, (n_tokens, cached) in enumerate(turns, 1):
        states.ran(KEY, binding(n_tokens, generation), cached, shared=True)
        states.saved(SLOT, generation, "a", n_tokens, now=float(generation))
    return states


def kept(states: SlotStates, ref: SlotRef = SLOT) -> list[tuple[int, int]]:
    state = states.get(ref)
    return [(mark.generation, mark.keep) for mark in state.kept] if state is not None else []


def test_a_turn_lowers_the_marks_of_all_earlier_saves_to_the_rows_it_kept():
    states = saved((1000, 0), (1500, 990))
    states.ran(KEY, binding(1600, 3), 1490, shared=True)
    assert kept(states) == [(1, 990), (2, 1490)]
    states.ran(KEY, binding(1300, 4), 700, shared=True)  # the client edited an earlier message
    assert kept(states) == [(1, 700), (2, 700)]
    states.ran(KEY, binding(2000, 5), 1300, shared=True)
    assert kept(states) == [(1, 700), (2, 700)], "what was overwritten does not come back"


def test_turns_between_two_saves_count_each():
    states = saved((1000, 0))
    for generation, cached in enumerate((1000, 400, 900), 2):
        states.ran(KEY, binding(1200, generation), cached, shared=True)
    assert kept(states) == [(1, 400)]


def test_a_turn_that_reused_nothing_or_does_not_say_leaves_no_mark():
    for cached in (0, None):
        states = saved((1000, 0))
        states.ran(KEY, binding(1200, 2), cached, shared=True)
        assert kept(states) == []


def test_another_session_in_the_slot_leaves_no_mark():
    states = saved((1000, 0))
    states.ran(OTHER, binding(500, 2), 24, shared=True)
    states.ran(KEY, binding(1200, 3), 1000, shared=True)  # from the engine's RAM, or read anew: who knows
    assert kept(states) == []


def test_a_session_that_changes_its_slot_leaves_its_marks_behind():
    states = saved((1000, 0))
    states.ran(KEY, binding(1200, 2, NEXT), 1000, shared=True)
    assert states.get(SLOT) is None and kept(states, NEXT) == []


def test_a_restored_slot_holds_what_the_replica_holds_and_what_that_kept_of_earlier_ones():
    states = saved((1000, 0))
    states.restored(KEY, binding(1400, 7), (Kept(1, "a", 950), Kept(7, "b", 1400)))
    assert kept(states) == [(1, 950), (7, 1400)]
    states.ran(KEY, binding(1600, 8), 1390, shared=True)
    assert kept(states) == [(1, 950), (7, 1390)]
    states.restored(KEY, binding(600, 7), (Kept(1, "a", 950), Kept(7, "b", 1400)))  # rendered for a part
    assert kept(states) == [(1, 600), (7, 600)]


def test_an_engine_that_started_anew_and_a_turn_that_ended_badly_leave_nothing():
    states = saved((1000, 0))
    states.unknown(SLOT)
    assert states.get(SLOT) is None
    states = saved((1000, 0))
    states.ran(OTHER, binding(500, 2, SlotRef("m/1", 0)), 0, shared=True)
    states.backend_unknown("m/0")
    assert [state.key for state in states.newest_first()] == [OTHER]


def test_new_tokens_are_those_the_newest_save_does_not_hold():
    states = saved((1000, 0))
    state = states.get(SLOT)
    assert state is not None and state.new_tokens == 0
    states.ran(KEY, binding(1100, 2), 900, shared=True)
    state = states.get(SLOT)
    assert state is not None and (state.new_tokens, state.saved_at) == (200, 1.0)


def test_no_more_marks_are_kept_than_an_offer_takes():
    states = saved(*((1000 + n, 1000 + n - 1) for n in range(2 * KV_MARKS_MAX)))
    assert len(kept(states)) == KV_MARKS_MAX - 1, "the offer marks itself too"
    assert kept(states)[-1][0] == 2 * KV_MARKS_MAX


def test_the_newest_sessions_come_first():
    states = SlotStates()
    for generation, ref in ((3, SLOT), (9, NEXT), (5, SlotRef("m/1", 0))):
        states.ran((f"s{generation}", "m"), binding(10, generation, ref), 0, shared=True)
    assert [state.binding.generation for state in states.newest_first()] == [9, 5, 3]
