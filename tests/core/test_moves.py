from __future__ import annotations

import pytest

from viiwork.core.moves import Turn, cause_of, home_of
from viiwork.core.replicas import Replica
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef

SLOT = SlotRef("m/0", 0)


def replica(generation: int, source: str = "b") -> Replica:
    return Replica("r", ("s", "m"), 100, 1, generation, source)


@pytest.mark.parametrize(
    ("binding", "replicas", "at_peers", "home"),
    [
        (None, [], [], ""),
        (Binding("a", SLOT, 100, 5), [], [], "a"),
        (Binding("a", SLOT, 100, 5), [replica(4)], [("c", 3)], "a"),
        (Binding("a", SLOT, 100, 5), [replica(6)], [], "b"),
        (Binding("a", SLOT, 100, 5), [replica(5)], [("c", 5)], "a"),  # copies of the state made here
        (Binding("a", SLOT, 100, 5), [replica(6)], [("c", 7)], "c"),
        (Binding("b", SLOT, 100, 5), [], [], "b"),  # an old state is here, and the newest turn ran there
        (Binding("b", None, 100, 5), [], [("c", 5)], "b"),
        (Binding("", SLOT, 100, 5), [], [], "a"),  # its home left the mesh
        (None, [replica(6)], [], "b"),
    ],
)
def test_the_home_of_a_session_is_where_its_newest_turn_ran(binding, replicas, at_peers, home):
    assert home_of("a", binding, replicas, at_peers) == home


@pytest.mark.parametrize(
    ("turn", "cached", "cause"),
    [
        (Turn("b"), 0, "no_replica"),
        (Turn("b", cause="not_worth_it"), 0, "not_worth_it"),
        (Turn("b", n_restored=500), 500, "long_prompt"),
        (Turn("b", n_restored=500, is_behind=True), 500, "replica_behind"),
        (Turn("b", n_restored=500, is_behind=True), 100, "diverged"),
        (Turn("b", n_restored=500), 100, "diverged"),
        (Turn("b", n_restored=500), 0, "no_reuse"),
        (Turn("b", n_restored=500, is_prefix=False), 0, "diverged"),
        (Turn("b", n_held=500), 0, "evicted"),
        (
            Turn("b", n_held=18, is_prefix=False),
            14,
            "diverged",
        ),  # compacted: only its head is right
        (Turn("b", n_held=18, is_prefix=False), 18, "diverged"),
        (Turn("b", n_held=500), 499, "long_prompt"),
    ],
)
def test_a_turn_that_is_not_warm_has_a_cause(turn: Turn, cached: int, cause: str):
    assert cause_of(turn, cached) == cause
