"""A machine that slept, and a process that was stopped: what they knew is old when they go on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp

from viiwork.config.load import parse_config
from viiwork.config.model import RoutingSection
from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.mesh.peer import PeerClient
from viiwork.node import mesh
from viiwork.node.alias_store import AliasStore
from viiwork.node.aliases import Aliases
from viiwork.node.dispatch import Dispatcher
from viiwork.node.mesh import NodeMesh

from .lan import NO_SHARING, ask, fake_model
from .nodes import NodeProcess, free_port


async def test_a_machine_that_slept_believes_no_report_from_before(monkeypatch, tmp_path: Path):
    asleep = [5.0]
    monkeypatch.setattr(mesh, "suspended_s", lambda: asleep[0])
    config = (
        f"mesh: {{open: true, network: lan, advertise: 127.0.27.1, bind_port: {free_port('127.0.27.1')}}}"
    )

    async def ready(grant):
        pass

    dispatcher = Dispatcher(
        "a", RoutingSection(), prepare=ready, on_end=lambda grant, outcome, binding: None, clock=lambda: 100.5
    )
    client = PeerClient("a")
    await client.start()
    node = NodeMesh(
        "a",
        parse_config(config.encode(), "f.yaml", {}),
        (),
        client,
        dispatcher,
        print,
        Aliases("a", AliasStore.open(tmp_path, 0), known=dispatcher.knows, served=dispatcher.is_served),
        address_taken := Addresses(),
        lambda event: None,
    )
    running = asyncio.create_task(node.run())
    try:
        assert await address_taken.next() == "127.0.27.1"
        dispatcher.peers.put("b", "http://b")
        model = ModelCapacity("m", slots=1, backends=1, healthy_backends=1)
        dispatcher.peers.reported(
            "b", PeerReport(CapacityReport("b", "1", (model,)), 100.0, 100.0, 0.1, "b:1")
        )
        assert list(dispatcher.peers.serving("m", 100.5))
        asleep[0] += 3 * 3600
        async with asyncio.timeout(60):
            while list(dispatcher.peers.serving("m", 100.5)):
                await asyncio.sleep(0.01)
        assert dispatcher.peers.knows("m", asyncio.get_running_loop().time())
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await node.leave()
        await client.stop()


class Addresses:
    """Hears of own addresses."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, ip: str) -> None:
        self._heard.put_nowait(ip)

    async def next(self) -> str:
        return await self._heard.get()


async def test_a_request_that_expired_while_the_node_was_stopped_is_answered_and_not_run(
    tmp_path: Path, http: aiohttp.ClientSession
):
    model = fake_model(tmp_path, parallel=1, answer_s=2.5)
    node = NodeProcess(
        "a", "127.0.27.2", tmp_path, model, (), f"routing: {{queue_timeout: 2s}}\n{NO_SHARING}"
    )
    try:
        node.start()
        await node.until_healthy(http)
        first = asyncio.create_task(ask(http, node))
        await node.until(http, "busy", lambda s: s["models"][0]["busy"] == 1)
        late = asyncio.create_task(ask(http, node))
        await node.until(http, "queued", lambda s: s["models"][0]["queued"] == 1)
        node.kill(signal.SIGSTOP)
        await asyncio.sleep(4)  # the engine goes on: its slot is free, and the request's time is over
        node.kill(signal.SIGCONT)
        assert (await first)[0] == 200
        assert (await late)[0] == 429
        await node.until_idle(http)
    finally:
        node.end()
