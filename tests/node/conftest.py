"""Nodes that several tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from .nodes import NodeProcess, model_entry

SHARE = "kv_share: {min_tokens: 64}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield session


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path
) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Nodes A and B in one open mesh with the real engine; B serves one model more than A."""
    folder = tmp_path_factory.mktemp("pair")
    small = model_entry("small", smollm2)
    a = NodeProcess("a", "127.0.10.1", folder, small, extra=SHARE)
    b = NodeProcess(
        "b",
        "127.0.10.2",
        folder,
        small + model_entry("only-b", smollm2, context=512, parallel=1),
        extra=SHARE,
    )
    a.seeds, b.seeds = (b.seed,), (a.seed,)
    nodes = (a, b)
    try:
        for node in nodes:
            node.start()
        asyncio.run(_until_one_mesh(nodes))
        yield nodes
    finally:
        for node in nodes:
            node.end()


async def _until_one_mesh(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    async with aiohttp.ClientSession() as http:
        for node in nodes:
            await node.until_healthy(http)
        for node in nodes:
            await node.until_sees(http, "small", 2)
            await node.until_sees(http, "only-b", 1)
