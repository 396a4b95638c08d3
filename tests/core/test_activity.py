from __future__ import annotations

import msgspec

from viiwork.core.activity import (
    ActivityLog,
    Event,
    end_text,
    is_end_text,
    request_text,
)
from viiwork.limits import ACTIVITY_BUFFER_EVENTS, ACTIVITY_FOLLOWERS_MAX, ACTIVITY_REPLAY_MS


def event(t: int, message: str = "m → m/0", rid: str = "r") -> Event:
    return Event(t, "request", message, rid=rid)


def nothing() -> None:
    return None


def test_the_ring_keeps_the_newest_events():
    log = ActivityLog(3)
    for t in range(5):
        log.emit(event(t))
    assert [e.t for e in log.events()] == [2, 3, 4]


def test_a_newcomer_sees_the_last_while_and_every_request_that_has_not_ended():
    log = ActivityLog(100)
    now = 10 * ACTIVITY_REPLAY_MS
    log.emit(event(1, rid="open"))
    log.emit(event(2, rid="closed"))
    log.emit(event(3, rid="closed"), is_end=True)
    log.emit(Event(4, "system", "old news"))
    log.emit(event(now - ACTIVITY_REPLAY_MS, rid="late"))
    log.emit(event(now, rid="late"), is_end=True)
    seen = list(log.replay(now))
    assert [(e.rid, e.replay) for e in seen] == [("open", True), ("late", True), ("late", True)]
    assert not any(e.replay for e in log.events())


def test_a_slow_follower_skips_events_and_holds_nobody_up():
    log = ActivityLog(1000)
    slow, quick = log.follow(nothing), log.follow(nothing)
    for t in range(ACTIVITY_BUFFER_EVENTS + 5):
        log.emit(event(t))
        quick.take()
    assert [e.t for e in slow.take()] == list(range(ACTIVITY_BUFFER_EVENTS))
    assert (slow.n_skipped, quick.n_skipped) == (5, 0)
    log.emit(event(99))
    assert [e.t for e in slow.take()] == [99]


def test_one_follower_too_many_sends_the_oldest_away_and_wakes_it():
    log, woken = ActivityLog(10), []
    oldest = log.follow(lambda: woken.append("oldest"))
    others = [log.follow(nothing) for _ in range(ACTIVITY_FOLLOWERS_MAX)]
    assert oldest.evicted and woken == ["oldest"]
    log.emit(event(1))
    assert not oldest.take() and all(one.take() and not one.evicted for one in others)
    log.leave(oldest)
    log.close()
    assert all(one.evicted for one in others)


def test_an_event_shows_only_what_it_has():
    assert msgspec.json.decode(msgspec.json.encode(Event(1, "system", "x"))) == {
        "t": 1,
        "type": "system",
        "message": "x",
    }


def test_messages_of_requests_follow_the_grammar():
    begun = request_text("m", "peer b")
    assert begun == "m \N{RIGHTWARDS ARROW} peer b" and not is_end_text(begun)
    assert end_text(begun, aborted=None, took_s=0.25) == f"{begun} done (250ms)"
    assert end_text(begun, aborted="client", took_s=12.34) == f"{begun} aborted by client (12.3s)"
    assert is_end_text(end_text(begun, aborted="", took_s=1)) and is_end_text(f"{begun} finished")
    assert not is_end_text(request_text("well done", "m/0"))
