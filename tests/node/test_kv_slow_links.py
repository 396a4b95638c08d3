"""States on links that are slow, lossy, frozen or cut: turns do not wait for them, and the mesh stays whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.fakes.cable import Cable
from tests.fakes.netns import Lan, ip

from .lan import lan_node, running, until_all_see_all
from .links import SECRET, sent_bytes
from .nodes import NodeProcess
from .state_nodes import PATIENCE_S, SHARE, kv, state_model, turn, until_sharing, words

pytestmark = pytest.mark.netns

KIB = 1024
BUFFERED = 200 * KIB  # sent by then, so that the transfer is past its handshake


def limit(lan: Lan, rate: str) -> None:
    """What each machine sends leaves it at this rate, through the queue of a small router."""
    for netns in lan.names:
        words = ["tc", "-n", netns, "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        subprocess.run([*words, "rate", rate, "burst", "32kb", "latency", "400ms"], check=True)


@contextlib.asynccontextmanager
async def pair(
    lan: Lan, folder: Path, http: aiohttp.ClientSession, **engine: Any
) -> AsyncIterator[list[NodeProcess]]:
    """Two nodes of one secured mesh that share their model's states."""
    nodes = [
        lan_node(
            lan,
            i,
            folder,
            state_model(folder, f"n{i}", **engine),
            extra=SHARE,
            env={"VIIWORK_MESH_SECRET": SECRET},
        )
        for i in range(2)
    ]
    with running(*nodes):
        await until_all_see_all(http, nodes)
        await until_sharing(http, *nodes)
        yield nodes
        for node in nodes:
            assert "member.dead" not in node.log and "Traceback" not in node.log


async def until_moving(lan: Lan, before: int, n_bytes: int = BUFFERED) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sent_bytes(lan.names[0], "eth0") < before + n_bytes:
            await asyncio.sleep(0.02)


async def test_on_a_slow_link_that_freezes_the_next_turn_runs_cold_at_once_and_the_mesh_stays_whole(
    tmp_path: Path, http: aiohttp.ClientSession
):
    """1 Mbit/s, 2.4 MB to move: some twenty seconds, three of them frozen."""
    with Lan(2) as lan:
        async with pair(lan, tmp_path, http) as (a, b):
            limit(lan, "1mbit")
            messages, session = [{"role": "user", "content": words(300)}], uuid.uuid4().hex
            before = sent_bytes(lan.names[0], "eth0")
            assert (await turn(http, a, messages, session))["node"] == "n0"
            await until_moving(lan, before)
            lan.split(1)
            await asyncio.sleep(3.0)
            lan.heal()
            messages.append({"role": "user", "content": "And now?"})
            there = await turn(http, b, messages, session)
            assert (there["node"], there["cache_n"]) == ("n1", 0)
            told = kv(await b.status(http))
            assert told["received"]["done"] == 0 and told["worker"]["running"] == 1, "it runs on meanwhile"
            other = [{"role": "user", "content": "hi"}]
            async with http.post(
                f"{a.api}/v1/chat/completions?host=n1", json={"model": "m", "messages": other}
            ) as forwarded:
                assert forwarded.status == 200 and forwarded.headers["X-Viiwork-Node"] == "n1"
            assert kv(await b.status(http))["received"]["done"] == 0
            limit(lan, "1gbit")
            for node in (a, b):
                await node.until(http, "at rest", lambda s: kv(s)["worker"]["running"] == 0, PATIENCE_S)
            assert kv(await b.status(http))["received"]["failed"] == {}
