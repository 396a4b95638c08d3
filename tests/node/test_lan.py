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

from tests.fakes.netns import Lan

from .nodes import NodeProcess, model_entry
from .test_two_nodes import chat, opening

pytestmark = [pytest.mark.netns, pytest.mark.engine]


@pytest.fixture
def lan() -> Iterator[Lan]:
    with Lan(2) as lan:
        yield lan


async def test_an_open_lan_mesh_finds_its_addresses_forwards_both_ways_and_shares_no_state_unasked(
    lan: Lan, tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    small = model_entry("small", smollm2)
    nodes = []
    for i, name in enumerate("ab"):
        own = model_entry(f"only-{name}", smollm2, context=512, parallel=1)
        node = NodeProcess(
            name,
            lan.address(i),
            tmp_path,
            small + own,
            (f"{lan.address(0)}:7946",) if i else (),
            "kv_share: {min_tokens: 64}",
            api_port=8086,
            mesh_port=7946,
            netns=lan.names[i],
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


def test_the_demo_tells_its_story_and_leaves_nothing_behind(lan: Lan, tmp_path: Path):
    """Run in a namespace of its own, where its fixed ports are free."""
    numbers = tmp_path / "numbers.json"
    inside = ["ip", "netns", "exec", lan.names[0]]
    command = [*inside, sys.executable, "-m", "viiwork", "demo", "--exit", "--json", str(numbers)]
    done = subprocess.run(
        ["ip", "netns", "exec", lan.names[0], *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(numbers.read_text())
    cold, warm = told["steps"][2], told["steps"][4]
    assert [step["node"] for step in told["steps"]] == ["demo-b", "demo-a", "demo-b", "demo-a", "demo-b"]
    assert 2300 <= cold["prompt_tokens"] <= 2700 and cold["reused_share"] < 0.05
    assert warm["reused_share"] >= 0.95
    assert "times sooner" in done.stdout
    running = subprocess.run(
        ["ip", "netns", "pids", lan.names[0]], capture_output=True, text=True, check=True
    )
    assert running.stdout.split() == []
