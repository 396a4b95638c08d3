"""The simulated engine: its rules of reuse, and its HTTP as the node's own client speaks it."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from viiwork.bench.paced import Pace, PacedEngine, PacedServer
from viiwork.bench.paced_slots import Held, PacedSlots, answer_text, chat_prompt, common, tokens_of
from viiwork.engine.slots import SlotsClient
from viiwork.errors import KvError

QUICK = Pace(1e6, 1e5, 1e12, 1.0, 256)


def numbers(*parts: range) -> array[int]:
    return array("i", [n for part in parts for n in part])


def test_what_was_generated_reads_back_as_the_same_tokens():
    said = [{"role": "user", "content": "write a todo app\nwith tests"}]
    prompt = tokens_of(chat_prompt(said))
    made = answer_text(prompt, 50)
    there = prompt + tokens_of("".join(made))
    assert len(there) == len(prompt) + 50
    next_turn = [*said, {"role": "assistant", "content": "".join(made)}, {"role": "user", "content": "go"}]
    assert common(there, tokens_of(chat_prompt(next_turn))) == len(there)


def test_a_recurrent_state_goes_on_where_it_ends_and_falls_back_to_a_checkpoint_elsewhere():
    held = Held(numbers(range(100)), [40, 96])
    assert held.reusable(numbers(range(120))) == 100
    assert held.reusable(numbers(range(100))) == 96  # the same prompt again
    assert held.reusable(numbers(range(98), range(500, 510))) == 96
    assert held.reusable(numbers(range(95), range(500, 510))) == 40
    assert held.reusable(numbers(range(30), range(500, 510))) == 0
    restored = Held(numbers(range(100)))  # checkpoints are not in a save-file
    assert restored.reusable(numbers(range(120))) == 100
    assert restored.reusable(numbers(range(99), range(500, 510))) == 0


def test_a_prompt_takes_the_slot_that_is_like_it_else_the_oldest():
    slots = PacedSlots(3, 1 << 30, lambda n: n)
    for at, start in enumerate((0, 1000, 2000)):
        slots.slots[at].held.tokens = numbers(range(start, start + 100))
        slots.slots[at].used = 10 - at
    assert slots.choose(numbers(range(1000, 1120)), None) is slots.slots[1]
    assert slots.choose(numbers(range(5000, 5100)), None) is slots.slots[2]
    assert slots.choose(numbers(range(5000, 5100)), 0) is slots.slots[0]
    slots.slots[0].busy = True
    assert slots.choose(numbers(range(5000, 5100)), 0) is None


def test_what_a_slot_loses_comes_back_from_ram_until_that_is_full():
    slots = PacedSlots(1, 250, lambda n: n)
    (slot,) = slots.slots

    def run(prompt: array[int]) -> int:
        n = slots.begin(slot, prompt)
        slot.held.tokens.extend(prompt[n:])
        slot.busy = False
        return n

    a, b, c = (numbers(range(start, start + 100)) for start in (0, 1000, 2000))
    more = numbers(range(50_000, 50_010))
    assert [run(a), run(b), run(a + more), run(c), run(b + more)] == [0, 0, 100, 0, 100]
    assert run(a + more + more) == 110
    slots = PacedSlots(1, 150, lambda n: n)
    (slot,) = slots.slots
    assert [run(a), run(b), run(c), run(b + more), run(a + more)] == [0, 0, 0, 100, 0]
    slots = PacedSlots(1, 0, lambda n: n)
    (slot,) = slots.slots
    assert [run(a), run(b), run(a + more)] == [0, 0, 0]


def test_steps_take_what_the_rates_say():
    pace = Pace(1000.0, 50.0, 1e9, 4.0, 32)
    assert pace.step_s(500, 0, 1) == pytest.approx(0.125)
    assert pace.step_s(0, 1, 4) == pytest.approx(0.02)
    assert pace.step_s(0, 3, 4) == pytest.approx(0.02 * 1.3)
    assert pace.stall_s(1_000_000_000 // 32) == pytest.approx(0.25)


@asynccontextmanager
async def engine(folder: Path, n_slots: int = 2) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    made = PacedEngine(QUICK, n_slots, 1 << 30, folder)
    server = TestServer(PacedServer(made, "m", 4096).app())
    await server.start_server()
    loop = asyncio.create_task(made.run())
    try:
        async with aiohttp.ClientSession() as http:
            yield str(server.make_url("")).rstrip("/"), http
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        await server.close()


async def chat(http: aiohttp.ClientSession, url: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 20} | more
    async with http.post(url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_the_nodes_client_saves_restores_and_erases(tmp_path: Path):
    async with engine(tmp_path) as (url, http):
        client = SlotsClient(url, http, 2)
        assert (await client.health(5)).state == "ready"
        await client.warm_up(0, 5)
        said = [{"role": "user", "content": "w " * 2000}]
        first = await chat(http, url, said, id_slot=0)
        held = (await client.slots())[0].n_prompt_tokens
        assert held == first["timings"]["prompt_n"] + 19  # the last token made is not in memory
        saved = await client.save(0, "s", 30)
        assert (saved.n_saved, saved.n_written) == (held, (tmp_path / "s").stat().st_size)
        with pytest.raises(KvError):
            await client.restore(1, "s", 30)  # as slot 1 would not have written it
        assert (await client.slots())[1].n_prompt_tokens is None
        assert await client.erase(0) == held
        assert (await client.restore(0, "s", 30)).n_restored == held
        answer = first["choices"][0]["message"]["content"]
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and now?"}]
        assert (await chat(http, url, said, id_slot=0))["timings"]["cache_n"] == held


async def test_a_stream_tells_the_same_answer_and_its_counts(tmp_path: Path):
    async with engine(tmp_path) as (url, http):
        said = [{"role": "user", "content": "hello there"}]
        whole = await chat(http, url, said)
        body = {"messages": said, "max_tokens": 20, "stream": True}
        async with http.post(url + "/v1/chat/completions", json=body) as answer:
            lines = [line[6:] async for line in answer.content if line.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert text == whole["choices"][0]["message"]["content"]
        assert events[-1]["timings"]["predicted_n"] == 20
        assert events[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_a_client_that_leaves_frees_its_slot(tmp_path: Path):
    made = PacedEngine(Pace(1e6, 20.0, 1e12, 1.0, 256), 1, 1 << 30, tmp_path)
    server = TestServer(PacedServer(made, "m", 100_000).app())
    await server.start_server()
    loop = asyncio.create_task(made.run())
    try:
        async with aiohttp.ClientSession() as http:
            url = str(server.make_url("/v1/chat/completions"))
            said = [{"role": "user", "content": "hello"}]
            body = {"messages": said, "max_tokens": 50_000, "stream": True}
            async with http.post(url, json=body) as answer:
                await answer.content.readany()
            async with asyncio.timeout(30):
                await chat(http, str(server.make_url("")).rstrip("/"), said, max_tokens=1)
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        await server.close()


async def test_a_prompt_that_does_not_fit_is_refused(tmp_path: Path):
    async with engine(tmp_path) as (url, http):
        body = {"messages": [{"role": "user", "content": "w " * 9000}]}
        async with http.post(url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 400 and "4096" in (await answer.json())["error"]["message"]
