"""Those who hear of requests: events in order, counts a scraper can read, log lines an operator can."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.core.turn import Ask, Grant, Outcome, Usage
from viiwork.errors import QueueTimeout
from viiwork.limits import METRIC_WORDS_MAX, REQUEST_LINES_PER_S
from viiwork.mesh.values import Member
from viiwork.node.activity import NodeActivity
from viiwork.node.metrics import Block, NodeCollector, RequestCounts
from viiwork.node.request_log import RequestLog
from viiwork.node.requests import RequestListeners

DONE = Outcome("done", 200, ttft_s=0.25, duration_s=1.0, usage=Usage(7, 3, 4))


def grant(model: str = "m", *, node: str = "a", backend: str = "m/0", rid: str = "r1") -> Grant:
    return Grant(Ask(rid, model), node, "http://x", backend, queued_s=1.5)


def messages(activity: NodeActivity) -> list[str]:
    return [event.message for event in activity.log.events()]


def test_a_request_that_is_tried_twice_ends_once():
    activity = NodeActivity(100, wall_ms=lambda: 1)
    activity.granted(grant(node="b", backend=""))
    activity.granted(grant())
    activity.ended(grant(), DONE, 0.0)
    begun, again, end = messages(activity)
    assert (begun, again) == ("m → peer b", "m → m/0") and end.startswith("m → m/0 done (")
    assert {event.rid for event in activity.log.events()} == {"r1"}


@pytest.mark.parametrize(
    ("result", "words"),
    [("client_gone", " aborted by client ("), ("broken", " aborted ("), ("done", " done (")],
)
def test_every_end_of_an_answer_has_its_words(result, words):
    activity = NodeActivity(100)
    activity.granted(grant())
    activity.ended(grant(), Outcome(result), 0.0)
    assert words in messages(activity)[-1]


def test_a_request_no_place_served_leaves_no_open_row_and_one_that_never_had_a_place_leaves_none():
    activity = NodeActivity(100)
    activity.granted(grant())
    activity.unserved(Ask("r1", "m"), QueueTimeout("full"), 0.0)
    activity.unserved(Ask("r2", "m"), QueueTimeout("full"), 0.0)
    activity.left(Ask("r3", "m"), 0.0)
    assert len(messages(activity)) == 2 and " done (" in messages(activity)[1]
    assert not activity._places


def test_names_of_strangers_cannot_break_an_event():
    activity = NodeActivity(100)
    activity.granted(grant("m\x1b[2J\n" + "x" * 1000))
    assert messages(activity)[0].isprintable() and len(messages(activity)[0]) < 400


def test_log_lines_beyond_the_limit_are_counted_and_the_next_second_says_so(caplog):
    now = 100.0
    listener = RequestLog(lambda: now)
    with caplog.at_level(logging.INFO, "viiwork.requests"):
        for _ in range(REQUEST_LINES_PER_S + 7):
            listener.ended(grant(), DONE, 99.0)
        assert len(caplog.records) == REQUEST_LINES_PER_S
        now = 101.0
        listener.left(Ask("r9", "m"), 100.0)
    assert [record.getMessage() for record in caplog.records[-2:]] == [
        "requests.unlogged n=7",
        "request.left request=r9 model=m took_ms=1000",
    ]


def test_a_log_line_says_what_is_known_of_a_turn(caplog):
    with caplog.at_level(logging.INFO, "viiwork.requests"):
        RequestLog(lambda: 10.0).ended(grant(), DONE, 9.0)
    assert caplog.records[0].getMessage() == (
        "request.done request=r1 model=m node=a backend=m/0 status=200 ttft_ms=250 cached=7 prefilled=3 "
        "generated=4 queued_ms=1500 took_ms=1000"
    )


def scraped(counts: RequestCounts, **blocks) -> dict[str, list]:
    peer = PeerReport(CapacityReport("b", "1"), 0.0, 90.0, 0.01, "x")
    collector = NodeCollector(
        counts.tally,
        info={"node": "a", "version": 'v"\\\n'},
        report=lambda: CapacityReport("a", "1", (ModelCapacity('m"\n', slots=2, busy=1, queued=3),)),
        backends=list,
        members=lambda: [Member("b", "10.0.0.2", 1, 2, "suspect")],
        peers=lambda: {"b": peer},
        blocks={
            name: Block(lambda value=value: value, frozenset({"open", "hit_rate"}))
            for name, value in blocks.items()
        },
        clock=lambda: 100.0,
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def test_everything_that_was_counted_is_read_back_by_a_real_parser():
    counts = RequestCounts(lambda: 10.0)
    heard = RequestListeners(counts, NodeActivity(10))
    heard.granted(grant())
    heard.ended(grant(), DONE, 9.0)
    heard.unserved(Ask("r2", "m"), QueueTimeout("x"), 0.0)
    heard.left(Ask("r3", "m"), 0.0)
    found = scraped(counts)
    assert [s.value for s in found["viiwork_requests"]] == [1]
    assert found["viiwork_requests_refused"][0].labels == {"code": "queue_timeout"}
    assert found["viiwork_requests_left"][0].value == 1
    assert {s.labels["kind"]: s.value for s in found["viiwork_tokens"]} == {
        "cached": 7,
        "prefilled": 3,
        "generated": 4,
    }
    buckets = {s.labels["le"]: s.value for s in found["viiwork_ttft_seconds"] if s.name.endswith("_bucket")}
    assert (buckets["0.1"], buckets["0.25"], buckets["+Inf"]) == (0, 1, 1)
    assert found["viiwork_model_slots"][0].labels == {"model": 'm"\n'}
    assert {s.labels["state"]: s.value for s in found["viiwork_mesh_members"]}["suspect"] == 1
    assert found["viiwork_peer_report_age_seconds"][0].value == 10


def test_blocks_of_the_status_are_shown_as_far_as_they_are_numbers_and_words():
    many = {f"reason_{chr(97 + i % 26)}{i}": i for i in range(10 * METRIC_WORDS_MAX)}
    found = scraped(
        RequestCounts(),
        sessions={
            "open": 3,
            "hit_rate": 0.5,
            "turns": 7,
            "unknown": None,
            "text": "x",
            "moves": {"nodes": 1, "slots": 2, "not a word": 1},
            "many": many,
            "Bad-Name": 1,
        },
    )
    assert found["viiwork_sessions_open"][0].value == 3 and found["viiwork_sessions_hit_rate"][0].value == 0.5
    assert {s.labels["kind"]: s.value for s in found["viiwork_sessions_moves"]} == {"nodes": 1, "slots": 2}
    assert len(found["viiwork_sessions_many"]) == METRIC_WORDS_MAX
    assert not {name for name in found if "unknown" in name or "text" in name or "bad" in name.lower()}


def test_what_only_grows_is_a_counter_and_what_goes_up_and_down_a_gauge():
    found = scraped(RequestCounts(), sessions={"open": 3, "turns": 7, "moves": {"nodes": 1}})
    names = {sample.name for samples in found.values() for sample in samples}
    assert {"viiwork_sessions_open", "viiwork_sessions_turns_total", "viiwork_sessions_moves_total"} <= names
