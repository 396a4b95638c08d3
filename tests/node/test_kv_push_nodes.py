"""What travels between two real nodes with the real engine, and that it is there when a node goes."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .nodes import NodeProcess, model_entry
from .test_two_nodes import Pair, chat, opening, reused_share, said, text_of, until_pushed

pytestmark = pytest.mark.engine

ROOM_BYTES = 64 * 1024


async def pushed(http: aiohttp.ClientSession, node: NodeProcess) -> dict[str, Any]:
    """The newest transfer, once nothing is on its way any more."""
    await until_pushed(http, node)
    newest = (await node.status(http))["kv_share"]["last"]
    last: dict[str, Any] = [t for t in newest if t["what"] == "send" and t["result"] == "done"][-1]
    return last


def rest(messages: list[dict[str, str]], answer: dict[str, Any], question: str) -> list[dict[str, str]]:
    return [*messages, said(answer), {"role": "user", "content": question}]


async def test_a_turn_costs_the_bytes_of_its_own_tokens_on_the_wire(pair: Pair, http: aiohttp.ClientSession):
    a, _ = pair
    messages, session = opening(300), uuid.uuid4().hex
    answer = await chat(http, a, messages, session)
    first = await pushed(http, a)
    assert first["kept"] == 0
    per_token = first["state_bytes"] / first["tokens"]
    before = first
    for question in ("And the fourth?", " ".join(m["content"] for m in opening(120)), "Go on."):
        messages = rest(messages, answer, question)
        answer = await chat(http, a, messages, session)
        sent = await pushed(http, a)
        n_new = sent["tokens"] - before["tokens"]
        assert n_new > 0 and sent["generation"] > before["generation"]
        # The chat template may read the end of the last answer anew.
        assert before["tokens"] - 4 <= sent["kept"] <= before["tokens"]
        assert sent["wire_bytes"] <= 1.03 * (sent["tokens"] - sent["kept"]) * per_token + ROOM_BYTES
        assert sent["wire_bytes"] <= 1.03 * n_new * per_token + 4 * per_token + ROOM_BYTES
        before = sent


async def test_a_session_that_was_edited_forked_and_cut_is_sent_cheaply_and_continues_right(
    pair: Pair, http: aiohttp.ClientSession
):
    a, b = pair
    trunk, session = opening(200), uuid.uuid4().hex
    first = await chat(http, a, trunk, session)
    left, right = rest(trunk, first, "And the first?"), rest(trunk, first, "Name another one, please.")
    await chat(http, a, left, session)
    await pushed(http, a)
    other = await chat(http, a, right, session)  # the other branch of the same turn
    forked = await pushed(http, a)
    assert forked["kept"] >= 200
    right = rest(right, other, "Why?")
    at_home = await chat(http, a, right, session, headers={"X-Viiwork-Kv-Share": "off"})
    moved = await chat(http, b, right, session)
    assert (at_home["node"], moved["node"]) == ("a", "b") and reused_share(moved) > 0.9
    assert text_of(moved) == text_of(at_home)


async def test_a_session_that_moves_to_and_fro_is_sent_as_deltas_of_what_each_side_had(
    pair: Pair, http: aiohttp.ClientSession
):
    messages, session = opening(300), uuid.uuid4().hex
    sent: list[dict[str, Any]] = []
    for n in range(4):
        node = pair[n % 2]
        answer = await chat(http, node, messages, session)
        assert answer["node"] == node.name and (n == 0 or reused_share(answer) > 0.9)
        sent.append(await pushed(http, node))
        messages = rest(messages, answer, "Go on.")
    # Whole groups of rows alone would be found by their digests; the marks of both sides tell of each row.
    for newer, held in ((sent[2], sent[0]), (sent[3], sent[1])):
        assert held["tokens"] - 4 <= newer["kept"] <= held["tokens"]


class Leaving:
    """A has had a session to itself when B comes, so nothing is pushed before A ends."""

    def __init__(self, folder: Path, model: Path) -> None:
        entry, extra = model_entry("small", model), "kv_share: {min_tokens: 64}"
        self.a = NodeProcess("a", "127.0.21.1", folder, entry, extra=extra)
        self.b = NodeProcess("b", "127.0.21.2", folder, entry, extra=extra)
        self.a.seeds, self.b.seeds = (self.b.seed,), (self.a.seed,)
        self.session = uuid.uuid4().hex
        self.messages: list[dict[str, str]] = []

    async def begin(self, http: aiohttp.ClientSession) -> None:
        self.a.start()
        await self.a.until_healthy(http)
        messages = opening(300)
        answer = await chat(http, self.a, messages, self.session)
        self.messages = rest(messages, answer, "Go on.")
        await until_pushed(http, self.a)
        self.b.start()
        await self.b.until_healthy(http)
        # A lists B as one of those its states may go to.
        status = await self.a.until(http, "in one mesh with B", lambda s: s["kv_share"]["links"])
        assert status["kv_share"]["sent"]["done"] == 0

    async def next_turn(self, http: aiohttp.ClientSession, node: NodeProcess) -> dict[str, Any]:
        return await chat(http, node, self.messages, self.session)


@pytest.fixture
async def leaving(tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession) -> AsyncIterator[Leaving]:
    made = Leaving(tmp_path, smollm2)
    try:
        await made.begin(http)
        yield made
    finally:
        for node in (made.a, made.b):
            node.end()


async def test_a_node_that_ends_hands_its_sessions_over_first(leaving: Leaving, http: aiohttp.ClientSession):
    a, b = leaving.a, leaving.b
    running = asyncio.create_task(chat(http, a, opening(150), uuid.uuid4().hex, max_tokens=100))
    await a.until(http, "busy", lambda s: s["requests"]["leases"] > 0)
    a.kill(signal.SIGTERM)
    assert (await running)["node"] == "a"
    assert a.process is not None and await asyncio.to_thread(a.process.wait, 60) == 0
    status = await b.until(http, "given both", lambda s: s["kv_share"]["received"]["done"] == 2, 5)
    assert status["kv_share"]["replicas"] == 2
    moved = await leaving.next_turn(http, b)
    assert moved["node"] == "b" and reused_share(moved) > 0.9


@pytest.mark.parametrize("by", ["down", "reload"])
async def test_a_model_that_is_parked_or_removed_hands_its_sessions_over_first(
    by: str, leaving: Leaving, http: aiohttp.ClientSession
):
    a = leaving.a
    if by == "reload":
        a.models = ""
        a.reload()
    else:
        async with http.post(f"{a.api}/v1/models/down", json={}) as response:
            assert response.status == 200
    await a.until_logged("[small/0] ended")
    moved = await leaving.next_turn(http, a)
    assert moved["node"] == "b" and reused_share(moved) > 0.9


async def test_a_second_signal_waits_for_no_handover(leaving: Leaving, http: aiohttp.ClientSession):
    a, b = leaving.a, leaving.b
    b.kill(signal.SIGSTOP)  # it takes nothing, and does not say so
    a.kill(signal.SIGTERM)
    await a.until_logged("kv_share.handing_over backend=all sessions=1")
    a.kill(signal.SIGTERM)
    assert a.process is not None and await asyncio.to_thread(a.process.wait, 50) == 0


async def test_a_last_copy_comes_home_after_another_session_took_its_slot(
    tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    """Of an engine with one slot and without a RAM cache, on a node without peers."""
    entry = model_entry("small", smollm2, parallel=1).replace("threads: 1", "threads: 1, cache_ram_mib: 0")
    a = NodeProcess("a", "127.0.21.3", tmp_path, entry, extra="kv_share: {min_tokens: 64}")
    try:
        a.start()
        await a.until_healthy(http)
        async with asyncio.timeout(60):
            while not (await a.get(http, "/v1/capacity"))["models"][0].get("kv"):
                await asyncio.sleep(0.05)  # what its states look like is learned in an idle slot
        messages, session = opening(300), uuid.uuid4().hex
        answer = await chat(http, a, messages, session)
        await chat(http, a, opening(100), uuid.uuid4().hex)
        status = await a.until(http, "kept", lambda s: s["kv_share"]["kept"]["done"] == 1, 20)
        assert status["kv_share"]["replicas"] == 1
        back = await chat(http, a, rest(messages, answer, "Go on."), session)
        assert reused_share(back) > 0.9
    finally:
        a.end()
