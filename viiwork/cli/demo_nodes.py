"""The demo's two nodes: their config files, their processes, and waiting until they serve."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from viiwork.errors import EngineError, UsageError

API_PORT = 8086
MESH_PORT = 7946
STOP_S = 20.0
MODEL = "smollm2"
MODEL_OF_B = "smollm2-b"

_CONFIG = """\
node: {{name: {name}, state_dir: {state_dir}}}
api: {{host: {host}}}
mesh: {{network: lan, advertise: {host}, open: true, seeds: ["{other}:{mesh_port}"], rejoin_interval: 2s}}
models:
"""
_MODEL = """\
  - name: {name}
    engine: llamacpp
    path: {path}
    context: {context}
    parallel: 2
    args: ["--batch-size", "256"]     # so that the progress of a prompt is seen
    llamacpp: {{binary: embedded}}
"""


@dataclass(slots=True)
class DemoNode:
    """One node of the demo and its process."""

    name: str
    host: str
    config: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def api(self) -> str:
        return f"http://{self.host}:{API_PORT}"


def plan_nodes(folder: Path, model: Path) -> tuple[DemoNode, DemoNode]:
    """Write both config files; B serves one model more than A."""
    nodes = (
        DemoNode("demo-a", "127.0.0.1", folder / "a.yaml", folder / "a.log"),
        DemoNode("demo-b", "127.0.0.2", folder / "b.yaml", folder / "b.log"),
    )
    for node, other in (nodes, nodes[::-1]):
        text = _CONFIG.format(
            name=node.name,
            state_dir=folder / node.name,
            host=node.host,
            other=other.host,
            mesh_port=MESH_PORT,
        ) + _MODEL.format(name=MODEL, path=model, context=4096)
        if node.name == "demo-b":
            text += _MODEL.format(name=MODEL_OF_B, path=model, context=1024)
        node.config.write_text(text)
    return nodes


def check_addresses(nodes: tuple[DemoNode, DemoNode]) -> None:
    """Raise `UsageError` with what to do if an address or port cannot be used."""
    for node in nodes:
        for port in (API_PORT, MESH_PORT):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((node.host, port))
                except OSError as error:
                    raise UsageError(_address_help(node.host, port, error)) from error


def _address_help(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is in use: stop what listens there (another viiwork?) and start the demo again"
    if sys.platform == "darwin":
        return f"this Mac has no address {host}: run 'sudo ifconfig lo0 alias {host} up' and try again"
    return (
        f"this machine cannot use {host} ({error.strerror}): run 'ip addr add {host}/8 dev lo' and try again"
    )


def start(node: DemoNode) -> None:
    """Start a node's process; its log goes to a file."""
    with node.log.open("wb") as log:
        node.process = subprocess.Popen(
            [sys.executable, "-m", "viiwork", "serve", "--config", str(node.config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
            start_new_session=True,  # Ctrl-C in the terminal is the demo's to handle
        )


def _environment() -> dict[str, str]:
    # The demo's mesh is open: a secret of the user's own mesh must not get into it.
    return {name: value for name, value in os.environ.items() if not name.startswith("VIIWORK_MESH_")}


async def wait_until_ready(
    http: aiohttp.ClientSession, nodes: tuple[DemoNode, DemoNode], on_state: Callable[[str, str], None]
) -> None:
    """Until every backend is healthy and each node sees the other's models. Raises `EngineError`."""
    for node in nodes:
        while (state := await _state(http, node)) != "ready":
            on_state(node.name, state)
            if node.process is not None and node.process.poll() is not None:
                raise EngineError(
                    f"{node.name} ended with code {node.process.returncode}: {last_line(node.log)}"
                )
            await asyncio.sleep(0.2)
        on_state(node.name, "ready")


async def _state(http: aiohttp.ClientSession, node: DemoNode) -> str:
    status = await get_json(http, f"{node.api}/v1/status")
    if status is None:
        return "starting"
    for model in status["models"]:
        for backend in model["backends"]:
            if backend["status"] == "dead":
                raise EngineError(f"{backend['id']} of {node.name} cannot run: {backend.get('reason', '')}")
            if backend["status"] != "healthy":
                return f"{model['name']}: {backend.get('phase') or backend['status']}"
    models = await get_json(http, f"{node.api}/v1/fleet/capacity")
    seen = {
        m["name"]: sum(not h.get("stale") for h in m["hosts"]) for m in (models or {"models": []})["models"]
    }
    return "ready" if seen.get(MODEL) == 2 and seen.get(MODEL_OF_B) == 1 else "joining the mesh"


async def get_json(http: aiohttp.ClientSession, url: str) -> Any:
    """The JSON at `url`, None while nobody answers."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
            return await response.json()
    return None


async def stop(nodes: tuple[DemoNode, DemoNode]) -> None:
    """SIGTERM to both, SIGKILL to what is left after `STOP_S`."""
    running = [node.process for node in nodes if node.process is not None and node.process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_line(log: Path) -> str:
    """The newest line of a node's log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote no log"
