"""States on links that are slow, lossy, frozen or cut: turns do not wait, and the mesh stays whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
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
            assert "Traceback" not in node.log


def nobody_died(*nodes: NodeProcess) -> bool:
    return not any("member.dead" in node.log for node in nodes)


async def until_moving(lan: Lan, before: int, n_bytes: int = BUFFERED) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sent_bytes(lan.names[0], "eth0") < before + n_bytes:
            await asyncio.sleep(0.02)


async def forwarded(http: aiohttp.ClientSession, a: NodeProcess) -> int:
    """The status of a small request that a brings to n1."""
    other = [{"role": "user", "content": "hi"}]
    async with http.post(
        f"{a.api}/v1/chat/completions?host=n1", json={"model": "m", "messages": other}
    ) as answer:
        assert answer.status != 200 or answer.headers["X-Viiwork-Node"] == "n1"
        return answer.status


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
            async with asyncio.timeout(PATIENCE_S):
                while (status := await forwarded(http, a)) != 200:
                    assert status in (503, 504), "until n1 has been heard of again after the freeze"
            assert kv(await b.status(http))["received"]["done"] == 0
            limit(lan, "1gbit")
            for node in (a, b):
                await node.until(http, "at rest", lambda s: kv(s)["worker"]["running"] == 0, PATIENCE_S)
            assert kv(await b.status(http))["received"]["failed"] == {}
            assert nobody_died(a, b)


async def test_sixteen_states_at_once_on_a_slow_link_all_arrive_and_hold_up_nobody(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(2) as lan:
        async with pair(lan, tmp_path, http, parallel=16, ROW_BYTES=4096) as (a, b):
            worker = psutil.Process(kv(await b.status(http))["worker"]["pid"])
            files_before = worker.num_fds()
            limit(lan, "1mbit")
            before = sent_bytes(lan.names[0], "eth0")
            asked = [
                turn(http, a, [{"role": "user", "content": words(100)}], uuid.uuid4().hex, hold_s=1)
                for _ in range(16)
            ]
            assert {told["node"] for told in await asyncio.gather(*asked)} == {"n0"}
            await until_moving(lan, before)
            for _ in range(3):
                async with http.post(
                    f"{a.api}/v1/chat/completions?host=n1",
                    json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
                ) as forwarded:
                    assert forwarded.status == 200 and forwarded.headers["X-Viiwork-Node"] == "n1"
            assert kv(await b.status(http))["received"]["done"] < 16
            limit(lan, "1gbit")
            told = kv(await b.until(http, "given all", lambda s: kv(s)["replicas"] == 16, PATIENCE_S))
            assert told["received"]["done"] == 16 and told["received"]["failed"] == {}
            await b.until(http, "at rest", lambda s: kv(s)["worker"]["running"] == 0, PATIENCE_S)
            assert worker.num_fds() == files_before and nobody_died(a, b)


@pytest.mark.parametrize("how", ["link cut", "receiver stopped"])
async def test_a_transfer_whose_other_end_falls_silent_is_given_up_and_its_rest_sent_later(
    tmp_path: Path, http: aiohttp.ClientSession, how: str
):
    with Lan(2) as lan:
        async with pair(lan, tmp_path, http, ROW_BYTES=16 * KIB) as (a, b):
            worker = kv(await b.status(http))["worker"]["pid"]
            limit(lan, "10mbit")
            messages, session = [{"role": "user", "content": words(300)}], uuid.uuid4().hex
            before = sent_bytes(lan.names[0], "eth0")
            await turn(http, a, messages, session)
            # More than the first group of rows, and less than all.
            await until_moving(lan, before, random.randrange(3000 * KIB, 4200 * KIB))
            if how == "link cut":
                lan.split(1)
            else:
                os.kill(worker, signal.SIGSTOP)
            sent = kv(await a.until(http, "sure it failed", lambda s: kv(s)["sent"]["failed"], PATIENCE_S))
            assert set(sent["sent"]["failed"]) <= {"timeout", "link_lost"}, sent
            assert sent["worker"]["running"] == 0
            if how == "link cut":
                lan.heal()
            else:
                os.kill(worker, signal.SIGCONT)
            await b.until(http, "rid of it", lambda s: kv(s)["worker"]["running"] == 0, PATIENCE_S)
            limit(lan, "1gbit")
            await until_all_see_all(http, [a, b])
            await until_sharing(http, a, b)
            await a.until_sees(http, "m", 2)
            messages.append({"role": "user", "content": "Go on."})
            await turn(http, a, messages, session)
            done = kv(await a.until(http, "sure it is there", lambda s: kv(s)["sent"]["done"], PATIENCE_S))
            assert done["sent"]["kept"] >= 128, "a whole group was there already"
            await b.until(http, "at rest", lambda s: kv(s)["worker"]["running"] == 0, PATIENCE_S)
            assert kv(await b.status(http))["replicas"] == 1
            if how == "receiver stopped":
                assert nobody_died(a, b)


@contextlib.contextmanager
def way_in(cable: Cable, prefix: str) -> Iterator[list[str]]:
    """A cable to each machine for this process alone, and the machine's address at its end."""
    with contextlib.ExitStack() as ending:
        addresses = []
        for i, name in enumerate(cable.names):
            ip("link", "add", f"{name}m", "type", "veth", "peer", "name", "mgmt", "netns", name)
            ending.callback(subprocess.run, ["ip", "link", "del", f"{name}m"], capture_output=True)
            near, far = f"{prefix}.{4 * i + 1}", f"{prefix}.{4 * i + 2}"
            ip("addr", "add", f"{near}/30", "dev", f"{name}m")
            ip("link", "set", f"{name}m", "up")
            ip("-n", name, "addr", "add", f"{far}/30", "dev", "mgmt")
            ip("-n", name, "link", "set", "mgmt", "up")
            addresses.append(far)
        yield addresses


async def test_while_a_third_of_all_packets_is_lost_turns_run_and_nobody_is_called_dead(
    tmp_path: Path, http: aiohttp.ClientSession
):
    loss, lost = 0.0, random.Random(4)
    with (
        Cable("10.79.4", lambda sender, packet: lost.random() < loss) as cable,
        way_in(cable, "10.79.5") as addresses,
    ):
        nodes = [
            NodeProcess(
                f"n{i}",
                addresses[i],
                tmp_path,
                state_model(tmp_path, f"n{i}"),
                (f"{cable.addresses[1 - i]}:7946",),
                SHARE,
                {"VIIWORK_MESH_SECRET": SECRET},
                api_port=8086,
                mesh_port=7946,
                netns=cable.names[i],
                advertise="",
                mesh="lan: {mdns: off}, ",
            )
            for i in range(2)
        ]
        with running(*nodes):
            a, b = nodes
            await until_sharing(http, a, b)
            loss = 0.3
            messages, session = [{"role": "user", "content": words(300)}], uuid.uuid4().hex
            assert (await turn(http, a, messages, session))["node"] == "n0"
            for i in range(8):
                node = (b, a)[i % 2]
                messages.append({"role": "user", "content": f"And {i}?"})
                assert (await turn(http, node, messages, session))["node"] == node.name
                await asyncio.sleep(1)
            loss = 0.0
            for node in nodes:
                await node.until_sees(http, "m", 2)
            messages.append({"role": "user", "content": "At last."})
            assert (await turn(http, b, messages, session))["node"] == "n1"
            assert nobody_died(a, b) and not any("Traceback" in node.log for node in nodes)
