"""Real nodes that are asked for more than they can serve: nothing fails, order is kept, nothing is left over.

bench/soak measures the same for minutes; here the load is small, and only what holds on a busy machine is
asserted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.load import (
    Planned,
    Ran,
    Sent,
    build_engine,
    engine_model,
    plan,
    read_record,
    send,
    send_one,
)
from tests.fakes.load_figures import (
    begun_for_nobody,
    expected_depth,
    outside,
    overtaken,
    slot_seconds,
    used_share,
)

from .nodes import NodeProcess

SLOTS = 2
BUSY_MACHINE_S = 2.0  # what happens closer together has no order on a machine that others load
Start = Callable[..., Awaitable[dict[str, NodeProcess]]]


@pytest.fixture(scope="session")
def load_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_engine(tmp_path_factory.mktemp("load-engine"))


@pytest.fixture
async def start(tmp_path: Path, http: aiohttp.ClientSession, load_engine: Path) -> AsyncIterator[Start]:
    """`await start("a", "b", routing=...)`: nodes with two slots of the model m each, in one mesh."""
    nodes: dict[str, NodeProcess] = {}

    async def start(*names: str, **sections: str) -> dict[str, NodeProcess]:
        extra = "\n".join(f"{name}: {{{keys}}}" for name, keys in sections.items())
        for number, name in enumerate(names, 1):
            lines = engine_model(tmp_path, load_engine, name, "m", SLOTS)
            seeds = tuple(node.seed for node in nodes.values())
            nodes[name] = NodeProcess(
                name, f"127.0.14.{number}", tmp_path, lines, seeds, f"kv_share: {{enabled: false}}\n{extra}"
            )
            nodes[name].start()
        for node in nodes.values():
            await node.until_healthy(http)
            await node.until_sees(http, "m", len(names))
        return nodes

    yield start
    for node in nodes.values():
        node.end()


def addresses(nodes: dict[str, NodeProcess]) -> dict[str, tuple[str, int]]:
    return {name: (node.host, node.api_port) for name, node in nodes.items()}


def chat(tag: str, entry: str, hold_s: float = 0.01, query: str = "") -> Planned:
    return Planned(tag, 0.0, entry, "m", hold_s, 0.0, True, "", query=query)


def ran_on(folder: Path, nodes: dict[str, NodeProcess]) -> list[Ran]:
    return [ran for name in nodes for ran in read_record(folder, name, "m")]


async def nothing_left(http: aiohttp.ClientSession, nodes: dict[str, NodeProcess]) -> None:
    for node in nodes.values():
        await node.until_idle(http, 20)
        assert "Traceback" not in node.log


async def test_twice_the_capacity_is_served_in_order_and_the_rest_is_told_when_to_come_back(
    start: Start, http: aiohttp.ClientSession, tmp_path: Path
):
    nodes = await start("a", "b", routing="queue_max: 16, queue_timeout: 6s")
    requests = plan(random.Random(1), duration_s=6, per_s=26, entries=["a", "b"], models=["m"], hold_s=0.3)
    sent = await send(requests, addresses(nodes))
    assert [one for one in sent if one.failed] == []
    served, refused = [s for s in sent if s.served], [s for s in sent if s.refused]
    assert len(served) + len(refused) == len(requests)
    assert len(served) > SLOTS * len(nodes) and refused
    assert {one.header("Retry-After") for one in refused} == {"2"}
    ran = ran_on(tmp_path, nodes)
    assert sorted(one.tag for one in ran) == sorted(one.planned.tag for one in served), "each ran once"
    assert {one.how for one in ran} == {"done"}, "the engine tells of two requests in one slot"
    assert {(one.node, one.slot) for one in ran} == {(n, slot) for n in nodes for slot in range(SLOTS)}
    assert overtaken(sent, ran, BUSY_MACHINE_S) == []
    await nothing_left(http, nodes)


async def test_clients_that_leave_while_they_wait_never_run_and_cost_nobody_a_place(
    start: Start, http: aiohttp.ClientSession, tmp_path: Path
):
    nodes = await start("a", "b", routing="queue_max: 200, queue_timeout: 60s")
    requests = plan(
        random.Random(2),
        duration_s=4,
        per_s=40,
        entries=["a", "b"],
        models=["m"],
        hold_s=0.3,
        leavers=0.6,
        patience_s=1.0,
    )
    sent = await send(requests, addresses(nodes))
    assert [one for one in sent if one.failed or one.refused] == []
    assert sum(one.end == "left" for one in sent) > len(requests) // 4
    ran = ran_on(tmp_path, nodes)
    assert begun_for_nobody(sent, ran, BUSY_MACHINE_S) == []
    assert {one.planned.tag for one in sent if one.served} == {r.tag for r in ran if r.how == "done"}
    await nothing_left(http, nodes)


async def test_a_frozen_backend_is_routed_around_loses_no_request_and_comes_back_by_itself(
    start: Start, http: aiohttp.ClientSession
):
    nodes = await start("a", "b", health="interval: 200ms, timeout: 1s, max_failures: 100000")
    a, b = nodes.values()
    at = addresses(nodes)
    on_b = [chat(f"running {n}", "b", 1.0, "?host=b") for n in range(SLOTS)]
    running = [asyncio.create_task(send_one(one, at["b"])) for one in on_b]
    await b.until(http, "busy", lambda s: s["models"][0]["busy"] == SLOTS, 20)
    engine = b.engine_pids()["m/0"]
    os.kill(engine, signal.SIGSTOP)
    try:
        await b.until(http, "aware of it", lambda s: s["models"][0]["backends"][0]["status"] != "healthy", 60)
        around = [await send_one(chat(f"around {n}", "ab"[n % 2]), at["ab"[n % 2]]) for n in range(20)]
        assert [one for one in around if not one.served] == []
        assert {one.header("X-Viiwork-Node") for one in around} == {"a"}
    finally:
        os.kill(engine, signal.SIGCONT)
    assert all(one.served for one in await asyncio.gather(*running))
    await b.until_healthy(http)
    assert b.engine_pids()["m/0"] == engine, "it was not replaced"
    last = await send_one(chat("last", "b", query="?host=b"), at["b"])
    assert last.served and last.header("X-Viiwork-Node") == "b"
    await a.until_sees(http, "m", 2)
    await nothing_left(http, nodes)


async def test_a_node_that_stops_under_load_harms_only_what_runs_on_it(
    start: Start, http: aiohttp.ClientSession, tmp_path: Path
):
    nodes = await start("a", "b", "c", routing="queue_max: 200, queue_timeout: 60s, stale_after: 1500ms")
    requests = plan(random.Random(3), duration_s=6, per_s=15, entries=["a", "b"], models=["m"], hold_s=0.3)
    load = asyncio.create_task(send(requests, addresses(nodes)))
    c = nodes["c"]
    await c.until(http, "busy", lambda s: s["models"][0]["busy"] > 0, 20)
    c.kill(signal.SIGSTOP)
    try:
        await _until_served(tmp_path, nodes, 40)
    finally:
        c.kill(signal.SIGCONT)
    sent = await load
    assert [one for one in sent if not one.served] == []
    before = len(read_record(tmp_path, "c", "m"))
    for node in nodes.values():
        await node.until_sees(http, "m", 3)
    again = await asyncio.gather(
        *(send_one(chat(f"again {n}", "a", 1.0), addresses(nodes)["a"]) for n in range(3 * SLOTS))
    )
    assert all(one.served for one in again)
    assert len(read_record(tmp_path, "c", "m")) > before, "it is used again"
    await nothing_left(http, nodes)


async def _until_served(folder: Path, nodes: dict[str, NodeProcess], n: int) -> None:
    """So many more requests have ended than when this began."""
    wanted = len(ran_on(folder, nodes)) + n
    async with asyncio.timeout(90):
        while len(ran_on(folder, nodes)) < wanted:
            await asyncio.sleep(0.05)


# -- the figures themselves ------------------------------------------------------------------------
def _sent(tag: str, sent_at: float, ended_at: float, **more: object) -> Sent:
    return Sent(chat(tag, "a"), sent_at, ended_at=ended_at, **more)  # type: ignore[arg-type]


def _ran(tag: str, started_at: float, ended_at: float, how: str = "done") -> Ran:
    return Ran(tag, "a", "m", 0, started_at, ended_at, how)  # type: ignore[arg-type]


def test_a_request_that_a_later_one_passed_is_found():
    waited = {"x-viiwork-queued-ms": "8000"}
    sent = [_sent("first", 0, 9, headers=waited), _sent("second", 1, 5), _sent("third", 2, 7)]
    ran = [_ran("second", 4, 5), _ran("third", 6, 7), _ran("first", 8, 9)]
    (found,) = overtaken(sent, ran)
    assert (found.tag, found.by, found.by_s) == ("first", "second", 4.0)
    assert overtaken(sent, ran, same_moment_s=5.0) == []


def test_a_request_that_got_stuck_after_it_was_granted_was_not_overtaken_in_its_queue():
    sent = [_sent("stuck", 0, 9), _sent("later", 1, 5)]
    assert overtaken(sent, [_ran("later", 4, 5), _ran("stuck", 8, 9)]) == []


def test_a_request_that_waited_in_vain_while_a_later_one_began_is_found():
    sent = [_sent("vain", 0, 20, status=429, code="queue_timeout"), _sent("lucky", 1, 12)]
    assert [one.tag for one in overtaken(sent, [_ran("lucky", 10, 12)])] == ["vain"]
    full = [_sent("turned away", 0, 0.1, status=429, code="queue_full"), _sent("lucky", 1, 12)]
    assert overtaken(full, [_ran("lucky", 10, 12)]) == []


def test_a_request_begun_after_its_client_left_is_found():
    sent = [_sent("gone", 0, 3, end="left"), _sent("cut while it ran", 0, 6, end="left")]
    ran = [_ran("gone", 5, 6, "gone"), _ran("cut while it ran", 5, 6, "gone")]
    assert begun_for_nobody(sent, ran) == ["gone"]


def test_the_used_share_counts_only_the_window_and_not_what_was_broken_meanwhile():
    ran = [
        _ran("before", 0, 2),
        _ran("half inside", 9, 11),
        _ran("inside", 12, 16),
        _ran("x", 13, 15, "clash"),
    ]
    window = (10.0, 20.0)
    assert slot_seconds(2, window, [(1, (5.0, 15.0))]) == 15.0
    assert used_share(ran, 20.0, window) == 5.0 / 20.0


def test_a_chat_in_an_engine_that_was_gone_for_a_time_counts_before_and_after():
    parts = list(outside([_ran("through", 0, 9), _ran("inside", 4, 5)], (3.0, 6.0)))
    assert [(one.tag, one.started_at, one.ended_at) for one in parts] == [
        ("through", 0, 3),
        ("through", 6, 9),
    ]


def test_the_expected_depth_is_what_comes_in_the_time_each_one_waits():
    requests = [chat(str(n), "a") for n in range(100)]
    assert expected_depth(requests, 10.0, 64, 5.0) == {("a", "m"): 50.0}
    assert expected_depth(requests, 10.0, 64, 20.0) == {("a", "m"): 64.0}
