from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.manners import Manners, StallBudget, debounce_s
from viiwork.limits import KV_DEBOUNCE_S, KV_DEBOUNCE_TOKENS, KV_STALL_WINDOW_S

SHARE = 0.05


def test_an_engine_nobody_has_measured_may_be_saved_at_once():
    manners = Manners(SHARE)
    assert manners.wait_s("m/0", 10**6, 0.0) == 0.0 and manners.save_s("m/0", 1000) is None


def test_a_save_waits_until_its_stall_is_paid_for():
    budget = StallBudget(SHARE, 0.0)
    budget.charge(budget.most_s, 0.0)
    assert budget.wait_s(0.5, 0.0) == 0.5 / SHARE
    assert budget.wait_s(0.5, 4.0) == pytest.approx(0.5 / SHARE - 4.0)
    assert budget.wait_s(0.5, 10.0) == 0.0


def test_a_save_longer_than_the_bucket_runs_when_the_bucket_is_full():
    budget = StallBudget(SHARE, 0.0)
    assert budget.wait_s(100.0, 0.0) == 0.0
    budget.charge(100.0, 0.0)
    assert budget.wait_s(100.0, 0.0) == 100.0 / SHARE


def test_restores_are_paid_for_by_the_saves_that_follow():
    manners = Manners(SHARE)
    manners.saved("m/0", 1000, 0.1, 0.0)
    assert manners.wait_s("m/0", 1000, 0.0) == 0.0
    manners.restored("m/0", SHARE * KV_STALL_WINDOW_S, 0.0)
    assert manners.wait_s("m/0", 1000, 0.0) > 0.0
    assert manners.wait_s("m/1", 1000, 0.0) == 0.0, "each engine has its own"


def test_the_length_of_a_save_is_learned_per_token():
    manners = Manners(SHARE)
    manners.saved("m/0", 1000, 0.1, 0.0)
    assert manners.save_s("m/0", 5000) == 0.5
    manners.saved("m/0", 1000, 0.2, 0.0)
    assert 0.1 < (manners.save_s("m/0", 1000) or 0.0) < 0.2
    manners.forget("m/0")
    assert manners.save_s("m/0", 1000) is None


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.001, 2.0)), min_size=1, max_size=60))
def test_saves_that_wait_for_the_budget_never_stop_an_engine_for_more_than_its_share(
    wishes: list[tuple[float, float]],
):
    manners, now, stalls = Manners(SHARE), 0.0, []
    for pause_s, stall_s in wishes:
        now += pause_s
        now += manners.wait_s("m/0", round(stall_s * 1000), now)
        manners.saved("m/0", round(stall_s * 1000) or 1, stall_s, now)
        stalls.append((now, stall_s))
    # The bucket's content, one save whose length was not known, and what the rate was misjudged by.
    room_s = SHARE * KV_STALL_WINDOW_S + 2 * max(stall_s for _, stall_s in stalls)
    for i, (begin, _) in enumerate(stalls):
        spent_s = sum(stall_s for _, stall_s in stalls[i:])
        assert spent_s <= SHARE * (stalls[-1][0] - begin) + room_s + 1e-6


def test_what_is_shown_fades_and_sums():
    manners = Manners(SHARE)
    manners.saved("m/0", 1000, 1.5, 0.0)
    manners.restored("m/0", 1.5, 0.0)
    manners.put_off("queue")
    shown = manners.as_json(0.0)
    assert shown["share"] == {"m/0": 0.05}
    assert shown["put_off"] == {"queue": 1} and shown["share_limit"] == SHARE
    assert manners.as_json(10 * KV_STALL_WINDOW_S)["share"]["m/0"] < 0.0001


def test_quick_short_turns_wait_for_each_other_and_long_ones_do_not():
    assert debounce_s(0.5, 10) == KV_DEBOUNCE_S - 0.5
    assert debounce_s(0.5, KV_DEBOUNCE_TOKENS) == 0.0
    assert debounce_s(float("inf"), 10) == 0.0 == debounce_s(KV_DEBOUNCE_S, 10)
