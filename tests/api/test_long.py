"""Honest long work is never cut: no limit measures the whole of a request.

The clock of these tests jumps a second at a time, so that every timer of the node that would end a request
within the hour has its chance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.fakes.engine import CHAT_ANSWER, DONE, ROLE, Conn, FakeEngine, Seen, delta
from tests.fakes.node import FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient, Reply

CHAT = "/v1/chat/completions"
MINUTE_S = 60


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be put forward; it reads one while it is made."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


async def pass_time(seconds: int) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    for _ in range(seconds):
        loop.ahead_s += 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def first_token_after_12_minutes(conn: Conn, seen: Seen) -> None:
    await pass_time(12 * MINUTE_S)
    conn.stream_head()
    conn.chunk(ROLE + delta("late") + DONE)
    conn.end()


async def head_then_12_minutes_of_silence(conn: Conn, seen: Seen) -> None:
    conn.stream_head()
    conn.chunk(ROLE)
    await conn.drain()
    await pass_time(12 * MINUTE_S)
    conn.chunk(delta("late") + DONE)
    conn.end()


async def a_token_each_20_seconds_for_40_minutes(conn: Conn, seen: Seen) -> None:
    conn.stream_head()
    for _ in range(120):
        conn.chunk(delta("x"))
        await pass_time(20)
    conn.chunk(DONE)
    conn.end()


async def a_plain_answer_after_12_minutes(conn: Conn, seen: Seen) -> None:
    await pass_time(12 * MINUTE_S)
    conn.json(200, CHAT_ANSWER)


async def through(script, hops: int, *, stream: bool, queued_s: int = 0) -> tuple[Reply, FakeDispatcher]:
    async with FakeEngine(script) as engine:
        gate = asyncio.Event()
        b = FakeDispatcher([route("b", engine.url)], gate=None if hops else gate)
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)], gate=gate)
            async with serving(a, facts=FakeFacts("a")) as api_a:
                entry, port = (a, api_a.port) if hops else (b, api_b.port)
                async with RawClient(port) as client:
                    client.post(CHAT, {"model": "m", "stream": stream})
                    await entry.until(lambda: entry.n_waiting == 1)
                    await pass_time(queued_s)
                    gate.set()
                    reply = await client.reply()
        assert len(engine.requests) == 1
    return reply, b


@pytest.mark.parametrize("hops", [0, 1])
@pytest.mark.parametrize("queued_s", [0, 19])
@pytest.mark.parametrize(
    ("script", "n_tokens"),
    [
        (first_token_after_12_minutes, 1),
        (head_then_12_minutes_of_silence, 1),
        (a_token_each_20_seconds_for_40_minutes, 120),
        (a_plain_answer_after_12_minutes, 0),
    ],
)
def test_work_that_takes_long_is_finished(
    script: Callable[..., object], n_tokens: int, queued_s: int, hops: int
):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        reply, b = runner.run(through(script, hops, stream=n_tokens > 0, queued_s=queued_s))
    assert reply.whole and reply.status == 200 and b.results == ["done"]
    if n_tokens:
        assert reply.body.count(b'"content":"') == n_tokens and reply.body.endswith(DONE)
        n_comments = reply.body.count(b":\n\n")
        assert n_comments >= (60 if n_tokens == 1 else 100), "each 10 s of silence are bridged"
