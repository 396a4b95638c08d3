"""Conversations over two real nodes: recognised at either of them, kept apart, and counted."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import aiohttp
import pytest

from .nodes import NodeProcess

pytestmark = pytest.mark.engine

Pair = tuple[NodeProcess, NodeProcess]
WORDS = "anchor bridge candle desert engine forest garden harbour island jacket".split()


def words(n: int) -> str:
    rng = random.Random(uuid.uuid4().int)
    return " ".join(rng.choice(WORDS) for _ in range(n))


async def turn(
    http: aiohttp.ClientSession, node: NodeProcess, messages: list[dict[str, str]], **headers: str
) -> dict[str, Any]:
    """One turn, its answer appended to the conversation."""
    body = {"model": "small", "messages": messages, "max_tokens": 8, "temperature": 0}
    async with http.post(f"{node.api}/v1/chat/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return answer["timings"] | {"node": response.headers["X-Viiwork-Node"]}


def opening(system: str = "") -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": f"{uuid.uuid4()} {words(200)}"}]


def goes_on(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    messages.append({"role": "user", "content": words(10)})
    return messages


async def hears(http: aiohttp.ClientSession, node: NodeProcess, peer: NodeProcess) -> None:
    """Wait until `node` has a report of `peer` that is younger than this call."""
    since = asyncio.get_running_loop().time()
    while True:
        body = await node.get(http, "/v1/fleet/capacity?model=small")
        age_ms = next(h["age_ms"] for h in body["models"][0]["hosts"] if h["node"] == peer.name)
        if age_ms < (asyncio.get_running_loop().time() - since) * 1000:
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("header", [{}, {"X-Session-Id": "mine"}], ids=["no header", "with a header"])
async def test_a_conversation_finds_its_home_whichever_node_it_enters_by(
    pair: Pair, http: aiohttp.ClientSession, header: dict[str, str]
):
    a, b = pair
    chat = opening()
    first = await turn(http, a, chat, **header)
    for entry in (b, a, b, b):
        await hears(http, b, a)
        await hears(http, a, b)
        held = first["cache_n"] + first["prompt_n"]
        then = await turn(http, entry, goes_on(chat), **header)
        assert then["node"] == first["node"] and then["cache_n"] >= 0.9 * held
        first = then
    said = [(await node.status(http))["sessions"] for node in pair]
    assert sum(s["hits"] for s in said) >= 4
    assert all(s["moves"]["nodes"] == 0 for s in said)


async def test_two_unlike_requests_under_one_header_run_at_once_and_the_chat_stays_warm(
    pair: Pair, http: aiohttp.ClientSession
):
    a, _ = pair
    header = {"X-Session-Affinity": f"one {uuid.uuid4()}"}
    chat = opening("You write code.")
    await turn(http, a, chat, **header)
    for _ in range(3):
        title = [
            {"role": "system", "content": "You write titles."},
            {"role": "user", "content": f"A title for: {words(20)}"},
        ]
        big, small = await asyncio.gather(
            turn(http, a, goes_on(chat), **header), turn(http, a, title, **header)
        )
        assert big["cache_n"] > big["prompt_n"] and small["prompt_n"] > 0


async def test_agents_without_a_header_that_begin_with_the_same_words_stay_apart(
    pair: Pair, http: aiohttp.ClientSession
):
    a, b = pair
    before = (await a.status(http))["sessions"]
    one, other = opening(), []
    other += [dict(message) for message in one]
    await turn(http, a, one)
    await turn(http, a, other)
    one.append({"role": "user", "content": words(10)})
    other.append({"role": "user", "content": words(12)})
    for chat in (one, other):
        assert (await turn(http, a, chat))["cache_n"] > 150
        await hears(http, b, a)  # asked at once as well, but a busy machine may answer too late
        assert (await turn(http, b, goes_on(chat)))["cache_n"] > 150
    after = (await a.status(http))["sessions"]
    assert after["new"] + after["forks"] - before["new"] - before["forks"] == 2
