"""What breaks in the middle of a request or a transfer, on real nodes with the real engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .nodes import NodeProcess, alive, model_entry
from .test_two_nodes import chat, opening, reused_share, said

pytestmark = pytest.mark.engine

Pair = tuple[NodeProcess, NodeProcess]


def long_answer(model: str = "small", *, stream: bool = True) -> dict[str, Any]:
    """A request that keeps a slot busy until somebody stops it."""
    question = [{"role": "user", "content": "Count to ten thousand."}]
    return {"model": model, "messages": question, "max_tokens": 900, "stream": stream, "ignore_eos": True}


@contextlib.asynccontextmanager
async def streaming(
    http: aiohttp.ClientSession, node: NodeProcess, model: str = "small", on: str = ""
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream that has begun: its first token is there."""
    url = f"{node.api}/v1/chat/completions?host={on}"
    async with http.post(url, json=long_answer(model)) as response:
        assert response.status == 200
        while b'"content":"' not in await response.content.readany():
            pass
        yield response


async def rest_of(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """What still comes, and whether the connection broke instead of ending."""
    data = b""
    try:
        async for chunk in response.content.iter_any():
            data += chunk
    except aiohttp.ClientError:
        return data, True
    return data, False


def assert_not_complete(data: bytes, broken: bool) -> None:
    assert broken or b'"error"' in data
    assert b"[DONE]" not in data and b'"finish_reason":"stop"' not in data


async def test_an_engine_killed_mid_stream_is_an_error_for_its_client_and_comes_back(
    pair: Pair, http: aiohttp.ClientSession
):
    a, _ = pair
    await a.until_idle(http, 30)
    async with streaming(http, a, on="a") as response:
        await a.status(http)
        os.kill(a.engine_pids()["small/0"], signal.SIGKILL)
        assert_not_complete(*await rest_of(response))
    await a.until_idle(http)
    await a.until(http, "aware of it", lambda s: s["models"][0]["backends"][0]["respawns"] > 0, 10)
    await a.until_healthy(http)
    assert (await chat(http, a, [{"role": "user", "content": "hi"}]))["node"] == "a"
    assert "Traceback" not in a.log


async def test_a_node_killed_mid_forward_breaks_the_stream_and_leaves_no_lease(
    pair: Pair, http: aiohttp.ClientSession
):
    a, b = pair
    async with streaming(http, a, "only-b") as response:
        await b.status(http)
        engines = b.engine_pids()
        b.kill()
        assert_not_complete(*await rest_of(response))
    await a.until_idle(http)
    async with asyncio.timeout(5):
        while any(alive(pid) for pid in engines.values()):
            await asyncio.sleep(0.05)
    assert b.process is not None
    b.process.wait()
    joins = a.log.count("member.joined name=b")
    b.start()
    await b.until_healthy(http)
    async with asyncio.timeout(20):
        while a.log.count("member.joined name=b") == joins:
            await asyncio.sleep(0.05)
    await a.until_sees(http, "only-b", 1)
    assert (await chat(http, a, [{"role": "user", "content": "hi"}], model="only-b"))["node"] == "b"
    assert "Traceback" not in a.log


@pytest.mark.parametrize(
    ("stream", "after_first_token", "model", "within_s"),
    [
        (True, False, "small", 8),
        (True, True, "small", 3),
        (False, False, "small", 6),
        (True, True, "only-b", 3),
        (False, False, "only-b", 6),
    ],
    ids=["before the first token", "mid-stream", "not streamed", "forwarded", "forwarded, not streamed"],
)
async def test_a_client_that_leaves_frees_the_engines_slot_and_every_count(
    pair: Pair,
    http: aiohttp.ClientSession,
    stream: bool,
    after_first_token: bool,
    model: str,
    within_s: float,
):
    a, b = pair
    runs = b if model == "only-b" else a
    body = long_answer(model, stream=stream)
    if stream and not after_first_token:
        body["messages"] = opening(150)  # a second or two of prefill, in one batch that nothing interrupts
    url = f"{a.api}/v1/chat/completions?host={runs.name}"  # a conversation of nobody may run on either
    response = asyncio.create_task(http.post(url, json=body))
    await runs.until(http, "busy", lambda s: any(m["busy"] for m in s["models"] if m["name"] == model), 20)
    if stream:  # the engine sends the head of a stream at once
        answer = await response
        while after_first_token and b'"content":"' not in await answer.content.readany():
            pass
        answer.close()
    else:
        assert response.cancel(), "the answer has begun before the client could leave"
        await asyncio.wait((response,))
    # The engine itself must have stopped: `busy` is the larger of its own count and the node's.
    for node in pair:
        await node.until_idle(http, within_s)
        assert "Traceback" not in node.log


async def test_a_worker_killed_while_it_sends_costs_a_cold_turn_and_nothing_else(
    pair: Pair, http: aiohttp.ClientSession
):
    a, b = pair
    status_a, status_b = await a.status(http), await b.status(http)
    frozen, sender = status_b["kv_share"]["worker"]["pid"], status_a["kv_share"]["worker"]["pid"]
    os.kill(frozen, signal.SIGSTOP)  # the transfer starts and cannot end
    try:
        messages, session = opening(), uuid.uuid4().hex
        first = await chat(http, a, messages, session)
        await a.until(http, "sending", lambda s: s["kv_share"]["worker"]["running"] > 0, 10)
        os.kill(sender, signal.SIGKILL)
        await a.until(http, "told", lambda s: s["kv_share"]["sent"]["failed"].get("worker_died"), 10)
    finally:
        os.kill(frozen, signal.SIGCONT)
    messages += [said(first), {"role": "user", "content": "Go on."}]
    cold = await chat(http, b, messages, session)
    assert cold["node"] == "b" and reused_share(cold) < 0.5
    await _shares_again(http, a, b)


async def test_a_worker_killed_while_it_receives_is_replaced_and_sharing_goes_on(
    pair: Pair, http: aiohttp.ClientSession
):
    a, b = pair
    receiver = (await b.status(http))["kv_share"]["worker"]["pid"]
    os.kill(receiver, signal.SIGSTOP)
    await chat(http, a, opening(), uuid.uuid4().hex)
    await a.until(http, "sending", lambda s: s["kv_share"]["worker"]["running"] > 0, 10)
    os.kill(receiver, signal.SIGKILL)
    await b.until(http, "told", lambda s: s["kv_share"]["received"]["failed"].get("worker_died"), 10)
    await a.until(http, "told", lambda s: s["kv_share"]["sent"]["failed"].get("link_lost"), 15)
    await _shares_again(http, a, b)


async def _shares_again(http: aiohttp.ClientSession, a: NodeProcess, b: NodeProcess) -> None:
    for node in (a, b):
        await node.until(http, "up", lambda s: s["kv_share"]["worker"]["up"], 20)
        await node.until_idle(http)
        assert "Traceback" not in node.log
    before = (await b.status(http))["kv_share"]["received"]["done"]
    await chat(http, a, opening(), uuid.uuid4().hex)
    await b.until(http, "given a state", lambda s: s["kv_share"]["received"]["done"] > before, 20)


@pytest.fixture
async def lonely(tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession) -> AsyncIterator[NodeProcess]:
    node = NodeProcess("lonely", "127.0.11.1", tmp_path, model_entry("small", smollm2, context=512))
    node.start()
    try:
        await node.until_healthy(http)
        yield node
    finally:
        node.end()


async def test_a_killed_node_leaves_no_engine_no_worker_and_starts_again_at_once(
    lonely: NodeProcess, http: aiohttp.ClientSession
):
    status = await lonely.status(http)
    left = [*lonely.engine_pids().values(), status["kv_share"]["worker"]["pid"]]
    lonely.kill()
    assert lonely.process is not None
    lonely.process.wait()
    async with asyncio.timeout(5):
        while any(alive(pid) for pid in left):
            await asyncio.sleep(0.05)
    lonely.start()
    await lonely.until_healthy(http)


async def test_a_terminated_node_lets_its_streams_end_and_takes_no_more(
    lonely: NodeProcess, http: aiohttp.ClientSession
):
    body = long_answer() | {"max_tokens": 300}
    async with http.post(f"{lonely.api}/v1/chat/completions", json=body) as response:
        await response.content.readany()
        await lonely.status(http)
        engines = [*lonely.engine_pids().values()]
        lonely.kill(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (refused := await _newcomer(http, lonely))[0] != 503:
                assert refused[0] == 200, "told, not cut off"
        assert refused[1] == "5"
        data, broken = await rest_of(response)
        assert not broken and data.endswith(b"data: [DONE]\n\n")
    assert lonely.process is not None
    assert await asyncio.to_thread(lonely.process.wait, 20) == 0
    assert engines and not any(alive(pid) for pid in engines)
    assert "Traceback" not in lonely.log


async def _newcomer(http: aiohttp.ClientSession, node: NodeProcess) -> tuple[int, str]:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with http.post(f"{node.api}/v1/chat/completions", json=body) as response:
        await response.read()
        return response.status, response.headers.get("Retry-After", "")


async def test_a_full_replica_store_turns_states_away_and_turns_run_cold(
    tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    small = model_entry("small", smollm2)
    a = NodeProcess("a", "127.0.12.1", tmp_path, small, extra="kv_share: {min_tokens: 64}")
    b = NodeProcess("b", "127.0.12.2", tmp_path, small, (a.seed,), "kv_share: {min_tokens: 64, memory: 2MiB}")
    try:
        for node in (a, b):
            node.start()
        for node in (a, b):
            await node.until_healthy(http)
            await node.until_sees(http, "small", 2)
        messages, session = opening(), uuid.uuid4().hex
        first = await chat(http, a, messages, session)
        await a.until(http, "refused", lambda s: s["kv_share"]["sent"]["failed"].get("no_space"), 20)
        messages += [said(first), {"role": "user", "content": "Go on."}]
        cold = await chat(http, b, messages, session)
        assert cold["node"] == "b" and reused_share(cold) < 0.5
        assert (await b.status(http))["kv_share"]["replicas"] == 0
    finally:
        for node in (a, b):
            node.end()
