"""Several real nodes with engines that do as told: counting slots, waiting, and containing faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from .nodes import NodeProcess, model_entry

ENGINE = Path(__file__).parent.parent / "fakes" / "chat_engine.py"


def fake_model(folder: Path, name: str, parallel: int) -> str:
    weights = folder / f"{name}.gguf"
    weights.write_bytes(b"GGUF")
    binary = folder / "chat-engine"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    binary.chmod(0o755)
    return model_entry(name, weights, parallel=parallel, binary=str(binary))


@pytest.fixture
async def fleet(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncIterator[Callable[..., Any]]:
    """`await fleet(a="model lines", ...)`: nodes by name, in one mesh."""
    nodes: list[NodeProcess] = []

    async def start(routing: str = "", env: dict[str, str] | None = None, **models: str) -> list[NodeProcess]:
        for number, (name, lines) in enumerate(models.items(), 1):
            extra = f"routing: {{{routing}}}\nkv_share: {{enabled: false}}"
            seeds = (nodes[0].seed,) if nodes else ()
            node = NodeProcess(name, f"127.0.13.{number}", tmp_path, lines, seeds, extra, env or {})
            nodes.append(node)
            node.start()
        for node in nodes:
            await node.until_healthy(http)
        return nodes

    yield start
    for node in nodes:
        node.end()


def question(text: str, model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]} | more


async def ask(http: aiohttp.ClientSession, node: NodeProcess, body: dict[str, Any]) -> int:
    async with http.post(f"{node.api}/v1/chat/completions", json=body) as response:
        await response.read()
        return response.status


async def seen_by_engine(http: aiohttp.ClientSession, node: NodeProcess, model: str) -> list[str]:
    """Contents of the chats that reached the model's engine, in order; asked of the engine itself."""
    log = node.log
    port = log.rsplit(f"[{model}/0] process", 1)[1].split("on port ")[1].split()[0]
    async with http.get(f"http://127.0.0.1:{port}/seen") as response:
        seen: list[str] = await response.json(content_type=None)
        return seen


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_clients_that_leave_the_queue_are_gone_at_once_and_never_run(
    fleet: Any, http: aiohttp.ClientSession, tmp_path: Path, how: str
):
    (a,) = await fleet(a=fake_model(tmp_path, "m", 1))
    holder = asyncio.create_task(ask(http, a, question("holds the slot", hold_s=3)))
    await a.until(http, "busy", lambda s: s["models"][0]["busy"] == 1, 5)
    sockets = [_raw_request(a, question(f"dead {n}")) for n in range(49)]
    live = asyncio.create_task(ask(http, a, question("live")))
    await a.until(http, "queued", lambda s: s["models"][0]["queued"] == 50, 5)
    for sock in sockets:
        if how == "RST":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    await a.until(http, "rid of the dead", lambda s: s["models"][0]["queued"] == 1, 2)
    assert not holder.done(), "the dead left while the slot was still held"
    assert await holder == 200 and await live == 200
    assert await seen_by_engine(http, a, "m") == ["holds the slot", "live"]
    await a.until_idle(http)


def _raw_request(node: NodeProcess, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection((node.host, node.api_port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


async def test_requests_beyond_the_fleet_wait_in_order_and_the_rest_is_told_when_to_come_back(
    fleet: Any, http: aiohttp.ClientSession, tmp_path: Path
):
    (a,) = await fleet("queue_timeout: 1s, queue_max: 4", a=fake_model(tmp_path, "m", 1))
    holder = asyncio.create_task(ask(http, a, question("0", hold_s=0.6)))
    await a.until(http, "busy", lambda s: s["models"][0]["busy"] == 1, 5)
    waiting = []
    for n in range(1, 5):
        waiting.append(asyncio.create_task(ask(http, a, question(str(n)))))
        await a.until(http, "queued", lambda s, n=n: s["models"][0]["queued"] == n, 5)
    async with http.post(f"{a.api}/v1/chat/completions", json=question("5")) as full:
        assert full.status == 429 and full.headers["Retry-After"] == "2"
        assert (await full.json())["error"]["code"] == "queue_full"
    assert await asyncio.gather(holder, *waiting) == [200] * 5
    assert await seen_by_engine(http, a, "m") == ["0", "1", "2", "3", "4"]

    holder = asyncio.create_task(ask(http, a, question("6", hold_s=2)))
    await a.until(http, "busy", lambda s: s["models"][0]["busy"] == 1, 5)
    async with http.post(f"{a.api}/v1/chat/completions", json=question("7")) as late:
        assert late.status == 429 and late.headers["Retry-After"] == "2"
        assert (await late.json())["error"]["code"] == "queue_timeout"
    assert await holder == 200
    assert "7" not in await seen_by_engine(http, a, "m")
    await a.until_idle(http)


async def test_counts_stay_in_bounds_while_engines_lie_about_their_busy_slots(
    fleet: Any, http: aiohttp.ClientSession, tmp_path: Path
):
    """200 short requests a second at three nodes whose engines report late, and too many busy slots."""
    model = fake_model(tmp_path, "m", 2)
    nodes = await fleet(env={"CHAT_ENGINE_LIES": "1"}, a=model, b=model, c=model)
    for node in nodes:
        await node.until_sees(http, "m", 3)
    stop, seen = asyncio.Event(), []

    async def watch() -> None:
        while not stop.is_set():
            for node in nodes:
                seen.append(await node.get(http, "/v1/fleet/capacity?model=m"))
            await asyncio.sleep(0.05)

    watcher = asyncio.create_task(watch())
    statuses = []
    for _ in range(20):
        started = time.monotonic()
        round_ = [ask(http, nodes[n % 3], question("x", hold_s=0.01)) for n in range(40)]
        statuses += await asyncio.gather(*round_)
        await asyncio.sleep(max(0.2 - (time.monotonic() - started), 0))
    stop.set()
    await watcher
    assert statuses == [200] * 800, "the engine answers 500 when two requests meet in one slot"
    for fleet_capacity in seen:
        for entry in fleet_capacity["models"]:
            fresh = [host for host in entry["hosts"] if not host.get("stale")]
            assert all(0 <= host["free"] <= host["slots"] for host in fresh)
            assert entry["free"] == sum(host["free"] for host in fresh)
    for node in nodes:
        status = await node.status(http)
        assert status["requests"]["leases"] == status["requests"]["forwards"] == 0
        assert status["models"][0]["queued"] == 0
        assert "Traceback" not in node.log


async def test_an_engine_restarted_with_another_slot_count_is_believed(
    fleet: Any, http: aiohttp.ClientSession, tmp_path: Path
):
    (a,) = await fleet(a=fake_model(tmp_path, "m", 3))
    running = [asyncio.create_task(ask(http, a, question(str(n), hold_s=30))) for n in range(3)]
    await a.until(http, "full", lambda s: s["models"][0]["busy"] == 3, 5)
    os.kill(a.engine_pids()["m/0"], signal.SIGKILL)
    assert await asyncio.gather(*running) == [502, 502, 502] or all(
        task.result() >= 500 for task in running
    ), "cut before their first byte, and nobody else serves the model"
    await a.until_healthy(http)
    await a.until_idle(http)
    assert await ask(http, a, question("again")) == 200


@pytest.mark.parametrize("how", ["stopped", "deaf"])
async def test_a_hung_peer_does_not_touch_requests_for_others(
    fleet: Any, http: aiohttp.ClientSession, tmp_path: Path, how: str
):
    """B hangs (the whole node stopped, or a stranger that accepts and never answers at its place)."""
    nodes = await fleet(
        "queue_timeout: 15s, queue_max: 400",
        a=fake_model(tmp_path, "only-a", 1),
        b=fake_model(tmp_path, "only-b", 4),
        c=fake_model(tmp_path, "only-c", 4),
    )
    a, b, c = nodes
    await a.until_sees(http, "only-b", 1)
    await a.until_sees(http, "only-c", 1)
    stranger = None
    if how == "stopped":
        b.kill(signal.SIGSTOP)
    else:
        b.kill()
        b.process.wait()
        # The kernel takes the connections; nobody ever reads them.
        stranger = socket.create_server((b.host, b.api_port), backlog=512)
    hung_at = time.monotonic()
    both = []
    for n in range(150):
        both.append(asyncio.create_task(ask(http, a, question(str(n), "only-c", hold_s=0.005))))
        both.append(asyncio.create_task(_give_up(http, a, question(str(n), "only-b"))))
    statuses = [await task for task in both[::2]]
    assert statuses == [200] * 150
    await asyncio.sleep(max(hung_at + 3.2 - time.monotonic(), 0))
    capacity = await a.get(http, "/v1/fleet/capacity?model=only-b")
    hosts = [host for model in capacity["models"] for host in model["hosts"]]
    assert all(host.get("stale") and "free" not in host for host in hosts), "B is unknown, not empty"
    assert await ask(http, a, question("late", "only-b")) in (404, 503)
    for task in both[1::2]:
        task.cancel()
    await asyncio.gather(*both, return_exceptions=True)
    if stranger is not None:
        stranger.close()
    await a.until_idle(http)
    assert await ask(http, a, question("last", "only-c")) == 200
    assert _sockets_to(a, b) <= 8
    await c.until_idle(http)


async def test_a_request_its_engine_lost_is_given_up_and_the_engine_is_replaced(
    fleet: Any, http: aiohttp.ClientSession, tmp_path: Path
):
    """A's engine answers every probe, takes completions and never begins the one called lost."""
    model = fake_model(tmp_path, "m", 2)
    (a,) = await fleet("queue_timeout: 1s", {"CHAT_ENGINE_LOSES": "lost"}, a=model)
    answers = await asyncio.gather(ask(http, a, question("lost")), ask(http, a, question("lost")))
    assert all(status >= 500 or status == 429 for status in answers), "nobody waits for ever"
    await a.until(http, "given up", lambda s: s["models"][0]["backends"][0]["respawns"] > 0, 20)
    await a.until_healthy(http)
    assert await ask(http, a, question("other")) == 200
    await a.until_idle(http)
    assert "Traceback" not in a.log


async def _give_up(http: aiohttp.ClientSession, node: NodeProcess, body: dict[str, Any]) -> int:
    async with http.post(f"{node.api}/v1/chat/completions", json=body) as response:
        return response.status


def _sockets_to(node: NodeProcess, other: NodeProcess) -> int:
    connections = psutil.Process(node.pid).net_connections("tcp")
    return sum(bool(c.raddr) and c.raddr[:2] == (other.host, other.api_port) for c in connections)
