"""Two real nodes and engines: a session moves though nothing was pushed, or because its home is busy."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from viiwork.config.load import load_without_secrets
from viiwork.node.perf import key_of

from .nodes import NodeProcess, model_entry, until_portable
from .test_two_nodes import chat, opening, reused_share, said, until_received

pytestmark = pytest.mark.engine

Pair = tuple[NodeProcess, NodeProcess]
LONG = 300  # words of an opening; about 330 tokens
HEARD_S = 3.0  # nodes ask one another each second what they hold; no event tells that b has heard it
READS_MS_PER_1K = 60_000.0  # so slow that fetching pays whatever else this machine does


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Pair]:
    """One slot each, and both know from an earlier run how slowly they read."""
    folder = tmp_path_factory.mktemp("pull")
    model = model_entry("small", smollm2, context=2048, parallel=1)
    a = NodeProcess("a", "127.0.12.1", folder, model, extra="kv_share: {min_tokens: 64}")
    b = NodeProcess("b", "127.0.12.2", folder, model, extra="kv_share: {min_tokens: 64}")
    a.seeds, b.seeds = (b.seed,), (a.seed,)
    try:
        for node in (a, b):
            have_measured(node)
            node.start()
        asyncio.run(_until_one_mesh((a, b)))
        yield a, b
    finally:
        for node in (a, b):
            node.end()


def have_measured(node: NodeProcess) -> None:
    section = load_without_secrets(node.write_config()).models[0]
    state = node.folder / node.name
    state.mkdir()
    known = {"overhead_ms": 100.0, "prefill_ms_per_1k": READS_MS_PER_1K, "key": key_of(section)}
    (state / "perf.json").write_text(json.dumps({"v": 1, "models": {"small": known}}))


async def _until_one_mesh(nodes: Pair) -> None:
    async with aiohttp.ClientSession() as http:
        for node in nodes:
            await node.until_healthy(http)
            await node.until_sees(http, "small", 2)
            await until_portable(node, http)
            await node.until(http, "measured", lambda s: "perf" in s["models"][0])


async def stream(
    http: aiohttp.ClientSession,
    node: NodeProcess,
    messages: list[dict[str, str]],
    session: str = "",
    prefer: str = "",
    **more: Any,
) -> dict[str, Any]:
    """A streamed turn: its text, its timings and the node that ran it."""
    headers = {"X-Session-Id": session} if session else {}
    headers |= {"X-Viiwork-Prefer": prefer} if prefer else {}
    body = {"model": "small", "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True} | more
    text, timings = "", {}
    async with http.post(f"{node.api}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                timings = chunk.get("timings", timings)
                text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
        return {"text": text, "timings": timings, "node": answer.headers["X-Viiwork-Node"]}


async def share(node: NodeProcess, http: aiohttp.ClientSession) -> dict[str, Any]:
    found: dict[str, Any] = (await node.status(http))["kv_share"]
    return found


async def test_a_turn_whose_state_was_never_pushed_pulls_it(nodes: Pair, http: aiohttp.ClientSession):
    """A first turn without a client's key is not pushed: nobody knows whether a second one comes."""
    a, b = nodes
    messages = opening(LONG)
    first = await chat(http, a, messages)
    assert first["node"] == "a"
    messages += [said(first), {"role": "user", "content": "And the fourth?"}]
    await asyncio.sleep(HEARD_S)
    before, of_a = await share(b, http), await share(a, http)
    second = await chat(http, b, messages)
    after = await share(b, http)
    assert second["node"] == "b"
    assert after["pulls"]["done"] == before["pulls"]["done"] + 1, b.log[-3000:]
    assert (await share(a, http))["pulls"]["served"] == of_a["pulls"]["served"] + 1
    assert after["moves"]["warm"] == before["moves"]["warm"] + 1
    assert reused_share(second) > 0.9


async def test_a_session_that_must_stay_is_not_pulled(nodes: Pair, http: aiohttp.ClientSession):
    a, b = nodes
    messages, off = opening(LONG), {"X-Viiwork-Kv-Share": "off"}
    first = await chat(http, a, messages, headers=off)
    messages += [said(first), {"role": "user", "content": "And the fourth?"}]
    await asyncio.sleep(HEARD_S)
    refused = (await share(a, http))["pulls"]["not_served"].get("not_here", 0)
    second = await chat(http, b, messages, headers=off)
    assert first["node"] == "a" and second["node"] == "b"
    assert second["timings"]["cache_n"] < 64
    assert (await share(a, http))["pulls"]["not_served"]["not_here"] == refused + 1


async def test_a_replica_is_passed_on_when_the_engine_that_made_it_lost_it(
    nodes: Pair, http: aiohttp.ClientSession
):
    """A's own replica went with its worker, and its slot with another session; B still has a copy."""
    a, b = nodes
    session, messages = uuid.uuid4().hex, opening(LONG)
    before = (await share(b, http))["received"]["done"]
    first = await chat(http, a, messages, session)
    await until_received(http, b, before)
    messages += [said(first), {"role": "user", "content": "And the fourth?"}]
    for _ in range(2):  # one slot: another session takes it
        await stream(http, a, opening(100), session=uuid.uuid4().hex, prefer="a")
    second = await stream(http, a, messages, session=session, prefer="a")
    assert second["node"] == "a" and reused_share(second) > 0.9


async def test_a_busy_home_hands_a_session_over_to_the_node_that_has_its_replica(
    nodes: Pair, http: aiohttp.ClientSession
):
    a, b = nodes
    session, messages = uuid.uuid4().hex, opening(LONG)
    for node in nodes:
        await node.until(http, "quiet", lambda s: s["kv_share"]["pushing"] == 0)
        await node.until_idle(http)
    before = (await share(a, http))["sent"]["done"]
    first = await stream(http, a, messages, session, prefer="a")
    assert first["node"] == "a"
    await a.until(http, "rid of its state", lambda s: s["kv_share"]["sent"]["done"] > before)
    await asyncio.sleep(HEARD_S)
    moves = (await share(b, http))["moves"]["warm"]
    long = asyncio.create_task(
        stream(http, a, opening(20), uuid.uuid4().hex, prefer="a", max_tokens=1200, ignore_eos=True)
    )
    await a.until(http, "busy", lambda s: s["models"][0]["busy"] == 1)
    messages += [
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And the fourth?"},
    ]
    second = await stream(http, a, messages, session)
    assert second["node"] == "b" and not long.done(), second
    assert reused_share(second) > 0.9
    assert (await share(b, http))["moves"]["warm"] == moves + 1
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    await a.until_idle(http, 30)
