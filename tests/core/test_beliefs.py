from __future__ import annotations

import pytest

from viiwork.core.beliefs import Beliefs, Told
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef

REF = SlotRef("m/0", 1)
SEEN = Told(3, 17, 600)


def held(generation: int = 5, n_tokens: int = 600) -> Binding:
    return Binding("a", REF, n_tokens, generation)


@pytest.mark.parametrize(
    "now",
    [
        Told(4, 17, 600),  # another process
        Told(3, 18, 600),  # another task, of the same length
        Told(3, 17, 0),  # erased, or cleared
        Told(3, 17, 601),
        Told(3, None, None),  # no task ran there
    ],
)
def test_a_slot_that_looks_otherwise_than_after_its_turn_does_not_hold_it(now: Told):
    beliefs = Beliefs()
    beliefs.put(REF, 5, SEEN)
    assert beliefs.holds(held(), SEEN)
    assert not beliefs.holds(held(), now)


def test_a_turn_whose_slot_was_not_seen_is_judged_by_its_length():
    beliefs = Beliefs()
    beliefs.put(REF, 4, SEEN)  # of the turn before
    assert beliefs.holds(held(n_tokens=700), Told(3, 18, 700))
    assert beliefs.holds(held(n_tokens=700), Told(3, 18, 701)), "with its last token"
    assert not beliefs.holds(held(n_tokens=700), Told(3, 19, 650))
    assert beliefs.holds(held(n_tokens=0), Told(3, 19, 650)), "nobody counted"


def test_what_lies_in_no_slot_is_not_held():
    assert not Beliefs().holds(Binding("a", None, 600, 5), SEEN)


def test_a_backend_that_is_gone_is_forgotten():
    beliefs = Beliefs()
    beliefs.put(REF, 5, SEEN)
    beliefs.forget_backend("m/0")
    assert beliefs.holds(held(), Told(3, 99, 600))
