"""Nodes over engines that do as told, for tests that change or break them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from .nodes import NodeProcess, model_entry

ENGINE = Path(__file__).parent.parent / "fakes" / "chat_engine.py"


def chat_model(folder: Path, name: str, parallel: int = 1, context: int = 1024) -> str:
    """A model entry served by the chat engine."""
    weights = folder / f"{name}.gguf"
    weights.write_bytes(b"GGUF")
    binary = folder / "chat-engine"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    binary.chmod(0o755)
    return model_entry(name, weights, parallel=parallel, context=context, binary=str(binary))


@contextlib.asynccontextmanager
async def running(http: aiohttp.ClientSession, *nodes: NodeProcess) -> AsyncIterator[None]:
    """Starts the nodes, each with the first one as its seed; ends them."""
    try:
        for node in nodes:
            node.seeds = () if node is nodes[0] else (nodes[0].seed,)
            node.start()
        for node in nodes:
            await node.until_healthy(http)
        yield
        for node in nodes:
            assert "Traceback" not in node.log
    finally:
        for node in nodes:
            node.end()


def question(text: str, model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]} | more


async def ask(
    http: aiohttp.ClientSession, node: NodeProcess, body: dict[str, Any], **headers: str
) -> tuple[int, str]:
    """Status of the answer, and the node that ran the request ("" for an error of the node's own)."""
    headers = {"X-Viiwork-Prefer": node.name} | headers  # here, unless there is no room
    async with http.post(f"{node.api}/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status, response.headers.get("X-Viiwork-Node", "")


async def until_busy(http: aiohttp.ClientSession, node: NodeProcess, model: str, n: int = 1) -> None:
    await node.until(http, "busy", lambda s: any(m["name"] == model and m["busy"] == n for m in s["models"]))


def asking(
    http: aiohttp.ClientSession, node: NodeProcess, body: dict[str, Any]
) -> asyncio.Task[tuple[int, str]]:
    return asyncio.create_task(ask(http, node, body))
