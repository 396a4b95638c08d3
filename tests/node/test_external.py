"""A server that somebody else runs, in a mesh of real nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.engine import CHAT_ANSWER, Conn, FakeEngine, Seen

from .fleet import ask, asking, chat_model, question, running
from .nodes import NodeProcess, alive

KEY = "sk-0123456789abcdef"


@pytest.fixture
async def server() -> AsyncIterator[FakeEngine]:
    """Serves `there`; a chat takes as long as its `hold_s` says."""

    async def answer(conn: Conn, seen: Seen) -> None:
        if seen.target == "/v1/models":
            conn.json(200, {"data": [{"id": "there", "max_model_len": 2048}]})
        elif seen.method == "GET":
            conn.json(404, {"error": "nothing here"})  # also for /health, as Ollama answers
        else:
            await asyncio.sleep(seen.json.get("hold_s", 0))
            conn.json(200, CHAT_ANSWER)

    async with FakeEngine() as engine:
        engine.script = answer
        yield engine


def entry(server: FakeEngine, more: str = "") -> str:
    return f"  - {{name: m, engine: external, url: '{server.url}/v1', parallel: 2, model: there{more}}}\n"


def chats(server: FakeEngine) -> list[Seen]:
    return [seen for seen in server.requests if seen.method == "POST"]


async def test_a_server_joins_the_mesh_under_its_own_key_which_no_peer_or_log_or_engine_sees(
    tmp_path: Path, http: aiohttp.ClientSession, server: FakeEngine
):
    extra = "health: {interval: 1s}"
    a = NodeProcess(
        "a",
        "127.0.18.1",
        tmp_path,
        entry(server, ", api_key_env: SERVER_KEY") + chat_model(tmp_path, "own"),
        extra=extra,
        env={"SERVER_KEY": KEY, "VIIWORK_DEBUG": "1"},
    )
    b = NodeProcess("b", "127.0.18.2", tmp_path, "", extra=extra)
    async with running(http, a, b):
        await b.until_sees(http, "m", 1)
        assert await ask(http, b, question("by way of b"), Authorization="Bearer clients") == (200, "a")
        assert await ask(http, a, question("directly")) == (200, "a")
        for seen in chats(server):
            assert seen.values("Authorization") == [f"Bearer {KEY}"]
            assert seen.json["model"] == "there" and "id_slot" not in seen.json
        status = await a.status(http)
        assert (status["models"][0]["engine"], status["models"][0]["ctx"]) == ("external", 2048)
        (model,) = (m for m in (await b.get(http, "/v1/fleet/capacity"))["models"] if m["name"] == "m")
        assert (model["slots"], model["ctx"], model["engine"]) == (2, 2048, "external")
        told = [await a.get(http, path) for path in ("/v1/status", "/v1/capacity", "/v1/models")]
        assert KEY not in json.dumps(told) + a.log + b.log
        engine = Path(f"/proc/{a.engine_pids()['own/0']}/environ").read_bytes()
        assert KEY.encode() not in engine and b"SERVER_KEY" not in engine


async def test_the_servers_slots_are_ours_to_count(
    tmp_path: Path, http: aiohttp.ClientSession, server: FakeEngine
):
    a = NodeProcess("a", "127.0.18.3", tmp_path, entry(server))
    async with running(http, a):
        asked = [asking(http, a, question(f"{n}", hold_s=0.5)) for n in range(4)]
        status = await a.until(http, "full", lambda s: s["models"][0]["queued"] == 2)
        assert status["models"][0]["busy"] == 2 and len(chats(server)) == 2
        assert await asyncio.gather(*asked) == [(200, "a")] * 4
        await a.until_idle(http)


async def test_a_server_that_dies_and_returns_is_used_again_without_anybodys_doing(
    tmp_path: Path, http: aiohttp.ClientSession, server: FakeEngine
):
    a = NodeProcess("a", "127.0.18.4", tmp_path, entry(server), extra="health: {interval: 200ms}")
    async with running(http, a):
        await server.stop()

        def is_out(status: dict[str, Any]) -> bool:
            return status["models"][0]["backends"][0]["status"] == "unhealthy"

        await a.until(http, "aware of it", is_out)
        waiting = asking(http, a, question("waits"))
        await a.until(http, "queued", lambda s: s["models"][0]["queued"] == 1)
        await server.start()
        assert await waiting == (200, "a")
        assert (await a.status(http))["models"][0]["backends"][0]["respawns"] == 0


async def test_a_server_is_parked_and_reconfigured_like_an_engine(
    tmp_path: Path, http: aiohttp.ClientSession, server: FakeEngine
):
    a = NodeProcess("a", "127.0.18.5", tmp_path, entry(server))
    async with running(http, a):
        async with http.post(f"{a.api}/v1/models/down", json={}) as response:
            assert response.status == 200
        await a.until(http, "parked", lambda s: not s["models"][0]["backends"])
        async with http.post(f"{a.api}/v1/models/up", json={}) as response:
            assert response.status == 200
        await a.until_healthy(http)
        a.models = chat_model(tmp_path, "m")
        a.reload()
        await a.until(http, "its own engine", lambda s: s["models"][0]["engine"] == "llamacpp")
        await a.until_healthy(http)
        before = len(chats(server))
        assert await ask(http, a, question("hi")) == (200, "a")
        assert len(chats(server)) == before and alive(a.engine_pids()["m/0"])
