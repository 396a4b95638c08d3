"""Real nodes for tests: `viiwork serve` as a process of its own, asked over its API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

READY_S = 90.0


def free_port(host: str) -> int:
    """A port that is free for tcp and udp on the address."""
    while True:
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind((host, 0))
            port = tcp.getsockname()[1]
            with contextlib.suppress(OSError):
                udp.bind((host, port))
                return port


def is_tested(status: dict[str, Any]) -> bool:
    """Is it known of every model what its moved states are good for?"""
    models = status["kv_share"]["models"].values()
    return bool(models) and all(found["verdict"] == "portable" for found in models)


def model_entry(
    name: str, path: Path | str, *, context: int = 1024, parallel: int = 2, binary: str = "embedded"
) -> str:
    """One entry of `models:`."""
    return (
        f"  - {{name: {name}, engine: llamacpp, path: {path}, context: {context}, parallel: {parallel}, "
        f"llamacpp: {{binary: {binary}, threads: 1}}}}\n"
    )


@dataclass
class NodeProcess:
    """One node; start it, ask it, kill it."""

    name: str
    host: str
    folder: Path
    models: str
    seeds: tuple[str, ...] = ()
    extra: str = ""
    env: dict[str, str] = field(default_factory=dict)
    api_port: int = 0
    mesh_port: int = 0
    netns: str = ""  # network namespace to run in
    advertise: str | None = None  # None = the host, "" = the node finds its own address
    mesh: str = ""  # more of the mesh section, such as "network: tailnet, "; what it says comes last
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.api_port = self.api_port or free_port(self.host)
        self.mesh_port = self.mesh_port or free_port(self.host)

    @property
    def api(self) -> str:
        return f"http://{self._written}:{self.api_port}"

    @property
    def seed(self) -> str:
        return f"{self._written}:{self.mesh_port}"

    @property
    def _written(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def write_config(self) -> Path:
        """The file the node reads, as its fields are now; put in place by a rename."""
        config = self.folder / f"{self.name}.yaml"
        new = self.folder / f"{self.name}.yaml.new"
        seeds = "".join(f'"{seed}", ' for seed in self.seeds)
        is_open = "" if "VIIWORK_MESH_SECRET" in self.env else "open: true, "
        advertise = self.host if self.advertise is None else self.advertise
        network = "" if "network:" in self.mesh else "network: lan, "
        interval = "" if "rejoin_interval:" in self.mesh else ", rejoin_interval: 1s"
        host = self.host if advertise else "0.0.0.0"
        new.write_text(
            f"node: {{name: {self.name}, state_dir: {self.folder / self.name}}}\n"
            f"api: {{host: '{host}', port: {self.api_port}}}\n"
            f"mesh: {{{network}{self.mesh}advertise: '{advertise}', bind_port: {self.mesh_port}, {is_open}"
            f"seeds: [{seeds}]{interval}}}\n"
            f"{self.extra}\n" + (f"models:\n{self.models}" if self.models else "models: []\n")
        )
        new.rename(config)
        return config

    def start(self) -> None:
        config = self.write_config()
        inside = ["ip", "netns", "exec", self.netns] if self.netns else []
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "viiwork", "serve", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("VIIWORK_MESH")} | self.env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def reload(self) -> None:
        self.write_config()
        self.kill(signal.SIGHUP)

    async def until_logged(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(READY_S):
            while self.log.count(text) < times:
                await asyncio.sleep(0.02)

    def end(self) -> int:
        """SIGTERM, SIGKILL after 20 s; the exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def engine_pids(self) -> dict[str, int]:
        """Backend id -> pid, as the last status showed them."""
        return self._pids

    _pids: dict[str, int] = field(default_factory=dict)

    async def get(self, http: aiohttp.ClientSession, path: str) -> Any:
        async with http.get(self.api + path, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return await response.json()

    async def status(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        status: dict[str, Any] = await self.get(http, "/v1/status")
        backends = [b for model in status["models"] for b in model["backends"]]
        self._pids = {b["id"]: b["pid"] for b in backends if "pid" in b}
        return status

    async def until(
        self, http: aiohttp.ClientSession, what: str, true, within_s: float = READY_S
    ) -> dict[str, Any]:
        """The first status for which `true(status)` holds."""
        status: dict[str, Any] = {}
        deadline = asyncio.get_running_loop().time() + within_s
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                status = await self.status(http)
                if true(status):
                    return status
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(
                    f"{self.name} ended with {self.process.returncode} before {what}:\n{self.log[-2000:]}"
                )
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name} not {what} within {within_s} s: {status}\n{self.log[-3000:]}")

    async def until_healthy(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        return await self.until(
            http,
            "healthy",
            lambda s: all(
                m["backends"] and all(b["status"] == "healthy" for b in m["backends"]) for m in s["models"]
            ),
        )

    async def until_idle(self, http: aiohttp.ClientSession, within_s: float = 5.0) -> dict[str, Any]:
        """No lease, forward, busy slot or waiter is left."""
        return await self.until(
            http,
            "idle",
            lambda s: (
                s["requests"]["leases"] == s["requests"]["forwards"] == 0
                and all(m["busy"] == m["queued"] == 0 for m in s["models"])
            ),
            within_s,
        )

    async def until_sees(self, http: aiohttp.ClientSession, model: str, n_hosts: int) -> None:
        """The node knows `n_hosts` fresh hosts with healthy slots of a model."""
        deadline = asyncio.get_running_loop().time() + READY_S
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                fleet = await self.get(http, "/v1/fleet/capacity")
                hosts = [h for m in fleet["models"] if m["name"] == model for h in m["hosts"]]
                if sum(h.get("slots", 0) > 0 for h in hosts) == n_hosts:
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name} does not see {n_hosts} hosts of {model}\n{self.log[-3000:]}")


def alive(pid: int) -> bool:
    """Is the process there and not a zombie?"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_portable(node: NodeProcess, http: aiohttp.ClientSession) -> None:
    """What an engine can restore is learned from a probe, a moment after it is healthy."""
    async with asyncio.timeout(60):
        while "kv" not in (await node.get(http, "/v1/capacity"))["models"][0]:
            await asyncio.sleep(0.05)
