"""Parking on real nodes: memory is free, requests go elsewhere or wait, nothing is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .fleet import ask, asking, chat_model, question, running, until_busy
from .nodes import NodeProcess, alive, is_tested, model_entry
from .test_two_nodes import chat

NO_KV = "kv_share: {enabled: false}"


def node_of(name: str, tmp_path: Path, models: str, number: int = 1, extra: str = NO_KV) -> NodeProcess:
    return NodeProcess(name, f"127.0.16.{number}", tmp_path, models, extra=extra)


async def post(
    http: aiohttp.ClientSession, node: NodeProcess, word: str, body: Any, **headers: str
) -> tuple[int, Any]:
    async with http.post(f"{node.api}/v1/models/{word}", json=body, headers=headers) as response:
        return response.status, await response.json()


def model_of(status: dict[str, Any], name: str = "m") -> dict[str, Any]:
    return next(model for model in status["models"] if model["name"] == name)


async def until_ended(http: aiohttp.ClientSession, node: NodeProcess, name: str = "m") -> dict[str, Any]:
    return await node.until(http, "without backends", lambda s: not model_of(s, name)["backends"])


async def test_a_parked_model_runs_on_the_peer_and_comes_back_when_it_is_wanted(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of("a", tmp_path, chat_model(tmp_path, "m"))
    b = node_of("b", tmp_path, chat_model(tmp_path, "m"), 2)
    async with running(http, a, b):
        await a.until_sees(http, "m", 2)
        pid = a.engine_pids()["m/0"]
        slow = asking(http, a, question("in flight", hold_s=1))
        await until_busy(http, a, "m")
        assert await post(http, a, "down", {"models": ["m"]}) == (
            200,
            {"node": "a", "models": [{"name": "m", "parked": True, "changed": True}]},
        )
        assert await ask(http, a, question("next")) == (200, "b"), "while the one in flight still runs"
        assert await slow == (200, "a")
        status = await until_ended(http, a)
        assert model_of(status) | {"engine": "llamacpp", "ctx": 1024} == model_of(status)
        assert (model_of(status)["parked"], model_of(status)["slots"]) == (True, 0) and not alive(pid)
        (entry,) = (await a.get(http, "/v1/capacity"))["models"]
        assert (entry["slots"], entry["busy"], entry["healthy_backends"]) == (0, 0, 0)
        assert (await a.get(http, "/health"))["status"] == "ok"
        await b.until_sees(http, "m", 1)
        assert await ask(http, b, question("entering there")) == (200, "b")
        assert (await post(http, a, "up", {}))[1]["models"] == [
            {"name": "m", "parked": False, "changed": True}
        ]
        await b.until_sees(http, "m", 2)
        assert "parked" not in model_of(await a.status(http))
        assert await ask(http, a, question("again")) == (200, "a")


async def test_requests_for_a_model_parked_everywhere_wait_until_it_is_back(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of("a", tmp_path, chat_model(tmp_path, "m"))
    async with running(http, a):
        url = f"{a.api}/v1/models/down"
        async with http.post(url, data=b"null", headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400, "null is not everything"
        async with http.post(url, skip_auto_headers=["Content-Type"]) as response:
            assert response.status == 200, "no body is"
        await until_ended(http, a)
        waiting = asking(http, a, question("waits"))
        await a.until(http, "queued", lambda s: model_of(s)["queued"] == 1)
        assert (await a.get(http, "/v1/models"))["data"][0]["id"] == "m", "listed all the same"
        await post(http, a, "up", {"models": ["m"]})
        assert await waiting == (200, "a")


async def test_a_forward_to_a_parked_model_gets_429(tmp_path: Path, http: aiohttp.ClientSession):
    """The peer that has not heard of it yet tries elsewhere."""
    a, b = node_of("a", tmp_path, ""), node_of("b", tmp_path, chat_model(tmp_path, "m"), 2)
    async with running(http, a, b):
        await a.until_sees(http, "m", 1)
        await post(http, b, "down", {})
        await until_ended(http, b)
        headers = {"X-Viiwork-Forwarded": "a"}
        # An open mesh proves a node by its address, so this asks as node a would.
        connector = aiohttp.TCPConnector(local_addr=(a.host, 0))
        async with aiohttp.ClientSession(connector=connector) as as_a:
            async with as_a.post(
                f"{b.api}/v1/chat/completions", json=question("x"), headers=headers
            ) as response:
                assert response.status == 429 and "Retry-After" not in response.headers
                assert (await response.json())["error"]["code"] == "no_free_slot"


async def test_an_unknown_name_changes_nothing(tmp_path: Path, http: aiohttp.ClientSession):
    a = node_of("a", tmp_path, chat_model(tmp_path, "m"))
    async with running(http, a):
        status, body = await post(http, a, "down", {"models": ["m", "n"]})
        assert status == 400
        assert body["error"]["message"] == "no model 'n' is configured on a; nothing changed"
        assert model_of(await a.status(http))["backends"][0]["status"] == "healthy"


async def test_parking_survives_a_reload_and_not_a_restart(tmp_path: Path, http: aiohttp.ClientSession):
    a = node_of("a", tmp_path, chat_model(tmp_path, "m") + chat_model(tmp_path, "n"))
    async with running(http, a):
        await post(http, a, "down", {"models": ["m"]})
        await until_ended(http, a)
        a.models = chat_model(tmp_path, "m", parallel=2)
        a.reload()
        await a.until(http, "without n", lambda s: len(s["models"]) == 1)
        assert model_of(await a.status(http))["parked"] is True
        assert (await a.get(http, "/health"))["status"] == "ok", "nothing is meant to run"
        assert a.end() == 0
        a.start()
        await a.until_healthy(http)
        assert "parked" not in model_of(await a.status(http))


async def test_a_model_parked_before_its_engine_is_up_is_not_waited_for(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of("a", tmp_path, chat_model(tmp_path, "m") + chat_model(tmp_path, "n"))
    a.start()
    try:
        await a.until_logged("api.listening")
        assert (await post(http, a, "down", {"models": ["n"]}))[0] == 200
        await a.until(http, "serving m", lambda s: model_of(s)["slots"] == 1)
        await until_ended(http, a, "n")
    finally:
        assert a.end() == 0


async def test_the_command_parks_and_unparks(tmp_path: Path, http: aiohttp.ClientSession):
    a = node_of("a", tmp_path, chat_model(tmp_path, "m"))
    async with running(http, a):
        for word, text in (("down", "parked"), ("down", "was parked already"), ("up", "in service")):
            command = [sys.executable, "-m", "viiwork", word, "--node", f"{a.host}:{a.api_port}", "m"]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60, env=dict(os.environ)
            )
            assert (done.returncode, done.stdout.split(maxsplit=2)) == (0, ["a", "m", f"{text}\n"])


@pytest.mark.engine
async def test_a_real_engine_is_parked_in_the_middle_of_a_stream_and_started_again(
    tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    small = model_entry("small", smollm2, context=512, parallel=2)
    a = node_of("a", tmp_path, small, extra="kv_share: {min_tokens: 8}")
    async with running(http, a):
        pid = a.engine_pids()["small/0"]
        hi = [{"role": "user", "content": "hi"}]
        await chat(http, a, hi, "s1")
        body = {"model": "small", "messages": hi, "max_tokens": 100, "stream": True, "ignore_eos": True}
        async with http.post(f"{a.api}/v1/chat/completions", json=body) as response:
            await response.content.readany()
            assert (await post(http, a, "down", {}))[0] == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await until_ended(http, a, "small")
        assert not alive(pid)
        assert (await post(http, a, "up", {}))[0] == 200
        await a.until_healthy(http)
        assert (await chat(http, a, hi, "s1"))["node"] == "a"
        await a.until(http, "known to kv_share", is_tested)
        await a.until_idle(http)
