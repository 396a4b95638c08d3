"""A session evicted behind the node's back, in every way a real engine can, is warm again by its replica."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .nodes import NodeProcess, until_portable
from .test_two_nodes import chat, opening, reused_share, said, until_received

pytestmark = pytest.mark.engine

Pair = tuple[NodeProcess, NodeProcess]
SHARE = "kv_share: {min_tokens: 64}"


def entry(path: Path) -> str:
    """Without the engine's RAM cache, which would hide what its slots have lost."""
    return (
        f"  - {{name: small, engine: llamacpp, path: {path}, context: 1024, parallel: 2, "
        "llamacpp: {binary: embedded, threads: 1, cache_ram_mib: 0}}\n"
    )


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("evicted")
    a = NodeProcess("a", "127.0.11.1", folder, entry(smollm2), extra=SHARE)
    b = NodeProcess("b", "127.0.11.2", folder, entry(smollm2), extra=SHARE)
    a.seeds, b.seeds = (b.seed,), (a.seed,)
    try:
        for node in (a, b):
            node.start()
        asyncio.run(_until_one_mesh((a, b)))
        yield a, b
    finally:
        for node in (a, b):
            node.end()


async def _until_one_mesh(nodes: Pair) -> None:
    async with aiohttp.ClientSession() as http:
        for node in nodes:
            await node.until_healthy(http)
            await node.until_sees(http, "small", 2)
            await until_portable(node, http)


def engine_of(node: NodeProcess) -> str:
    """Where the node's engine listens now."""
    found = re.findall(r"\[small/0\] process (\d+) on port (\d+)", node.log)
    return f"http://127.0.0.1:{found[-1][1]}"


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()


async def another_request_in_the_slot(node: NodeProcess, http: aiohttp.ClientSession) -> None:
    for slot in (0, 1):
        body = {"prompt": "An owl sat in a tree. " * 20, "n_predict": 1, "id_slot": slot}
        await post(http, engine_of(node) + "/completion", body)


async def requests_where_the_engine_likes(node: NodeProcess, http: aiohttp.ClientSession) -> None:
    for text in ("A heron stood in a pond. ", "Two foxes ran over a hill. ", "The moon was out. "):
        body = {"prompt": text * 20, "n_predict": 1}
        await post(http, engine_of(node) + "/completion", body)


async def erased(node: NodeProcess, http: aiohttp.ClientSession) -> None:
    for slot in (0, 1):
        await post(http, f"{engine_of(node)}/slots/{slot}?action=erase", {})


async def killed(node: NodeProcess, http: aiohttp.ClientSession) -> None:
    await node.status(http)
    pid = node.engine_pids()["small/0"]
    os.kill(pid, signal.SIGKILL)
    await node.until(http, "given another engine", lambda s: node.engine_pids().get("small/0", pid) != pid)
    await node.until_healthy(http)
    await until_portable(node, http)


WAYS = [another_request_in_the_slot, requests_where_the_engine_likes, erased, killed]


async def counts(node: NodeProcess, http: aiohttp.ClientSession) -> dict[str, Any]:
    status = await node.status(http)
    share: dict[str, Any] = status["kv_share"]
    return share


@pytest.mark.parametrize("evict", WAYS)
async def test_an_evicted_session_with_a_replica_here_is_warm_by_import(
    nodes: Pair, http: aiohttp.ClientSession, evict: Any
):
    a, b = nodes
    messages, session = opening(), uuid.uuid4().hex
    before = (await counts(a, http))["received"]["done"]
    first = await chat(http, b, messages, session)
    messages += [said(first), {"role": "user", "content": "And the fourth?"}]
    await until_received(http, a, before)
    second = await chat(http, a, messages, session)
    assert reused_share(second) > 0.8
    messages += [said(second), {"role": "user", "content": "And the fifth?"}]
    imports = (await counts(a, http))["imports"]["done"]
    await evict(a, http)
    third = await chat(http, a, messages, session)
    after = await counts(a, http)
    assert third["node"] == "a" and after["imports"]["done"] == imports + 1, after
    assert reused_share(third) > 0.7, "the replica is a turn old, or pulled"
    messages += [said(third), {"role": "user", "content": "And the sixth?"}]
    fourth = await chat(http, a, messages, session)
    assert reused_share(fourth) > 0.8
    assert (await counts(a, http))["imports"]["done"] == imports + 1, "and it is not imported twice"


@pytest.mark.parametrize("evict", WAYS[:3])
async def test_an_evicted_session_that_nobody_else_has_is_read_anew_and_right(
    nodes: Pair, http: aiohttp.ClientSession, evict: Any
):
    a, _ = nodes
    messages, session = opening(), uuid.uuid4().hex
    off = {"X-Viiwork-Kv-Share": "off"}
    first = await chat(http, a, messages, session, headers=off)
    messages += [said(first), {"role": "user", "content": "And the fourth?"}]
    await evict(a, http)
    second = await chat(http, a, messages, session, headers=off)
    assert second["timings"]["cache_n"] < 64
    messages += [said(second), {"role": "user", "content": "And the fifth?"}]
    third = await chat(http, a, messages, session, headers=off)
    assert reused_share(third) > 0.8
