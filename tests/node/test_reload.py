"""SIGHUP on a real node: models come, go and change while it serves."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .fleet import ask, asking, chat_model, question, running, until_busy
from .nodes import NodeProcess, alive, is_tested, model_entry
from .test_two_nodes import chat

NO_KV = "kv_share: {enabled: false}"


def node_of(tmp_path: Path, models: str, extra: str = NO_KV) -> NodeProcess:
    return NodeProcess("a", "127.0.15.1", tmp_path, models, extra=extra)


def names(status: dict[str, Any]) -> list[str]:
    return [model["name"] for model in status["models"]]


def is_serving(name: str) -> Any:
    return lambda s: any(
        m["name"] == name and m["backends"] and m["backends"][0]["status"] == "healthy" for m in s["models"]
    )


async def test_models_of_a_changed_file_take_over_while_the_others_serve_on(
    tmp_path: Path, http: aiohttp.ClientSession
):
    keeps, goes = chat_model(tmp_path, "keeps"), chat_model(tmp_path, "goes")
    a = node_of(tmp_path, goes + keeps)
    async with running(http, a):
        before = a.engine_pids()
        held = asking(http, a, question("held", "keeps", hold_s=1))
        leaving = asking(http, a, question("leaving", "goes", hold_s=1))
        await until_busy(http, a, "goes")
        # Other places in the file and a comment are no change of a model.
        a.models = "  # a comment\n\n" + keeps + chat_model(tmp_path, "comes")
        a.reload()
        await a.until_logged("config.reloaded added=comes removed=goes changed=-")
        assert await ask(http, a, question("late", "goes")) == (404, "")
        assert await leaving == (200, "a") and await held == (200, "a")
        await a.until(http, "serving what came", is_serving("comes"))
        after = (await a.status(http), a.engine_pids())[1]
        assert after["keeps/0"] == before["keeps/0"] and not alive(before["goes/0"])
        assert await ask(http, a, question("hi", "comes")) == (200, "a")
        listed = await a.get(http, "/v1/models")
        assert [entry["id"] for entry in listed["data"]] == ["comes", "keeps"]
        await a.until_idle(http)


async def test_a_changed_model_starts_anew_after_its_requests_and_those_who_wait_run_there(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of(tmp_path, chat_model(tmp_path, "m"))
    async with running(http, a):
        old = a.engine_pids()["m/0"]
        running_one = asking(http, a, question("runs", hold_s=1))
        await until_busy(http, a, "m")
        a.models = chat_model(tmp_path, "m", parallel=2)
        a.reload()
        await a.until_logged("[m/0] draining")
        waiting = asking(http, a, question("waits"))
        assert await running_one == (200, "a") and await waiting == (200, "a")
        status = await a.until(http, "changed", lambda s: s["models"][0]["slots"] == 2)
        assert status["models"][0]["backends"][0]["pid"] != old and not alive(old)


async def test_a_request_that_waits_for_a_model_that_vanishes_is_told_so(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of(tmp_path, chat_model(tmp_path, "m"))
    async with running(http, a):
        first = asking(http, a, question("runs", hold_s=2))
        await until_busy(http, a, "m")
        waiting = asking(http, a, question("waits"))
        await a.until(http, "queued", lambda s: s["models"][0]["queued"] == 1)
        a.models = ""
        a.reload()
        assert await waiting == (404, "")
        assert not first.done() and await first == (200, "a")
        await a.until(http, "empty", lambda s: s["models"] == [])
        assert (await a.get(http, "/health"))["status"] == "ok", "a node without models only routes"


@pytest.mark.parametrize(
    ("extra", "models", "said"),
    [
        (NO_KV, "  - {name: x y, engine: llamacpp}\n", "models[0].name: expected a name without whitespace"),
        (NO_KV + "\nrouting: {queue_mx: 1}", None, "routing.queue_mx: expected a known key"),
    ],
    ids=["a wrong model", "a wrong key elsewhere"],
)
async def test_a_wrong_file_changes_nothing_and_says_so_in_one_line(
    tmp_path: Path, http: aiohttp.ClientSession, extra: str, models: str | None, said: str
):
    good = chat_model(tmp_path, "m")
    a = node_of(tmp_path, good)
    async with running(http, a):
        pid = a.engine_pids()["m/0"]
        a.extra, a.models = extra, models or chat_model(tmp_path, "other")
        a.reload()
        await a.until_logged("config.unchanged")
        (line,) = [line for line in a.log.splitlines() if "config.unchanged" in line]
        assert said in line and "a.yaml:" in line
        assert names(await a.status(http)) == ["m"] and a.engine_pids()["m/0"] == pid
        (tmp_path / "a.yaml").unlink()
        a.kill(signal.SIGHUP)
        await a.until_logged("config.unchanged", 2)
        assert "cannot read the config" in a.log
        assert await ask(http, a, question("hi")) == (200, "a")


async def test_other_sections_are_named_as_needing_a_restart_and_models_are_applied(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of(tmp_path, chat_model(tmp_path, "m"))
    async with running(http, a):
        a.extra = "kv_share: {enabled: true}\nrouting: {queue_max: 7}"
        a.models = chat_model(tmp_path, "n")
        a.reload()
        await a.until_logged("config.restart_needed sections=routing,kv_share")
        await a.until(http, "serving n", is_serving("n"))
        a.kill(signal.SIGHUP)
        await a.until_logged("config.reloaded added=- removed=- changed=-")
        assert a.log.count("config.restart_needed sections=routing,kv_share") == 2


async def test_a_second_signal_during_a_drain_is_applied_after_it(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of(tmp_path, chat_model(tmp_path, "m"))
    async with running(http, a):
        slow = asking(http, a, question("slow", hold_s=1.5))
        await until_busy(http, a, "m")
        a.models = chat_model(tmp_path, "n")
        a.reload()
        await a.until_logged("[m/0] draining")
        a.models = chat_model(tmp_path, "o")
        a.reload()
        assert await slow == (200, "a")
        await a.until(http, "serving o", lambda s: names(s) == ["o"] and is_serving("o")(s))
        assert "[n/0]" not in a.log


async def test_a_signal_during_the_start_is_held_and_applied_later(
    tmp_path: Path, http: aiohttp.ClientSession
):
    a = node_of(tmp_path, chat_model(tmp_path, "m"))
    a.start()
    try:
        a.models = chat_model(tmp_path, "n")
        while "api.listening" not in a.log:  # before, and while, the node listens to signals
            a.kill(signal.SIGHUP) if _ignores_or_blocks_hup(a.pid) else None
            a.write_config()
        a.reload()
        await a.until(http, "serving n", lambda s: names(s) == ["n"] and is_serving("n")(s))
    finally:
        assert a.end() == 0


def _ignores_or_blocks_hup(pid: int) -> bool:
    """Has the process got so far that it can hold the signal? Before its first line nobody could."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return any(int(fields[key], 16) & 1 for key in ("SigBlk", "SigIgn", "SigCgt"))


@pytest.mark.engine
async def test_a_real_engine_is_replaced_by_one_with_more_slots(
    tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    a = node_of(tmp_path, model_entry("small", smollm2, context=512, parallel=1), "kv_share: {min_tokens: 8}")
    async with running(http, a):
        hi = [{"role": "user", "content": "hi"}]
        await chat(http, a, hi, "s1")
        a.models = model_entry("small", smollm2, context=256, parallel=2)
        a.reload()
        changed = await a.until(http, "changed", lambda s: s["models"][0]["slots"] == 2)
        assert changed["models"][0]["ctx"] == 256
        assert (await chat(http, a, hi, "s1"))["node"] == "a"
        await a.until(http, "known to kv_share", is_tested)
        report = await a.get(http, "/v1/capacity")
        assert report["models"][0]["kv"]["n_ctx"] == 256
        await a.until_idle(http)
