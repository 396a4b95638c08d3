"""An engine that restores with 200 and then reuses nothing: sharing stops, says so, and costs no more."""

from __future__ import annotations

import uuid
from pathlib import Path

import aiohttp

from viiwork.limits import KV_NO_REUSE_MAX

from .nodes import NodeProcess
from .state_nodes import PATIENCE_S, SHARE, kv, seen, state_model, turn, until_sharing, words

SWITCHES = 50


async def test_fifty_switches_to_an_engine_that_reuses_nothing_stop_the_sharing(
    tmp_path: Path, http: aiohttp.ClientSession
):
    lies = tmp_path / "lies"
    a, b = nodes = [
        NodeProcess(name, f"127.0.13.{i + 1}", tmp_path, state_model(tmp_path, name, LIES=lies), extra=SHARE)
        for i, name in enumerate("ab")
    ]
    a.seeds, b.seeds = (b.seed,), (a.seed,)
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            await node.until_sees(http, "m", 2)
        await until_sharing(http, *nodes)
        lies.touch()  # the self-test at its start found nothing wrong
        saves = []
        for _ in range(SWITCHES):
            session = uuid.uuid4().hex
            messages = [{"role": "user", "content": words(100)}]
            await turn(http, a, messages, session)
            await a.until(http, "done with its state", lambda s: kv(s)["pushing"] == 0, PATIENCE_S)
            messages.append({"role": "user", "content": words(3)})
            there = await turn(http, b, messages, session)
            assert there["node"] == "b" and there["cache_n"] <= 1  # the token all prompts begin with
            saves.append(seen(a).count("save"))
        restores = [line for line in seen(b) if line.startswith("restore")]
        assert len(restores) == KV_NO_REUSE_MAX
        assert saves[SWITCHES // 2] == saves[-1], "no state is saved for nothing"
        told = kv(await b.status(http))
        assert "no reuse" in told["not_portable"]["m"]
        assert told["moves"]["warm"] == told["moves"]["partly"] == 0
        assert told["not_warm_causes"]["no_reuse"] == KV_NO_REUSE_MAX
    finally:
        for node in nodes:
            node.end()
