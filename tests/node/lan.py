"""Whole nodes with fake engines on a LAN of network namespaces, as discovery and its benchmark use them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes.netns import Lan

from .nodes import NodeProcess

FAKE = Path(__file__).parent.parent / "fakes" / "llama_server.py"
NO_SHARING = "kv_share: {enabled: false}"


def fake_model(folder: Path, name: str = "m", *, parallel: int = 2, **faults: Any) -> str:
    """One entry of `models:` that a fake engine serves; keyword arguments are its faults."""
    script, model = folder / "llama-server", folder / "model.gguf"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    script.chmod(0o755)
    model.write_bytes(b"GGUF")
    return (
        f"  - {{name: {name}, engine: llamacpp, path: {model}, context: 256, parallel: {parallel}, "
        f"env: {{FAKE: '{json.dumps(faults)}'}}, llamacpp: {{binary: {script}, threads: 1}}}}\n"
    )


def lan_node(lan: Lan, i: int, folder: Path, models: str = "", **options: Any) -> NodeProcess:
    """A node with the ports and the config of a user: it finds its own address and its peers."""
    options = {"extra": NO_SHARING, "api_port": 8086, "mesh_port": 7946, "advertise": ""} | options
    return NodeProcess(f"n{i}", lan.address(i), folder, models, netns=lan.names[i], **options)


@contextmanager
def running(*nodes: NodeProcess) -> Iterator[None]:
    """Start them, and end them however the block ends."""
    try:
        for node in nodes:
            node.start()
        yield
    finally:
        for node in nodes:
            node.end()


def alive(status: dict[str, Any]) -> set[tuple[str, str]]:
    """Names and addresses of the members a node calls alive."""
    return {(m["node"], m["addr"]) for m in status["mesh"]["members"] if m["state"] == "alive"}


def state_of(status: dict[str, Any], name: str) -> str:
    return next((m["state"] for m in status["mesh"]["members"] if m["node"] == name), "unknown")


async def until_all_see_all(http: aiohttp.ClientSession, nodes: list[NodeProcess]) -> None:
    everyone = {(node.name, node.host) for node in nodes}
    for node in nodes:
        await node.until(http, "aware of everyone", lambda s: alive(s) == everyone)


def set_alias(node: NodeProcess, name: str, target: str) -> None:
    """As an operator on the node's machine does; an open mesh takes it from there alone."""
    words = ["alias", "set", name, target, "--force", "--node", "127.0.0.1:8086"]
    command = ["ip", "netns", "exec", node.netns, sys.executable, "-m", "viiwork", *words]
    subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


async def aliases(http: aiohttp.ClientSession, node: NodeProcess) -> dict[str, str]:
    return {alias["name"]: alias["target"] for alias in (await node.get(http, "/v1/aliases"))["aliases"]}


def until_says(netns: str, text: str, within_s: float = 60) -> str:
    """The node's status, asked inside its namespace, once it holds `text`."""
    program = (
        "import sys, time, urllib.request\n"
        "while True:\n"
        "    try:\n"
        "        answer = urllib.request.urlopen('http://127.0.0.1:8086/v1/status', timeout=5)\n"
        "        body = answer.read().decode()\n"
        "    except OSError:\n"
        "        body = ''\n"
        f"    if {text!r} in body:\n"
        "        sys.exit(print(body))\n"
        "    time.sleep(0.1)\n"
    )
    command = ["ip", "netns", "exec", netns, sys.executable, "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=True).stdout


async def ask(
    http: aiohttp.ClientSession, node: NodeProcess, model: str = "m", **body: Any
) -> tuple[int, str]:
    """A small chat; its status, and the node that answered."""
    json_body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **body}
    async with http.post(f"{node.api}/v1/chat/completions", json=json_body) as answer:
        await answer.read()
        return answer.status, answer.headers.get("X-Viiwork-Node", "")
