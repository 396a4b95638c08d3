"""What is told of transfers: one value, one line, sums, figures; and the lists of `/v1/kv`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tests.fakes.node import FakeDispatcher, serving
from viiwork.api.kv import Kv
from viiwork.core import logline
from viiwork.core.replicas import Replica, ReplicaTable
from viiwork.core.sessions import Binding, SessionTable
from viiwork.core.slots import SlotRef
from viiwork.core.tally import OTHER
from viiwork.errors import EngineError, KvError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import Stages
from viiwork.limits import KV_PEERS_COUNTED, KV_TRANSFERS_SHOWN, METRIC_WORDS_MAX
from viiwork.node.kv_listing import KvListing
from viiwork.node.kv_metrics import KvMetrics
from viiwork.node.kv_stats import KvStats, Transfer, reason_of, stages_of

SESSION = "0123456789abcdef0123456789abcdef"


def sent(**changes: Any) -> Transfer:
    values: dict[str, Any] = {
        "what": "send",
        "session": SESSION,
        "model": "m",
        "peer": "b",
        "path": "10.0.0.2",
        "encrypted": True,
        "tokens": 2000,
        "kept": 1500,
        "state_bytes": 80_000_000,
        "raw_bytes": 20_000_000,
        "wire_bytes": 15_000_000,
        "took_s": 0.5,
        "stages_s": stages_of(Stages(send_s=0.25, hash_s=0.125, total_s=0.4), queued=0.0, save=0.0625),
    }
    return Transfer(**(values | changes))


def failed(reason: str = "link_lost", **changes: Any) -> Transfer:
    return Transfer(what="send", session=SESSION, model="m", reason=reason, **changes)


def test_a_transfer_has_one_line_in_the_log_that_tells_all_of_it(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        KvStats().ended(sent())
    (record,) = caplog.records
    event, fields, rest = logline.parse(record.getMessage())
    assert (event, rest) == ("kv_share.sent", "")
    assert fields == {
        "session": SESSION[:8],
        "model": "m",
        "peer": "b",
        "path": "10.0.0.2",
        "encrypted": "true",
        "compressed": "true",
        "took_s": "0.5",
        "tokens": "2000",
        "kept": "1500",
        "state_bytes": "80000000",
        "raw_bytes": "20000000",
        "wire_bytes": "15000000",
        "mb_per_s": "30.0",
        "save_s": "0.0625",
        "hash_s": "0.125",
        "send_s": "0.25",
    }


def test_the_line_of_a_failed_transfer_says_why_and_an_import_a_turn_waited_for_warns(
    caplog: pytest.LogCaptureFixture,
):
    stats = KvStats()
    with caplog.at_level(logging.INFO):
        stats.ended(failed(detail='it broke\nkv_share.sent peer="c"'))
        stats.ended(Transfer(what="import", session=SESSION, model="m", reason="corrupt", request="r1"))
    send, imported = caplog.records
    event, fields, rest = logline.parse(send.getMessage())
    assert (event, fields["reason"], rest) == ("kv_share.not_sent", "link_lost", "")
    assert fields["detail"].startswith("it broke\n") and "\n" not in send.getMessage()
    assert send.levelno == logging.INFO and imported.levelno == logging.WARNING
    assert logline.parse(imported.getMessage())[1]["request"] == "r1"


def test_the_sums_of_status_are_those_of_the_transfers():
    stats = KvStats(lambda: 1000.0)
    stats.ended(sent())
    stats.ended(sent(peer="c", wire_bytes=25_000_000, stages_s={"send": 0.75}))
    stats.ended(failed(peer="c"))
    stats.sent.skipped["no_peer"] += 1
    told = stats.as_json()
    assert told["sent"] == {
        "done": 2,
        "tokens": 4000,
        "kept": 3000,
        "state_bytes": 160_000_000,
        "raw_bytes": 40_000_000,
        "wire_bytes": 40_000_000,
        "took_s": 1.0,
        "stages_s": {"save": 0.0625, "hash": 0.125, "send": 1.0},
        "failed": {"link_lost": 1},
        "skipped": {"no_peer": 1},
    }
    assert told["peers"] == {
        "b": {"send": {"done": 1, "failed": 0, "wire_bytes": 15_000_000}},
        "c": {"send": {"done": 1, "failed": 1, "wire_bytes": 25_000_000}},
    }
    assert [(t["result"], t.get("reason"), t["at_unix_s"]) for t in told["last"]] == [
        ("done", None, 1000.0),
        ("done", None, 1000.0),
        ("failed", "link_lost", 1000.0),
    ]
    assert told["last"][1]["compressed"] is False


def test_peers_reasons_and_transfers_remembered_are_bounded():
    stats = KvStats()
    for i in range(2 * KV_PEERS_COUNTED):
        stats.ended(sent(peer=f"p{i}"))
        stats.ended(failed(f"reason{i}", peer="p0"))
    told = stats.as_json()
    assert len(told["peers"]) == KV_PEERS_COUNTED + 1
    assert told["peers"][OTHER]["send"]["done"] == KV_PEERS_COUNTED
    assert told["peers"]["p0"]["send"]["failed"] == 2 * KV_PEERS_COUNTED
    assert len(told["sent"]["failed"]) == METRIC_WORDS_MAX + 1
    assert sum(told["sent"]["failed"].values()) == 2 * KV_PEERS_COUNTED
    assert len(told["last"]) == KV_TRANSFERS_SHOWN


def test_moves_that_were_not_warm_have_a_cause():
    stats = KvStats()
    stats.moved("warm", "", 900)
    stats.moved("partly", "diverged", 400)
    stats.moved("cold")
    told = stats.as_json()
    assert told["moves"] == {"warm": 1, "partly": 1, "cold": 1}
    assert told["not_warm_causes"] == {"diverged": 1, "unknown": 1}
    assert told["reused_tokens"] == 1300


# -- figures ---------------------------------------------------------------------------------------


@dataclass
class Paths:
    links: list[dict[str, Any]]

    def status(self) -> list[dict[str, Any]]:
        return self.links


class Figures(Collector):
    def __init__(self, kv: KvMetrics) -> None:
        self.kv = kv

    def collect(self):
        return self.kv.families()


def scraped(stats: KvStats, tmp_path: Any) -> dict[tuple[str, ...], float]:
    replicas = ReplicaTable(4)
    replicas.put(Replica("r", ("s", "m"), 10, 4096, 1, "b"))
    paths: Any = Paths([{"peer": "b", "mb_per_s": 117.5}])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures(KvMetrics(stats, replicas, KvWorker(tmp_path, 1), paths, lambda: True)))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def test_figures_of_transfers_are_counters_and_histograms_a_real_parser_reads(tmp_path: Any):
    stats = KvStats()
    stats.ended(sent())
    stats.ended(failed(peer="b"))
    stats.sent.skipped["no_peer"] += 2
    stats.moved("cold", "no_reuse")
    stats.stalled("m/0", 0.25)
    stats.stalled("m/0", 0.5)
    found = scraped(stats, tmp_path)
    told = {name: value for name, value in found.items() if value and "bucket" not in name[0]}
    assert told == {
        ("viiwork_kv_share_active",): 1,
        ("viiwork_kv_share_replicas",): 1,
        ("viiwork_kv_share_replica_bytes",): 4096,
        ("viiwork_kv_share_link_bytes_per_second", "b"): 117_500_000,
        ("viiwork_kv_share_transfers_total", "send"): 1,
        ("viiwork_kv_share_failed_total", "link_lost", "send"): 1,
        ("viiwork_kv_share_skipped_total", "no_peer", "send"): 2,
        ("viiwork_kv_share_tokens_total", "send", "all"): 2000,
        ("viiwork_kv_share_tokens_total", "send", "kept"): 1500,
        ("viiwork_kv_share_bytes_total", "send", "state"): 80_000_000,
        ("viiwork_kv_share_bytes_total", "send", "raw"): 20_000_000,
        ("viiwork_kv_share_bytes_total", "send", "wire"): 15_000_000,
        ("viiwork_kv_share_stage_seconds_total", "save", "send"): 0.0625,
        ("viiwork_kv_share_stage_seconds_total", "hash", "send"): 0.125,
        ("viiwork_kv_share_stage_seconds_total", "send", "send"): 0.25,
        ("viiwork_kv_share_transfer_seconds_count", "send"): 1,
        ("viiwork_kv_share_transfer_seconds_sum", "send"): 0.5,
        ("viiwork_kv_share_transfer_wire_bytes_count", "send"): 1,
        ("viiwork_kv_share_transfer_wire_bytes_sum", "send"): 15_000_000,
        ("viiwork_kv_share_peer_transfers_total", "b", "done", "send"): 1,
        ("viiwork_kv_share_peer_transfers_total", "b", "failed", "send"): 1,
        ("viiwork_kv_share_peer_wire_bytes_total", "b", "send"): 15_000_000,
        ("viiwork_kv_share_moves_total", "cold"): 1,
        ("viiwork_kv_share_not_warm_total", "no_reuse"): 1,
        ("viiwork_kv_share_stall_seconds_total", "m/0"): 0.75,
    }
    seconds = {
        float(name[1]): value
        for name, value in found.items()
        if name[0] == "viiwork_kv_share_transfer_seconds_bucket" and name[2] == "send"
    }
    assert (seconds[0.25], seconds[0.5], seconds[float("inf")]) == (0, 1, 1)


# -- what is held ----------------------------------------------------------------------------------


def listing(limit: int = 10) -> tuple[KvListing, SessionTable, ReplicaTable]:
    sessions, replicas = SessionTable(), ReplicaTable(100)
    made = KvListing("a", sessions, replicas, lambda: [{"peer": "b"}], wall_ms=lambda: 60_000, limit=limit)
    return made, sessions, replicas


async def test_v1_kv_lists_the_sessions_and_replicas_held_by_their_short_names():
    made, sessions, replicas = listing()
    sessions.ran_here((SESSION, "m"), Binding("a", SlotRef("m/0", 1), 2000, 57_500))
    sessions.ran_elsewhere(("f" * 32, "m"), "b", 59_000)
    replicas.put(Replica("secret-name", ("e" * 32, "m"), 3000, 9000, 61_000, "b"))
    async with (
        serving(FakeDispatcher([]), routes=Kv(made).routes()) as api,
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{api.url}/v1/kv") as answer:
            body = await answer.json()
        async with http.post(f"{api.url}/v1/kv") as refused:
            assert refused.status == 405
    assert body == {
        "node": "a",
        "sessions": [
            {
                "session": SESSION[:8],
                "model": "m",
                "where": "slot",
                "backend": "m/0",
                "slot": 1,
                "tokens": 2000,
                "age_s": 2.5,
            }
        ],
        "replicas": [
            {
                "session": "eeeeeeee",
                "model": "m",
                "source": "b",
                "tokens": 3000,
                "bytes": 9000,
                "age_s": 0.0,  # made by a node whose clock is ahead
            }
        ],
        "links": [{"peer": "b"}],
        "more": {"sessions": 0, "replicas": 0, "links": 0},
    }


def test_v1_kv_shows_the_newest_and_says_how_many_more_there_are():
    made, sessions, replicas = listing(limit=3)
    for i in range(5):
        sessions.ran_here((f"{i:032}", "m"), Binding("a", SlotRef("m/0", i), 10, 1000 * i))
        replicas.put(Replica(f"r{i}", (f"{i:032}", "m"), 10, 10, 1000 * i, "b"))
    told = made.listing()
    assert [entry["age_s"] for entry in told["sessions"]] == [56.0, 57.0, 58.0]
    assert [entry["age_s"] for entry in told["replicas"]] == [56.0, 57.0, 58.0]
    assert told["more"] == {"sessions": 2, "replicas": 2, "links": 0}


def test_a_file_that_cannot_be_written_is_not_counted_as_slow():
    assert reason_of(OSError(28, "no space")) == "io_error"
    assert reason_of(TimeoutError()) == "too_slow"
    assert reason_of(KvError("no_space", "full")) == "no_space"
    assert reason_of(EngineError("gone")) == EngineError.code
