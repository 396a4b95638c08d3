"""Engines that take requests and never answer: others run those, and the engines come back by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp

from .fleet import ask, asking, chat_model, question, running, until_busy
from .nodes import NodeProcess, alive

EXTRA = "kv_share: {enabled: false}\nhealth: {interval: 1s, timeout: 2s, max_failures: 1000}"


def node_of(name: str, number: int, tmp_path: Path, extra: str = EXTRA, **env: str) -> NodeProcess:
    model = chat_model(tmp_path, "m", parallel=2)
    return NodeProcess(name, f"127.0.17.{number}", tmp_path, model, extra=extra, env=env)


def phase(status: dict) -> str:
    return status["models"][0]["backends"][0].get("phase", "")


async def test_what_a_frozen_engine_has_not_begun_runs_on_the_peer_and_the_engine_comes_back_by_itself(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a, b = node_of("a", 1, tmp_path), node_of("b", 2, tmp_path)
    async with running(http, a, b):
        await a.until_sees(http, "m", 2)
        pid = a.engine_pids()["m/0"]
        unbegun = asking(http, a, question("unbegun", hold_s=0.5))
        stream = question("mid-stream", stream=True, max_tokens=300)
        prefer = {"X-Viiwork-Prefer": "a"}
        async with http.post(f"{a.api}/v1/chat/completions", json=stream, headers=prefer) as begun:
            assert begun.headers["X-Viiwork-Node"] == "a"
            await begun.content.readany()
            await until_busy(http, a, "m", 2)
            os.kill(pid, signal.SIGSTOP)
            try:
                out = await a.until(http, "aware of it", lambda s: phase(s) == "silent")
                assert out["models"][0]["slots"] == 0, "peers route elsewhere too"
                assert out["models"][0]["backends"][0]["reason"] == "/slots: no answer within 1 s"
                assert await unbegun == (200, "b")
                assert await ask(http, a, question("after")) == (200, "b")
                assert not begun.content.at_eof(), "what has begun is not cut"
            finally:
                os.kill(pid, signal.SIGCONT)
            assert (await begun.read()).endswith(b"data: [DONE]\n\n")
        await a.until_healthy(http)
        assert a.engine_pids()["m/0"] == pid and await ask(http, a, question("again")) == (200, "a")
        await a.until_idle(http)
        await b.until_idle(http)


async def test_a_backend_frozen_under_load_fails_nobody_whose_answer_had_not_begun(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a, b = node_of("a", 1, tmp_path), node_of("b", 2, tmp_path)
    answers: list[tuple[int, str]] = []
    stop = asyncio.Event()

    async def client(number: int) -> None:
        while not stop.is_set():
            answers.append(await ask(http, (a, b)[number % 2], question(f"{number}", hold_s=0.05)))

    async with running(http, a, b):
        await a.until_sees(http, "m", 2)
        await b.until_sees(http, "m", 2)
        clients = [asyncio.create_task(client(n)) for n in range(6)]
        while {"a", "b"} - {node for _, node in answers}:
            await asyncio.sleep(0.01)
        pid = a.engine_pids()["m/0"]
        os.kill(pid, signal.SIGSTOP)
        await a.until(http, "aware of it", lambda s: phase(s) == "silent")
        served = len(answers)
        while len(answers) < served + 40:
            await asyncio.sleep(0.01)
        assert {node for _, node in answers[served + 20 :]} == {"b"}
        os.kill(pid, signal.SIGCONT)
        back = len(answers)
        while "a" not in {node for _, node in answers[back:]}:
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*clients)
        assert {status for status, _ in answers} == {200}
        await a.until_idle(http)
        await b.until_idle(http)


async def test_an_engine_that_only_seems_alive_is_killed_and_its_callers_served_elsewhere(
    tmp_path: Path, http: aiohttp.ClientSession
):
    dead = tmp_path / "dead"
    a, b = node_of("a", 1, tmp_path, CHAT_ENGINE_DEAD=str(dead)), node_of("b", 2, tmp_path)
    async with running(http, a, b):
        await a.until_sees(http, "m", 2)
        pid = a.engine_pids()["m/0"]
        dead.touch()
        lost = [asking(http, a, question(f"lost {n}", hold_s=1)) for n in range(2)]
        out = await a.until(http, "aware of it", lambda s: phase(s) == "proving")
        assert (out["models"][0]["slots"], out["models"][0]["backends"][0]["status"]) == (0, "unhealthy")
        for answer in lost:
            assert await answer == (200, "b")
        assert await ask(http, a, question("next")) == (200, "b")
        await a.until(http, "rid of it", lambda s: s["models"][0]["backends"][0]["respawns"] == 1)
        assert not alive(pid) and "still there 5 s after SIGTERM; killing it" in a.log
        dead.unlink()
        await a.until_healthy(http)
        assert await ask(http, a, question("again")) == (200, "a")
        await a.until_idle(http)
