"""Both clients against a real API and against servers that misbehave."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.fakes.node import FakeDispatcher, FakeFacts, serving
from viiwork.client import AsyncFleetCapacity, FleetCapacity, fleet
from viiwork.limits import FLEET_BODY_MAX_BYTES, FLEET_POLL_S

Client = FleetCapacity | AsyncFleetCapacity


class Facts(FakeFacts):
    """Answers about the fleet with what the test says, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[dict[str, Any]] = [{"node": "a", "slots": 4}]
        self.asked: list[str | None] = []
        self.fault: Exception | None = None

    def fleet_capacity(self, model: str | None) -> dict[str, Any]:
        self.asked.append(model)
        if self.fault is not None:
            raise self.fault
        return {"view": "a", "stale_after_s": 3, "models": [{"name": model, "hosts": self.hosts}]}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=[FleetCapacity, AsyncFleetCapacity], ids=["threads", "asyncio"])
def make(request) -> Callable[..., Client]:
    return request.param


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def slots(client: Client) -> int:
    if isinstance(client, AsyncFleetCapacity):
        return await client.slots()
    return await asyncio.to_thread(client.slots)


async def per_url(client: Client) -> dict[str, int]:
    if isinstance(client, AsyncFleetCapacity):
        return await client.per_url()
    return await asyncio.to_thread(client.per_url)


class Server:
    """Answers every connection with the same bytes; `hold` keeps them back."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self.n = 0
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.go.set()
        self._server.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            self.head = await reader.readuntil(b"\r\n\r\n")
            self.n += 1
            self.asked.set()
            await self.go.wait()
            writer.write(self.reply)
            await writer.drain()
        await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def reply(status: str, body: bytes, *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


BODY = b'{"models":[{"name":"m","hosts":[{"node":"a","slots":9}]}]}'


@pytest.fixture
async def api() -> AsyncIterator[tuple[str, Facts]]:
    facts = Facts()
    async with serving(FakeDispatcher([]), facts=facts) as api:
        yield api.url, facts


async def test_the_mesh_is_asked_once_in_five_minutes(make, api, clock):
    url, facts = api
    client = make(url, "a/b é", configured=2, clock=clock)
    assert client.reason == "not_asked"
    assert [await slots(client) for _ in range(5)] == [4] * 5 and facts.asked == ["a/b é"]
    assert await per_url(client) == {url: 4} and client.reason == "fleet"
    facts.hosts = [{"node": "a", "slots": 4}, {"node": "b", "api": "10.0.0.2:1", "slots": 6}]
    clock.now += FLEET_POLL_S - 1
    assert await slots(client) == 4
    clock.now += 1
    assert await per_url(client) == {url: 4, "http://10.0.0.2:1": 6} and await slots(client) == 10
    assert len(facts.asked) == 2


async def test_a_question_that_failed_is_not_repeated_before_its_time_either(make, api, clock):
    url, facts = api
    facts.fault = RuntimeError("a bug")
    client = make(url, "m", configured=2, clock=clock)
    assert [await slots(client) for _ in range(3)] == [2, 2, 2]
    assert client.reason == "server_error" and len(facts.asked) == 1
    facts.fault = None
    clock.now += FLEET_POLL_S
    assert await slots(client) == 4 and client.reason == "fleet"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (reply("200 OK", BODY), "fleet"),
        (reply("200 OK", BODY[:-5]), "bad_answer"),
        (reply("200 OK", BODY).replace(b"Length: 5", b"Length: 9"), "unreachable"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", "unreachable"),
        (reply("200 OK", b" " * (FLEET_BODY_MAX_BYTES + 9)), "bad_answer"),
        (reply("404 Not Found", b""), "not_found"),
        (reply("502 Bad Gateway", b"<html>"), "server_error"),
        (reply("302 Found", b"", "Location: http://127.0.0.1:9/"), "refused"),
        (reply("200 OK", b'{"models":[]}'), "model_absent"),
        (reply("200 OK", b'{"models":[{"name":"m","hosts":[{"stale":true}]}]}'), "all_stale"),
        (reply("200 OK", BODY.replace(b"9", b"1")), "below_configured"),
        (b"", "unreachable"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "unreachable"),
    ],
)
async def test_every_way_an_answer_can_go_wrong_ends_at_the_configured_number(make, raw, reason):
    async with Server(raw) as server:
        client = make(server.url, "m", configured=3)
        assert await slots(client) == (9 if reason == "fleet" else 3)
        assert client.reason == reason


async def test_nobody_there_and_somebody_who_never_answers_are_unreachable(make, monkeypatch):
    monkeypatch.setattr(fleet, "FLEET_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        client = make(f"http://127.0.0.1:{port}", "m", configured=3)
        assert await slots(client) == 3 and client.reason == "unreachable"
    client = make(f"http://127.0.0.1:{port}", "m", configured=3)
    assert await slots(client) == 3 and client.reason == "unreachable"


async def test_a_server_that_drips_bytes_does_not_hold_the_caller(make, monkeypatch):
    monkeypatch.setattr(fleet, "FLEET_TIMEOUT_S", 0.5)

    done = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.05)
        await closed(writer)
        done.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = make(f"http://127.0.0.1:{port}", "m", configured=3)
        async with asyncio.timeout(30):
            assert await slots(client) == 3
            await done.wait()
        assert client.reason == "unreachable"


async def test_proxies_of_the_environment_are_not_asked(make, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with Server(reply("200 OK", BODY)) as server:
        assert await slots(make(server.url, "m", configured=3)) == 9
        assert server.head.startswith(b"GET /v1/fleet/capacity?model=m HTTP/1.1")


async def test_a_path_before_the_api_is_kept(make):
    async with Server(reply("200 OK", BODY)) as server:
        client = make(server.url + "/mesh/", "m", configured=3)
        assert await slots(client) == 9 and await per_url(client) == {server.url + "/mesh": 9}
        assert server.head.startswith(b"GET /mesh/v1/fleet/capacity?model=m HTTP/1.1")


async def test_which_branch_was_taken_is_logged_when_it_changes(make, api, clock, caplog):
    caplog.set_level(logging.INFO)
    url, facts = api
    client = make(url, "m", configured=2, clock=clock)
    for fault in (None, None, RuntimeError(), RuntimeError()):
        facts.fault = fault
        await slots(client)
        clock.now += FLEET_POLL_S
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "viiwork.client.fleet"]
    assert lines == [
        ("INFO", "fleet.capacity model=m slots=4 reason=fleet"),
        ("WARNING", "fleet.capacity model=m slots=3 reason=server_error"),
        ("WARNING", "fleet.capacity model=m slots=2 reason=server_error"),
    ]


async def test_many_threads_ask_once_and_wait_only_for_the_first_answer(clock):
    async with Server(reply("200 OK", BODY)) as server:
        client = FleetCapacity(server.url, "m", configured=2, clock=clock)
        server.go.clear()
        with ThreadPoolExecutor(16) as pool:
            loop = asyncio.get_running_loop()
            first = [loop.run_in_executor(pool, client.slots) for _ in range(16)]
            await server.asked.wait()
            server.go.set()
            assert await asyncio.gather(*first) == [9] * 16 and server.n == 1
            clock.now += FLEET_POLL_S
            server.asked.clear()
            server.go.clear()
            slow = loop.run_in_executor(pool, client.slots)
            await server.asked.wait()
            # The others do not wait for a node that takes its time.
            assert (
                await asyncio.gather(*(loop.run_in_executor(pool, client.slots) for _ in range(8))) == [9] * 8
            )
            assert not slow.done()
            server.go.set()
            assert await slow == 9 and server.n == 2


async def test_many_tasks_ask_once_and_one_that_is_cancelled_takes_nothing_from_the_others(clock):
    async with Server(reply("200 OK", BODY)) as server:
        client = AsyncFleetCapacity(server.url, "m", configured=2, clock=clock)
        server.go.clear()
        first, *others = [asyncio.create_task(client.slots()) for _ in range(16)]
        await server.asked.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled() and not any(task.done() for task in others)
        server.go.set()
        assert await asyncio.gather(*others) == [9] * 15 and server.n == 1
        clock.now += FLEET_POLL_S
        server.asked.clear()
        server.go.clear()
        slow = asyncio.create_task(client.slots())
        await server.asked.wait()
        assert await client.slots() == 9 and not slow.done()
        server.go.set()
        assert await slow == 9 and server.n == 2


def test_a_loop_that_ends_in_the_middle_of_a_question_leaves_a_client_that_can_ask_again():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AsyncFleetCapacity(f"http://127.0.0.1:{silent.getsockname()[1]}", "m", configured=2)

        async def give_up() -> None:
            task = asyncio.create_task(client.slots())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()

        asyncio.run(give_up())
        assert client._asking is None and client.reason == "not_asked"
        assert asyncio.run(client.slots()) == 2


def test_importing_the_client_starts_nothing():
    before = threading.active_count()
    FleetCapacity("http://127.0.0.1:9", "m", configured=1)
    assert threading.active_count() == before
