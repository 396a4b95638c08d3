"""Nodes over engines that hold, save and restore states without computing anything."""

from __future__ import annotations

import json
import struct
import sys
import uuid
from pathlib import Path
from typing import Any

import aiohttp

from .nodes import NodeProcess

ENGINE = Path(__file__).parent.parent / "fakes" / "state_engine.py"
PATIENCE_S = 30.0  # only a broken test waits this long
SHARE = "kv_share: {min_tokens: 64}"


def state_model(folder: Path, node: str, *, parallel: int = 2, **env: Any) -> str:
    """The entry of model `m` of a node; `env` are the engine's settings."""
    weights, binary = folder / "m.gguf", folder / "state-engine"
    weights.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    binary.chmod(0o755)
    told = {"SEEN": str(folder / f"{node}.seen")} | {key: str(value) for key, value in env.items()}
    return (
        f"  - {{name: m, engine: llamacpp, path: {weights}, context: 4096, parallel: {parallel}, "
        f"env: {json.dumps(told)}, llamacpp: {{binary: {binary}, threads: 1}}}}\n"
    )


def seen(node: NodeProcess) -> list[str]:
    """What the node's engine did since its start, but for the probe and the self-test."""
    file = node.folder / f"{node.name}.seen"
    return file.read_text().splitlines() if file.exists() else []


def words(n: int) -> str:
    """A text of so many words that no engine has read."""
    return " ".join(uuid.uuid4().hex[:6] for _ in range(n))


async def turn(
    http: aiohttp.ClientSession,
    node: NodeProcess,
    messages: list[dict[str, str]],
    session: str,
    **more: Any,
) -> dict[str, Any]:
    """One turn at the node asked, while it has room; the answer is appended to the messages."""
    headers = {"X-Viiwork-Prefer": node.name, "X-Session-Id": session}
    body = {"model": "m", "messages": messages, "max_tokens": 4} | more
    async with http.post(f"{node.api}/v1/chat/completions", json=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        messages.append(answer["choices"][0]["message"])
        return answer["timings"] | {"node": response.headers["X-Viiwork-Node"]}


def kv(status: dict[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = status["kv_share"]
    return block


async def until_sharing(http: aiohttp.ClientSession, *nodes: NodeProcess) -> None:
    """Each node knows where the states of its model can go to."""
    for node in nodes:
        await node.until(
            http, "linked to its peers", lambda s: len(kv(s)["links"]) == len(nodes) - 1, PATIENCE_S
        )
