"""How a node ends: its peers hear first, its requests end, its engines last; a second signal hurries."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp

from .fleet import ask, asking, chat_model, question, running, until_busy
from .nodes import NodeProcess, alive

NO_KV = "kv_share: {enabled: false}"


async def test_peers_route_elsewhere_while_a_leaving_nodes_last_request_still_runs(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = NodeProcess("a", "127.0.19.1", tmp_path, chat_model(tmp_path, "m"), extra=NO_KV)
    b = NodeProcess("b", "127.0.19.2", tmp_path, "", extra=NO_KV)
    async with running(http, b, a):
        await b.until_sees(http, "m", 1)
        last = asking(http, b, question("last", hold_s=3))
        await until_busy(http, a, "m")
        a.kill(signal.SIGTERM)
        async with asyncio.timeout(20):
            while (await b.get(http, "/v1/models"))["data"]:
                await asyncio.sleep(0.02)
        assert not last.done(), "it left before it drained"
        assert await ask(http, b, question("late")) == (503, "")
        assert await last == (200, "a")
        assert a.process is not None
        assert await asyncio.to_thread(a.process.wait, 30) == 0


async def test_a_second_signal_waits_neither_for_requests_nor_for_engines(
    tmp_path: Path, http: aiohttp.ClientSession
):
    env = {"CHAT_ENGINE_DEAD": str(tmp_path / "never")}  # which makes it deaf to SIGTERM
    a = NodeProcess("a", "127.0.19.3", tmp_path, chat_model(tmp_path, "m"), extra=NO_KV, env=env)
    async with running(http, a):
        asking(http, a, question("endless", hold_s=600)).add_done_callback(lambda task: task.exception())
        await until_busy(http, a, "m")
        pid = a.engine_pids()["m/0"]
        a.kill(signal.SIGTERM)
        await a.until_logged("node.stopping")
        a.kill(signal.SIGTERM)
        assert a.process is not None
        assert await asyncio.to_thread(a.process.wait, 50) == 0
        assert not alive(pid)
        assert "after SIGTERM; killing it" not in a.log, "it waited for the engine's grace"


async def test_a_second_signal_also_ends_the_grace_of_engines_that_are_stopping(
    tmp_path: Path, http: aiohttp.ClientSession
):
    env = {"CHAT_ENGINE_DEAD": str(tmp_path / "never")}
    a = NodeProcess("a", "127.0.19.4", tmp_path, chat_model(tmp_path, "m"), extra=NO_KV, env=env)
    async with running(http, a):
        a.kill(signal.SIGTERM)
        await a.until_logged("engines.stopping")
        a.kill(signal.SIGTERM)
        assert a.process is not None
        assert await asyncio.to_thread(a.process.wait, 50) == 0
        assert "after SIGTERM; killing it" not in a.log
