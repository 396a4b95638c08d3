"""A node whose parts fail ends as a whole."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from viiwork.config.load import LoadedConfig, load_config
from viiwork.node import backends
from viiwork.node.mesh import NodeMesh
from viiwork.node.node import Node

from .nodes import free_port

HOST = "127.0.10.40"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    path = tmp_path / "node.yaml"
    path.write_text(
        f"node: {{name: a, state_dir: {tmp_path / 'state'}}}\n"
        f"api: {{host: {HOST}, port: {free_port(HOST)}}}\n"
        f"mesh: {{network: lan, advertise: {HOST}, bind_port: {free_port(HOST)}, open: true}}\n"
        f"kv_share: {{dir: {tmp_path / 'kv'}}}\n"
    )
    return load_config(path, {})


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_a_part_that_fails_ends_the_node_with_code_1(loaded, monkeypatch, caplog):
    async def run(self: NodeMesh) -> None:
        raise LookupError("a bug")

    before = children()
    monkeypatch.setattr(NodeMesh, "run", run)
    async with asyncio.timeout(20):
        assert await Node(loaded).run() == 1
    assert "LookupError: a bug" in caplog.text
    assert children() <= before


async def test_a_start_that_fails_half_way_leaves_nothing_running(loaded, monkeypatch):
    def machine_facts(config: object) -> None:
        raise LookupError("a bug")

    before = children()
    monkeypatch.setattr(backends, "machine_facts", machine_facts)
    with pytest.raises(LookupError):
        async with asyncio.timeout(20):
            await Node(loaded).run()
    assert children() <= before
    with socket.socket() as probe:
        probe.bind((HOST, loaded.config.api.port))


async def test_engines_and_worker_end_also_when_leaving_the_mesh_fails(loaded, monkeypatch):
    async def leave(self: NodeMesh) -> None:
        await real_leave(self)
        raise LookupError("a bug")

    before, real_leave = children(), NodeMesh.leave
    monkeypatch.setattr(NodeMesh, "leave", leave)
    node = Node(loaded)
    running = asyncio.create_task(node.run())
    async with asyncio.timeout(20):
        while not (hasattr(node, "_mesh") and node._mesh.members()):
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(LookupError):
            await running
    assert children() <= before
