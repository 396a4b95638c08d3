"""Sessions of the workload: reproducible, growing, compacted; and what a turn is told of them."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from viiwork.bench.agents import Agent, Drive, Shape, Turn, drive
from viiwork.bench.paced_slots import chat_prompt, tokens_of

SHAPE = Shape()


def steps(number: int, seed: int, n: int, shape: Shape = SHAPE):
    agent = Agent(number, seed, shape)
    found = []
    for _ in range(n):
        found.append(agent.next_step())
        agent.answered("word " * (found[-1].max_tokens * 4 // 5))
    return found


def test_a_seed_says_everything_about_a_session_and_sessions_differ():
    assert steps(3, 7, 40) == steps(3, 7, 40)
    assert steps(3, 7, 5) != steps(4, 7, 5) != steps(4, 8, 5)
    a, b = (steps(number, 7, 1)[0].messages for number in (3, 4))
    assert a[0] == b[0] and a[1] != b[1]  # one system prompt, another task


def test_a_session_grows_by_its_turns_and_begins_anew_when_it_is_full():
    found = steps(0, 1, 60)
    sizes = [len(tokens_of(chat_prompt(step.messages))) for step in found]
    assert 14_000 < min(sizes) < 17_500
    assert max(sizes) < 65_536
    compacted = [at for at, step in enumerate(found) if step.compacted]
    assert len(compacted) >= 2
    for at, (before, after) in enumerate(pairwise(found), 1):
        if after.compacted:
            assert sizes[at] < 0.7 * sizes[at - 1]
        else:
            assert after.messages[: len(before.messages)] == before.messages
            assert len(after.messages) == len(before.messages) + 2


def test_sessions_begin_somewhere_in_the_middle_with_a_question():
    begun = [steps(number, 1, 1)[0] for number in range(12)]
    sizes = [len(tokens_of(chat_prompt(step.messages))) for step in begun]
    assert max(sizes) - min(sizes) > 10_000 and max(sizes) < SHAPE.compact_tokens * 1.1
    assert {step.messages[-1]["role"] for step in begun} == {"user"}
    assert all(0 <= step.think_s <= SHAPE.begin_s for step in begun)


def test_a_turn_appends_about_what_the_published_delta_holds():
    grown = [
        len(tokens_of(chat_prompt(b.messages))) - len(tokens_of(chat_prompt(a.messages)))
        for number in range(3)
        for a, b in pairwise(steps(number, 5, 20))
        if not b.compacted
    ]
    mean = sum(grown) / len(grown)
    # 247 MiB less the recurrent 149.6 MiB, at 64 KiB a token.
    assert 1200 < mean < 1900


def test_sessions_fit_a_smaller_slot():
    found = steps(0, 1, 60, SHAPE.fitting(4096))
    assert max(len(tokens_of(chat_prompt(step.messages))) + step.max_tokens for step in found) < 4096
    assert any(step.compacted for step in found)
    assert SHAPE.fitting(65_536) == SHAPE


async def taken(answers: list[web.Response | bytes], n: int) -> list[Turn]:
    """Turns of one agent at a server that gives these answers, one after the other."""
    left = iter(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["X-Session-Id"] == "bench-1-0"
        made = next(left)
        if isinstance(made, web.Response):
            return made
        return web.Response(body=made, headers={"X-Viiwork-Node": "a" if len(run.turns) < 2 else "b"})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/chat/completions", answer)
    run = Drive("m", 1e6, time.monotonic(), 1e9, 0.0, time.monotonic() + 600, lambda turn: None)

    def tell(turn: Turn) -> None:
        if len(run.turns) == n:
            run.until = 0.0

    run.tell = tell
    server = TestServer(app)
    await server.start_server()
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            await drive(0, Agent(0, 1, SHAPE), str(server.make_url("")).rstrip("/"), http, run, retry_s=0.0)
    finally:
        await server.close()
    return run.turns


def stream(*events: dict) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    )


SAID = {"choices": [{"delta": {"content": "hello"}}]}
END = {"choices": [{"delta": {}}], "timings": {"cache_n": 90, "prompt_n": 10}}


async def test_a_turn_learns_its_node_its_reuse_and_its_first_token():
    first, second, third = await taken([stream(SAID, END), stream(SAID), stream(SAID, END)], 3)
    assert (first.node, first.cached, first.prompt, first.moved) == ("a", 90, 100, False)
    assert first.ttft_s > 0 and not first.failed
    assert second.cached is None and not second.moved
    assert third.node == "b" and third.moved


async def test_a_turn_that_fails_is_asked_again():
    bad = [web.Response(status=429), stream({"error": {"message": "gone"}}), stream()]
    found = await taken([*bad, stream(SAID, END)], 4)
    assert [turn.failed for turn in found] == ["status 429", "cut off", "no answer", ""]
    assert {turn.compacted for turn in found} == {False}


@pytest.mark.parametrize("line", [b"data: {not json\n\n", b"data: {" + b"x" * (9 << 20) + b"\n\n"])
async def test_an_answer_that_is_no_stream_is_a_failed_turn(line: bytes):
    (first, second) = await taken([line, stream(SAID, END)], 2)
    assert first.failed and not second.failed
