"""Two real nodes in network namespaces on one LAN, with the ports and addresses a user has."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from .nodes import NodeProcess, model_entry
from .test_two_nodes import chat, opening

pytestmark = [pytest.mark.netns, pytest.mark.engine]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def lan() -> Iterator[tuple[str, str]]:
    """Two namespaces at 10.78.9.2 and 10.78.9.3; this process reaches both from 10.78.9.1."""
    tag = uuid.uuid4().hex[:6]
    bridge, names = f"vwbr{tag}", (f"vw{tag}a", f"vw{tag}b")
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", "10.78.9.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 2):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.78.9.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "via", "10.78.9.1")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


async def test_an_open_lan_mesh_finds_its_addresses_forwards_both_ways_and_shares_no_state_unasked(
    lan: tuple[str, str], tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    small = model_entry("small", smollm2)
    nodes = []
    for name, netns, number in (("a", lan[0], 2), ("b", lan[1], 3)):
        own = model_entry(f"only-{name}", smollm2, context=512, parallel=1)
        node = NodeProcess(
            name,
            f"10.78.9.{number}",
            tmp_path,
            small + own,
            ("10.78.9.2:7946",) if name == "b" else (),
            "kv_share: {min_tokens: 64}",
            api_port=8086,
            mesh_port=7946,
            netns=netns,
            advertise="",
        )
        nodes.append(node)
    a, b = nodes
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            await node.until_healthy(http)
            await node.until_sees(http, "small", 2)
        for node, other in ((a, b), (b, a)):
            status = await node.status(http)
            assert status["addr"] == node.host, "found by its default route"
            answer = await chat(http, node, [{"role": "user", "content": "hi"}], model=f"only-{other.name}")
            assert answer["node"] == other.name
        await chat(http, a, opening(), uuid.uuid4().hex)
        status = await a.until(
            http,
            "kept from sharing",
            lambda s: s["kv_share"]["sent"].get("skipped", {}).get("path_not_allowed"),
            10,
        )
        assert status["kv_share"]["sent"]["done"] == 0
    finally:
        for node in nodes:
            node.end()


def test_the_demo_tells_its_story_and_leaves_nothing_behind(lan: tuple[str, str], tmp_path: Path):
    """Run in a namespace of its own, where its fixed ports are free."""
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "viiwork", "demo", "--exit", "--json", str(numbers)]
    done = subprocess.run(
        ["ip", "netns", "exec", lan[0], *command], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(numbers.read_text())
    cold, warm = told["steps"][2], told["steps"][4]
    assert [step["node"] for step in told["steps"]] == ["demo-b", "demo-a", "demo-b", "demo-a", "demo-b"]
    assert 2300 <= cold["prompt_tokens"] <= 2700 and cold["reused_share"] < 0.05
    assert warm["reused_share"] >= 0.95
    assert "times sooner" in done.stdout
    running = subprocess.run(["ip", "netns", "pids", lan[0]], capture_output=True, text=True, check=True)
    assert running.stdout.split() == []
