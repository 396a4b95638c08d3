"""Real membership on loopback addresses, and small programs that answer like peers."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable

import pytest
from aiohttp import web

from viiwork.mesh.admission import MeshIdentity
from viiwork.mesh.membership import Membership
from viiwork.mesh.values import Member, MemberEvent

PATIENCE_S = 30.0  # only a broken test waits this long


def pytest_collection_modifyitems(config, items):
    """Namespaces need root and ip(8): elsewhere those tests are deselected, which pytest reports."""
    if sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip"):
        return
    out = [item for item in items if item.get_closest_marker("netns")]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


class Heard:
    """Everything a listener was told, and a way to wait for the next thing."""

    def __init__(self) -> None:
        self.items: list = []
        self._more = asyncio.Event()

    def __call__(self, *item) -> None:
        self.items.append(item[0] if len(item) == 1 else item)
        self._more.set()

    async def until(self, wanted: Callable[[object], bool]):
        """The first item, past or coming, that is wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for item in self.items:
                    if wanted(item):
                        return item
                self._more.clear()
                await self._more.wait()

    async def event(self, kind: str, name: str) -> MemberEvent:
        return await self.until(lambda e: e.kind == kind and e.member.name == name)


class MeshNode:
    """One membership and what it told."""

    def __init__(self, identity: MeshIdentity, **options) -> None:
        self.heard, self.fatal = Heard(), Heard()
        self.membership = Membership(identity, on_event=self.heard, on_fatal=self.fatal, **options)

    @property
    def gossip(self) -> str:
        return self.membership.local().gossip


def identity(name: str, ip: str, **changes) -> MeshIdentity:
    defaults = {"port": 0, "api_port": 8086, "version": "0.1.0", "loopback_ok": True}
    return MeshIdentity(name=name, addr=ip, **{**defaults, **changes})


@pytest.fixture
async def start_node():
    """Starts nodes and joins them to given ones; all are stopped at the end."""
    nodes: list[MeshNode] = []

    async def start(name: str, ip: str, *join: MeshNode, options=None, **changes) -> MeshNode:
        node = MeshNode(identity(name, ip, **changes), **(options or {}))
        await node.membership.start()
        nodes.append(node)
        await node.membership.join([n.gossip for n in join])
        return node

    yield start
    await asyncio.gather(*(n.membership.stop() for n in nodes))


@pytest.fixture
async def log_lines():
    """Warnings and errors as they are logged; wait with `until`."""
    heard = Heard()
    loop = asyncio.get_running_loop()

    class Tap(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            loop.call_soon_threadsafe(heard, record.getMessage())

    tap, logger = Tap(logging.INFO), logging.getLogger("viiwork")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(tap)
    yield heard
    logger.removeHandler(tap)
    logger.setLevel(before)


@pytest.fixture
async def serve():
    """Starts aiohttp handlers as a peer's API; answers the member that stands for it."""
    runners: list[web.AppRunner] = []

    async def start(handler, name: str = "b", ip: str = "127.0.0.2", **changes) -> Member:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, ip, 0)
        await site.start()
        return member(name, ip, runner.addresses[0][1], **changes)

    yield start
    await asyncio.gather(*(r.cleanup() for r in runners))


def member(name: str, ip: str, api_port: int, **changes) -> Member:
    defaults = {"gossip_port": 7946, "state": "alive", "epoch": 1}
    return Member(name=name, addr=ip, api_port=api_port, **{**defaults, **changes})


@pytest.fixture
def make_member():
    return member


@pytest.fixture
def make_identity():
    return identity


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def silent_port():
    """A port that accepts connections (the kernel does) and never says a word."""
    with socket.create_server(("127.0.0.3", 0)) as server:
        yield server.getsockname()[1]
