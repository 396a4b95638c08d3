from __future__ import annotations

import pytest

from viiwork.core.stalls import Running, StallWatch


def watch_idle_since(at: float) -> StallWatch:
    watch = StallWatch(10.0, 1.0)
    watch.looked("m/0", 0, 5.0, False, at - 1)
    watch.looked("m/0", 0, 5.0, False, at)
    return watch


def request(since: float = 0.0, answered: bool = False, backend: str = "m/0") -> Running:
    return Running("r", backend, since, answered)


def test_an_unanswered_request_on_an_idle_engine_is_lost_after_the_limit():
    watch = watch_idle_since(1.0)
    assert watch.lost([request()], 10.9) == []
    assert watch.lost([request()], 11.0) == ["r"]


def test_a_younger_request_is_given_its_time():
    assert watch_idle_since(0.0).lost([request(since=5.0)], 14.0) == []


def test_an_answered_request_is_never_lost_however_slowly_its_client_reads():
    watch = watch_idle_since(0.0)
    assert watch.lost([request(answered=True)], 1000.0) == []
    watch.looked("m/0", None, 5.0, True, 1001.0)
    assert watch.lost([request(answered=True)], 2000.0) == []


@pytest.mark.parametrize(("busy", "cpu_s"), [(1, 5.0), (None, 5.0), (0, 10.0), (0, None)])
def test_an_engine_that_works_or_does_not_say_starts_the_clock_anew(busy: int | None, cpu_s: float | None):
    """A busy slot, or CPU time used up without one, as when a long prompt is tokenized."""
    watch = watch_idle_since(0.0)
    watch.looked("m/0", busy, cpu_s, False, 9.0)
    assert watch.lost([request()], 20.0) == []
    watch.looked("m/0", 0, 20.0, False, 12.0)
    watch.looked("m/0", 0, 20.1, False, 13.0)
    assert watch.lost([request()], 22.9) == []
    assert watch.lost([request()], 23.0) == ["r"]


def test_another_backends_idleness_is_no_sign():
    assert watch_idle_since(0.0).lost([request(backend="m/1")], 100.0) == []


def test_a_silent_engine_has_lost_what_it_has_not_begun_at_the_second_look():
    watch = StallWatch(10.0, 1.0)
    watch.looked("m/0", 1, 5.0, True, 7.0)
    assert watch.lost([request(), request(backend="m/1")], 7.0) == []
    watch.looked("m/0", None, 5.0, True, 8.0)
    assert watch.lost([request(), request(backend="m/1")], 8.0) == ["r"]


def test_an_engine_heard_again_keeps_its_requests():
    watch = StallWatch(10.0, 1.0)
    watch.looked("m/0", 1, 5.0, True, 7.0)
    watch.looked("m/0", 1, 6.0, False, 8.0)
    assert watch.lost([request()], 8.0) == []


def test_a_backend_that_is_gone_leaves_nothing_to_the_next_of_its_name():
    watch = watch_idle_since(0.0)
    watch.looked("m/0", 0, 5.0, True, 1.0)
    watch.forget("m/0")
    watch.looked("m/0", 0, 5.0, False, 50.0)
    assert watch.lost([request()], 50.0) == []
