from __future__ import annotations

from viiwork.core.failures import FailureMarks
from viiwork.limits import FAILING_BACKOFF_MAX_S


def failing(n: int, now: float = 0.0) -> FailureMarks:
    marks = FailureMarks()
    for _ in range(n):
        marks.failed("b", "m", now)
    return marks


def test_one_failure_may_be_an_accident_and_two_in_a_row_set_a_node_back():
    assert not failing(1).is_failing("b", "m", 0.0)
    marks = failing(2)
    assert marks.is_failing("b", "m", 1.9)
    assert not marks.is_failing("b", "other", 1.9) and not marks.is_failing("c", "m", 1.9)


def test_a_success_between_two_failures_makes_both_accidents():
    marks = failing(1)
    assert not marks.succeeded("b", "m")
    assert not marks.failed("b", "m", 0.0)
    assert not marks.is_failing("b", "m", 0.0)


def test_after_the_back_off_one_request_tries_the_node_and_the_others_wait_for_how_it_ends():
    marks = failing(2)
    assert not marks.is_failing("b", "m", 2.0)
    marks.granted("b", "m", 2.0)
    assert marks.is_failing("b", "m", 2.1)
    assert marks.succeeded("b", "m")
    assert not marks.is_failing("b", "m", 2.2)


def test_each_failed_trial_doubles_the_back_off_up_to_its_limit():
    marks, now, waits = failing(2), 0.0, []
    for _ in range(7):
        begun = now
        while marks.is_failing("b", "m", now):
            now += 0.5
        waits.append(now - begun)
        marks.granted("b", "m", now)
        assert marks.failed("b", "m", now)
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0] and waits[-1] == FAILING_BACKOFF_MAX_S


def test_requests_that_were_under_way_when_the_back_off_began_do_not_prolong_it():
    marks = failing(50)
    assert marks.is_failing("b", "m", 1.9) and not marks.is_failing("b", "m", 2.0)


def test_a_trial_whose_client_leaves_is_followed_by_another():
    marks = failing(2)
    marks.granted("b", "m", 2.0)
    assert not marks.is_failing("b", "m", 4.0)
