"""JSON of `/v1/capacity` and `/v1/fleet/capacity`."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.config.model import Seconds
from viiwork.core.capacity import (
    CapacityReport,
    KvIdentity,
    ModelCapacity,
    PeerReport,
    Perf,
    fleet_capacity,
)
from viiwork.core.holdings import Holding
from viiwork.errors import BadReport
from viiwork.limits import CAPACITY_BODY_MAX_BYTES, CAPACITY_MODELS_MAX, HOLDINGS_MAX, HOLDINGS_MAX_BYTES
from viiwork.wire.capacity import decode_report, encode_report, fleet_json

KV = KvIdentity("abc", "4", "f16", "q8_0", v_trans=True, n_ctx=4096)
COUNTS = st.integers(0, 1_000_000)
TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40)


@st.composite
def reports(draw):
    names = draw(st.lists(TEXT.filter(bool), unique=True, max_size=5))
    models = []
    for name in names:
        backends = draw(COUNTS)
        kv = draw(st.none() | st.builds(KvIdentity, TEXT, TEXT, TEXT, TEXT, st.booleans(), COUNTS))
        models.append(
            ModelCapacity(
                name,
                draw(TEXT),
                draw(COUNTS),
                draw(COUNTS),
                draw(COUNTS),
                draw(COUNTS),
                backends,
                draw(st.integers(0, backends)),
                kv,
            )
        )
    return CapacityReport(draw(st.from_regex(r"\An[a-z0-9.-]{1,20}\Z")), draw(TEXT), tuple(models))


def body(**changes):
    model = {
        "name": "qwen",
        "engine": "llamacpp",
        "slots": 4,
        "busy": 1,
        "queued": 0,
        "ctx": 8192,
        "backends": 2,
        "healthy_backends": 2,
    }
    report = {"node": "b", "ver": "0.1.0", "models": [model]}
    for key, value in changes.items():
        (report if key in report else model)[key] = value
    return json.dumps(report).encode()


@given(reports())
def test_a_report_comes_back_as_it_was(report):
    assert decode_report(encode_report(report)) == report


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr))
def test_any_bytes_are_a_report_or_a_bad_report(data):
    try:
        decode_report(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    except BadReport as error:
        assert str(error)


def test_the_published_shape_is_kept():
    report = CapacityReport("b", "0.1", (ModelCapacity("q", "llamacpp", 4, 1, 2, 8192, 2, 1),))
    assert json.loads(encode_report(report)) == {
        "node": "b",
        "ver": "0.1",
        "models": [
            {
                "name": "q",
                "engine": "llamacpp",
                "slots": 4,
                "busy": 1,
                "queued": 2,
                "ctx": 8192,
                "backends": 2,
                "healthy_backends": 1,
            }
        ],
    }


def test_kv_identity_is_published_only_when_there_is_one():
    with_kv = CapacityReport("b", "", (ModelCapacity("q", kv=KV),))
    assert json.loads(encode_report(with_kv))["models"][0]["kv"]["cache_type_v"] == "q8_0"


def test_unknown_fields_of_a_newer_node_are_ignored():
    report = decode_report(body(ttft_overhead_ms=12.5, perf={"a": [1]}))
    assert report.models[0].slots == 4


def test_more_busy_than_slots_is_kept_and_gives_no_free_slot():
    assert decode_report(body(busy=9)).models[0].free == 0


def test_null_models_are_no_models():
    assert decode_report(b'{"node":"b","ver":"","models":null}').models == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": -1},
        {"slots": "4"},
        {"slots": True},
        {"slots": 1.5},
        {"slots": 10**30},
        {"slots": None},
        {"busy": -1},
        {"ctx": 2**40},
        {"healthy_backends": 3},
        {"name": ""},
        {"name": "a b"},
        {"name": "a\x1b[2J"},
        {"name": "x" * 513},
        {"engine": "a\nb"},
        {"ver": "1\r\n2"},
        {"node": ""},
        {"node": "a b"},
        {"node": "mesh"},
        {"node": "n" * 65},
        {"node": "müller"},
        {"kv": 5},
        {"import_ms_per_1k": -1},
        {"import_ms_per_1k": "fast"},
        {"kv": {"model_fp": "x"}},
    ],
)
def test_a_known_field_of_the_wrong_type_or_range_refuses_the_report(changes):
    with pytest.raises(BadReport):
        decode_report(body(**changes))


@pytest.mark.parametrize("missing", ["slots", "busy", "backends", "healthy_backends", "name"])
def test_an_absent_number_is_not_taken_for_zero(missing):
    report = json.loads(body())
    del report["models"][0][missing]
    with pytest.raises(BadReport):
        decode_report(json.dumps(report).encode())


def test_a_model_named_twice_refuses_the_report():
    report = json.loads(body())
    report["models"] *= 2
    with pytest.raises(BadReport, match="twice"):
        decode_report(json.dumps(report).encode())


def test_size_and_number_of_models_are_capped():
    with pytest.raises(BadReport, match="over"):
        decode_report(b" " * (CAPACITY_BODY_MAX_BYTES + 1))
    report = json.loads(body())
    report["models"] = [{**report["models"][0], "name": f"m{i}"} for i in range(CAPACITY_MODELS_MAX + 1)]
    with pytest.raises(BadReport):
        decode_report(json.dumps(report).encode())


def test_a_deeply_nested_report_is_refused():
    with pytest.raises(BadReport):
        decode_report(b'{"node":"b","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_fleet_json_gives_a_stale_host_an_age_and_no_numbers():
    mine = CapacityReport("a", "0.1", (ModelCapacity("q", "llamacpp", 4, 1, 0, 8192, 1, 1),))
    old = PeerReport(CapacityReport("b", "0.1", mine.models), 89.0, 90.0, api="127.0.0.2:8086")
    fresh = PeerReport(CapacityReport("c", "0.1", mine.models), 99.0, 99.5, api="127.0.0.3:8086")
    fleet = fleet_json("a", "0.1", 3.0, fleet_capacity(mine, [old, fresh], 100.0, 3.0))
    assert fleet == {
        "view": "a",
        "ver": "0.1",
        "stale_after_s": 3,
        "models": [
            {
                "name": "q",
                "engine": "llamacpp",
                "slots": 8,
                "busy": 2,
                "free": 6,
                "queued": 0,
                "ctx": 8192,
                "hosts": [
                    {"node": "a", "slots": 4, "busy": 1, "free": 3, "ctx": 8192, "age_ms": 0},
                    {"node": "b", "api": "127.0.0.2:8086", "age_ms": 10000, "stale": True},
                    {
                        "node": "c",
                        "api": "127.0.0.3:8086",
                        "slots": 4,
                        "busy": 1,
                        "free": 3,
                        "ctx": 8192,
                        "age_ms": 500,
                    },
                ],
            }
        ],
    }


def test_fleet_json_can_be_encoded_with_a_fraction_of_a_second_from_the_config():
    body = fleet_json("a", "", Seconds(2.5), ())
    assert msgspec.json.decode(msgspec.json.encode(body))["stale_after_s"] == 2.5


def test_fleet_json_of_an_unknown_model_is_an_empty_list():
    assert fleet_json("a", "", 2.5, ()) == {"view": "a", "stale_after_s": 2.5, "models": []}


def test_a_nodes_measured_speed_comes_through():
    model = ModelCapacity("m", slots=1, backends=1, healthy_backends=1, perf=Perf(120.0, 850.0, 9))
    report = CapacityReport("a", "1", (model,), aliases="beef")
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize("cost_ms", [None, 0.0, 75.0])
def test_what_restoring_costs_comes_through_or_is_not_told(cost_ms: float | None):
    perf = Perf(120.0, 850.0, 9, cost_ms)
    model = ModelCapacity("m", slots=1, backends=1, healthy_backends=1, perf=perf)
    report = CapacityReport("a", "1", (model,))
    assert decode_report(encode_report(report)) == report
    assert (b"import_ms_per_1k" in encode_report(report)) == (cost_ms is not None)


@pytest.mark.parametrize("speed", ['"ttft_overhead_ms":5', '"ttft_overhead_ms":5,"prefill_ms_per_1k":0'])
def test_half_a_speed_or_one_without_a_rate_counts_as_not_measured(speed: str):
    counts = '"slots":1,"busy":0,"backends":1,"healthy_backends":1'
    text = f'{{"node":"a","models":[{{"name":"m",{counts},{speed}}}]}}'
    assert decode_report(text.encode()).models[0].perf is None


SESSION, LINK = "ab" * 16, "cd" * 8
HOLDINGS = (
    Holding(SESSION, "qwen", LINK, LINK, 5000, "slot", 30, "qwen/0"),
    Holding("00" * 16, "other", "", "", 0, "ram", 20, "other/1"),
    Holding("11" * 16, "qwen", LINK, "", 7, "replica", 10),
)


def test_what_a_node_holds_comes_back_with_its_revision():
    told = CapacityReport("a", "1", holdings_rev=17, holdings=HOLDINGS)
    assert decode_report(encode_report(told)) == told


def test_no_list_of_holdings_is_not_an_empty_one():
    silent, empty = CapacityReport("a", holdings_rev=17), CapacityReport("a", holdings_rev=17, holdings=())
    assert decode_report(encode_report(silent)).holdings is None
    assert decode_report(encode_report(empty)).holdings == ()
    assert decode_report(body()).holdings_rev == 0


def test_the_list_stays_within_its_size_and_loses_the_oldest():
    name = "m" * 512
    many = tuple(
        Holding(f"{n:032x}", name, LINK, LINK, 2**31 - 1, "replica", 2**63 - 1 - n, name[:250])
        for n in range(HOLDINGS_MAX)
    )
    told = encode_report(CapacityReport("a", "1", holdings_rev=1, holdings=many))
    assert len(told) < HOLDINGS_MAX_BYTES + 200
    assert decode_report(told).holdings == many[: len(decode_report(told).holdings or ())]
    usual = tuple(
        Holding(f"{n:032x}", "qwen", LINK, LINK, 32768, "slot", 1_764_000_000_000 - n, "")
        for n in range(HOLDINGS_MAX)
    )
    assert decode_report(encode_report(CapacityReport("a", holdings_rev=1, holdings=usual))).holdings == usual


@pytest.mark.parametrize(
    "entry",
    [
        [],
        ["x" * 32, LINK, "", 1, "slot", 1],
        [SESSION, "xx", "", 1, "slot", 1],
        [SESSION, LINK, "", -1, "slot", 1],
        [SESSION, LINK, "", 1, "elsewhere", 1],
        [SESSION, LINK, "", 1, "slot", 2**63],
        [SESSION, LINK, "", 1, "slot", 1, "\x1b[2J"],
        [SESSION, LINK, "", 1, "slot", 1, 7],
        {"session": SESSION},
    ],
)
def test_a_holding_that_cannot_be_one_refuses_the_report(entry):
    raw = json.dumps({"node": "a", "holdings_rev": 1, "holdings": {"qwen": [entry]}}).encode()
    with pytest.raises(BadReport):
        decode_report(raw)


def test_more_holdings_than_a_node_may_tell_of_refuse_the_report():
    entry = [SESSION, LINK, "", 1, "slot", 1]
    for lists in ({"m": [entry] * (HOLDINGS_MAX + 1)}, {"m": [entry] * HOLDINGS_MAX, "n": [entry]}):
        with pytest.raises(BadReport):
            decode_report(json.dumps({"node": "a", "holdings": lists}).encode())
