"""The nodes of a workload: `viiwork serve` as a user starts it, perhaps each in a network namespace."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from viiwork.bench.paced import Pace, arguments
from viiwork.core.logline import fault
from viiwork.errors import BenchError
from viiwork.limits import BENCH_READY_S, BENCH_STATUS_S

MODEL = "bench"
API_PORT, MESH_PORT = 8086, 7946
# Of the modelled host, for sessions without a slot; llama.cpp's own 8 GiB hold three of them.
RAM_MIB = 65_536
_CLONE_NEWNET = 0x40000000
_STOP_S = 20.0
_LOG_SHOWN = 600  # characters of a node's log in an error
_SECRET = "VIIWORK_MESH_SECRET"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of the nodes runs."""

    name: str
    addr: str  # in the mesh
    namespace: str = ""  # "" = this machine's own
    api_port: int = API_PORT
    mesh_port: int = MESH_PORT

    @property
    def api(self) -> str:
        return f"http://{self.addr}:{self.api_port}"


@dataclass(frozen=True, slots=True)
class Engines:
    """What the nodes run: a GGUF on llama.cpp, or else a simulated engine."""

    context: int  # tokens a slot
    slots: int
    model: Path | None = None
    pace: Pace | None = None
    stall_share: float | None = None  # `kv_share.stall_share`, None = as it is by default


class NodeView:
    """One node as agents and the collector see it: its address, and sockets that are opened where it is."""

    def __init__(self, name: str, api: str, namespace: str = "") -> None:
        self.name = name
        self.api = api
        connector = aiohttp.TCPConnector(
            limit=0, socket_factory=_sockets_in(namespace) if namespace else None
        )
        self.http = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 18
        )

    async def status(self) -> dict[str, Any]:
        """`/v1/status`. Raises `BenchError`."""
        try:
            async with self.http.get(
                f"{self.api}/v1/status", timeout=aiohttp.ClientTimeout(total=BENCH_STATUS_S)
            ) as answer:
                found = await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = "timed out" if isinstance(error, TimeoutError) else fault(error)
            raise BenchError(f"{self.name} ({self.api}) does not answer: {why}") from None
        if not isinstance(found, dict):
            raise BenchError(f"{self.name} ({self.api}) is no viiwork node")
        return found

    async def close(self) -> None:
        await self.http.close()


@asynccontextmanager
async def fleet(places: Sequence[Place], engines: Engines, folder: Path) -> AsyncIterator[list[NodeView]]:
    """Nodes that run, know one another and can share states; ended and gone afterwards.

    Raises `BenchError` when one of them does not come up, with the last of its log.
    """
    secret = base64.b64encode(os.urandom(32)).decode()
    program = _program(folder)
    running: list[subprocess.Popen[bytes]] = []
    views: list[NodeView] = []
    try:
        for place in places:
            config = folder / f"{place.name}.yaml"
            config.write_text(config_of(place, places, engines, folder, program))
            running.append(_start(place, config, secret))
        views += [NodeView(place.name, place.api, place.namespace) for place in places]
        for view, process in zip(views, running, strict=True):
            await _until_ready(view, process, folder, len(places))
        yield views
    finally:
        for view in views:
            await view.close()
        await asyncio.to_thread(_end, running)


def _program(folder: Path) -> Path:
    """The simulated engine as a program of its own, for `llamacpp.binary`."""
    program = folder / "paced-engine"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m viiwork.bench.paced "$@"\n')
    program.chmod(0o700)
    return program


def config_of(place: Place, places: Sequence[Place], engines: Engines, folder: Path, program: Path) -> str:
    """The config file of one node."""
    if engines.pace is not None:
        weights = folder / "paced.gguf"
        if not weights.exists():
            weights.write_bytes(_gguf())
        args = ", ".join(f'"{arg}"' for arg in arguments(engines.pace))
        options = f"{{binary: {program}, cache_ram_mib: {RAM_MIB}}}"
        model = f"path: {weights}, args: [{args}], llamacpp: {options}"
    else:
        threads = max(1, (os.cpu_count() or 1) // len(places))  # all of them are on this machine
        model = f"path: {engines.model}, llamacpp: {{threads: {threads}}}"
    shares = "" if engines.stall_share is None else f"kv_share: {{stall_share: {engines.stall_share}}}\n"
    seeds = ", ".join(f'"{other.addr}:{other.mesh_port}"' for other in places if other is not place)
    return (
        f"node: {{name: {place.name}, state_dir: {folder / place.name}}}\n"
        f"api: {{host: {place.addr}, port: {place.api_port}}}\n"
        f"mesh: {{network: lan, advertise: {place.addr}, bind_port: {place.mesh_port}, seeds: [{seeds}]}}\n"
        f"{shares}models:\n  - {{name: {MODEL}, engine: llamacpp, context: {engines.context}, "
        f"parallel: {engines.slots}, {model}}}\n"
    )


def _gguf() -> bytes:
    """A model file of one small tensor: what the node's checks of it need."""
    name = b"paced"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, len(name)) + name + struct.pack("<IQIQ", 1, 8, 0, 0)
    return header + bytes(-len(header) % 32) + bytes(32)


def _start(place: Place, config: Path, secret: str) -> subprocess.Popen[bytes]:
    inside = ["ip", "netns", "exec", place.namespace] if place.namespace else []
    with config.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*inside, sys.executable, "-m", "viiwork", "serve", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, _SECRET: secret},
            start_new_session=True,
        )


async def _until_ready(view: NodeView, process: subprocess.Popen[bytes], folder: Path, n_nodes: int) -> None:
    """Its engine serves, it hears the others', and states can go to them."""
    until = time.monotonic() + BENCH_READY_S
    why = "it does not answer"
    while time.monotonic() < until and process.poll() is None:
        with suppress(BenchError):
            why = _not_ready(await view.status(), n_nodes)
            if not why:
                return
        await asyncio.sleep(0.1)
    log = (folder / f"{view.name}.log").read_text(errors="replace")[-_LOG_SHOWN:]
    ended = "" if process.poll() is None else f" (it ended with {process.returncode})"
    raise BenchError(f"node {view.name} does not come up: {why}{ended}: {' '.join(log.split())}")


def _not_ready(status: dict[str, Any], n_nodes: int) -> str:
    models = [model for model in status.get("models", []) if model.get("name") == MODEL]
    if (
        not models
        or not models[0].get("backends")
        or any(b.get("status") != "healthy" for b in models[0].get("backends", []))
    ):
        return "its engine does not serve"
    shared = status.get("kv_share") or {}
    if not shared.get("enabled") or shared.get("off"):
        return f"kv_share is off there: {shared.get('off', 'by its config')}"
    if shared.get("not_portable"):
        return f"states cannot be shared: {shared['not_portable']}"
    peers = {link.get("peer") for link in shared.get("links", []) if link.get("addr")}
    if len(peers) < n_nodes - 1:
        return "it has no link to its peer"
    return ""


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _sockets_in(namespace: str) -> Callable[[Any], socket.socket]:
    """Opens sockets in a network namespace. They stay there; the thread is back before anything else runs."""
    setns = ctypes.CDLL(None, use_errno=True).setns

    def enter(fd: int) -> None:
        if setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")

    def make(info: Any) -> socket.socket:
        family, kind, proto, *_ = info
        own, there = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", f"/run/netns/{namespace}"))
        try:
            enter(there)
            try:
                return socket.socket(family, kind, proto)
            finally:
                enter(own)
        finally:
            os.close(own)
            os.close(there)

    return make
