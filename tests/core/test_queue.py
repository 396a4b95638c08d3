from __future__ import annotations

import pytest

from viiwork.core.queue import WaitQueue
from viiwork.core.turn import Ask
from viiwork.errors import QueueFull


def names(queue: WaitQueue, decide) -> list[str]:
    return [waiter.ask.request_id for waiter, _ in queue.runnable(decide)]


def test_waiters_leave_in_the_order_they_came():
    queue = WaitQueue(8)
    for name in "abc":
        queue.enter(Ask(name, "m"), 0.0, 20.0)
    assert names(queue, lambda w: True) == ["a", "b", "c"]
    assert queue.depth("m") == 0


def test_one_that_cannot_run_does_not_hold_up_those_behind_it():
    queue = WaitQueue(8)
    for name in "abc":
        queue.enter(Ask(name, "m"), 0.0, 20.0)
    assert names(queue, lambda w: True if w.ask.request_id != "a" else None) == ["b", "c"]
    assert queue.depth("m") == 1


def test_each_model_has_its_own_queue_and_limit():
    queue = WaitQueue(1)
    queue.enter(Ask("a", "m"), 0.0, 20.0)
    queue.enter(Ask("b", "n"), 0.0, 20.0)
    with pytest.raises(QueueFull):
        queue.enter(Ask("c", "m"), 0.0, 20.0)


def test_a_queue_of_no_length_refuses_at_once_and_remembers_nothing():
    queue = WaitQueue(0)
    with pytest.raises(QueueFull):
        queue.enter(Ask("a", "m"), 0.0, 20.0)
    assert queue.depth("m") == 0


def test_one_that_comes_back_gets_its_place_back_even_in_a_queue_that_filled_up_meanwhile():
    queue = WaitQueue(3)
    queue.enter(Ask("older", "m"), 0.0, 20.0)
    back = queue.enter(Ask("back", "m"), 1.0, 20.0)
    queue.enter(Ask("younger", "m"), 2.0, 20.0)
    queue.leave(back)
    queue.enter(Ask("youngest", "m"), 3.0, 20.0)
    queue.enter(Ask("back", "m"), 4.0, 17.0, earlier_s=2.0, arrived_at=1.0)
    with pytest.raises(QueueFull):
        queue.enter(Ask("new", "m"), 4.0, 20.0)
    assert names(queue, lambda w: True) == ["older", "back", "younger", "youngest"]


def test_leaving_twice_does_no_harm():
    queue = WaitQueue(1)
    waiter = queue.enter(Ask("a", "m"), 0.0, 20.0)
    queue.leave(waiter)
    queue.leave(waiter)
    assert queue.depth("m") == 0
