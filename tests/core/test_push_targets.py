from __future__ import annotations

from dataclasses import replace

from viiwork.core.affinity import rendezvous
from viiwork.core.capacity import KvIdentity, ModelCapacity
from viiwork.core.push_targets import PushTargets
from viiwork.limits import KV_FULL_LONG_S, KV_PEER_BACKOFF_MAX_S, KV_PEER_BACKOFF_S, SESSIONS_MAX

IDENTITY = KvIdentity("f" * 64, "4:x", "f16", "f16", False, 4096)
KEY = ("s", "m")


def entry(**changes: object) -> ModelCapacity:
    made = ModelCapacity("m", slots=2, backends=1, healthy_backends=1, kv=IDENTITY)
    return replace(made, **changes)  # type: ignore[arg-type]


PEERS = [(node, entry()) for node in "bcd"]
ORDER = rendezvous("s", list("bcd"))


def order(book: PushTargets, peers: list[tuple[str, ModelCapacity]] = PEERS, now: float = 0.0) -> list[str]:
    return book.order(KEY, IDENTITY, 100, peers, now)


def test_the_host_that_would_run_the_next_turn_comes_first():
    assert order(PushTargets()) == ORDER
    assert order(PushTargets(), [("b", entry(kv=None)), ("c", entry())]) == ["c"]
    assert PushTargets().order(KEY, None, 100, PEERS, 0.0) == []


def test_a_peer_that_failed_rests_twice_as_long_each_time():
    book = PushTargets()
    first, pause_s, now = ORDER[0], KV_PEER_BACKOFF_S, 0.0
    for _ in range(10):
        book.failed(first, now)
        assert first not in order(book, now=now + pause_s * 0.99)
        assert book.try_again_s(ORDER, now) == pause_s
        now += pause_s
        assert order(book, now=now) == ORDER
        pause_s = min(2 * pause_s, KV_PEER_BACKOFF_MAX_S)
    book.sent(KEY, first, 1, now)
    book.failed(first, now)
    assert book.try_again_s(ORDER, now) == KV_PEER_BACKOFF_S, "a success ends the row"
    assert book.try_again_s(ORDER[1:], now) is None


def test_a_peer_without_room_for_long_comes_last():
    book = PushTargets()
    full = [(node, entry(busy=2) if node == ORDER[0] else entry()) for node in "bcd"]
    assert order(book, full, 0.0) == ORDER
    assert order(book, full, KV_FULL_LONG_S) == [*ORDER[1:], ORDER[0]]
    assert order(book, PEERS, KV_FULL_LONG_S + 1) == ORDER
    assert order(book, full, KV_FULL_LONG_S + 2) == ORDER, "it had room in between"


def test_who_was_given_a_state_is_known_by_its_generation():
    book = PushTargets()
    book.sent(KEY, "b", 5, 1.0)
    book.sent(KEY, "c", 7, 2.0)
    assert book.sent_to(KEY, 5) == {"b": 1.0, "c": 2.0}
    assert book.sent_to(KEY, 6) == {"c": 2.0}
    book.peer_gone("c")
    assert book.sent_to(KEY, 6) == {} and book.sent_to(("t", "m"), 0) == {}


def test_no_more_sessions_are_remembered_than_the_node_knows():
    book = PushTargets()
    for n in range(SESSIONS_MAX + 1):
        book.sent((f"s{n}", "m"), "b", 1, float(n))
    assert book.sent_to(("s0", "m"), 0) == {} and book.sent_to(("s1", "m"), 0) == {"b": 1.0}
