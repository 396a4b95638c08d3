"""Three real nodes with two models each, what is done to them in the middle of a run, and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import psutil

from tests.fakes.load import Ran, build_engine, engine_model, read_record
from tests.fakes.load_figures import Window
from tests.node.nodes import NodeProcess

NODES = {"a": "127.0.20.1", "b": "127.0.20.2", "c": "127.0.20.3"}
MODELS = ("alpha", "beta")
SLOTS = 4  # of each model on each node
SETTLE_S = 6.0  # idle connections to engines and peers are closed after 4 s
LOOK_S = 0.2  # how often a victim is looked at

Fault = Literal["none", "backend", "node", "deaf"]


@dataclass
class Cost:
    """What one node takes of the machine."""

    rss_mib: float
    fds: int

    @classmethod
    def of(cls, node: NodeProcess) -> Cost:
        process = psutil.Process(node.pid)
        return cls(process.memory_info().rss / 2**20, process.num_fds())


@dataclass
class Fleet:
    """The nodes of a run."""

    nodes: dict[str, NodeProcess]
    folder: Path
    http: aiohttp.ClientSession

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        return {name: (node.host, node.api_port) for name, node in self.nodes.items()}

    def ran(self) -> list[Ran]:
        return [
            one for name in self.nodes for model in MODELS for one in read_record(self.folder, name, model)
        ]

    def costs(self) -> dict[str, Cost]:
        return {name: Cost.of(node) for name, node in self.nodes.items()}

    async def until_whole(self) -> None:
        """All are healthy, and each sees all."""
        for node in self.nodes.values():
            await node.until_healthy(self.http)
        for node in self.nodes.values():
            for model in MODELS:
                await node.until_sees(self.http, model, len(self.nodes))

    async def idle(self) -> dict[str, str]:
        """What is left of leases, forwards, busy slots and waiters half a minute after the load, by node."""
        left = {}
        for name, node in self.nodes.items():
            try:
                await node.until_idle(self.http, 30)
            except AssertionError:
                status = await node.status(self.http)
                counts = {m["name"]: (m["busy"], m["queued"]) for m in status["models"]}
                left[name] = f"{status['requests']}, busy and queued: {counts}"
        return left


@contextlib.asynccontextmanager
async def fleet(folder: Path, routing: str) -> AsyncIterator[Fleet]:
    program = build_engine(folder)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        nodes: dict[str, NodeProcess] = {}
        try:
            for name, host in NODES.items():
                lines = "".join(engine_model(folder, program, name, model, SLOTS) for model in MODELS)
                seeds = tuple(node.seed for node in nodes.values())
                extra = f"routing: {{{routing}}}\nkv_share: {{enabled: false}}"
                nodes[name] = NodeProcess(name, host, folder, lines, seeds, extra)
                nodes[name].start()
            whole = Fleet(nodes, folder, http)
            await whole.until_whole()
            yield whole
        finally:
            await asyncio.gather(*(asyncio.to_thread(node.end) for node in nodes.values()))


@dataclass
class Depths:
    """Lengths of the queues over time, and whatever free slots cannot be."""

    seen: list[tuple[float, dict[tuple[str, str], int]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def watch(self, fleet: Fleet, names: Sequence[str], interval_s: float = 1.0) -> None:
        """Until cancelled. A node that does not answer is left out."""
        while True:
            depths: dict[tuple[str, str], int] = {}
            for name in names:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    found = await fleet.nodes[name].get(fleet.http, "/v1/fleet/capacity")
                    status = await fleet.nodes[name].status(fleet.http)
                    depths |= {(name, m["name"]): m["queued"] for m in status["models"]}
                    self.wrong += [line for model in found["models"] for line in _wrong(name, model)]
            self.seen.append((time.monotonic(), depths))
            await asyncio.sleep(interval_s)

    def mean(self, window: Window) -> dict[tuple[str, str], float]:
        inside = [depths for at, depths in self.seen if window[0] <= at <= window[1]]
        queues = {queue for depths in inside for queue in depths}
        return {q: sum(d[q] for d in inside if q in d) / sum(q in d for d in inside) for q in sorted(queues)}


def _wrong(name: str, model: dict[str, Any]) -> list[str]:
    fresh = [host for host in model["hosts"] if not host.get("stale")]
    found = [
        f"{name} says {host['node']} has {host['free']} free of {host['slots']} for {model['name']}"
        for host in fresh
        if not 0 <= host["free"] <= host["slots"]
    ]
    if model["free"] != sum(host["free"] for host in fresh):
        found.append(f"{name} adds {model['name']} up to {model['free']}")
    return found


@dataclass
class Harm:
    """One fault: when it was, when it was noticed, when it was over."""

    kind: Fault
    victim: str = ""  # node, or backend
    began_at: float = 0.0
    ended_at: float = 0.0
    noticed_s: float | None = None
    back_s: float | None = None  # after the fault was over
    sockets: int = 0  # of the other nodes to a hung one, at the end of the fault

    @property
    def gone(self) -> Window:
        """While the victim's slots do not count."""
        return self.began_at, self.ended_at + (self.back_s or 0.0)


async def do_harm(fleet: Fleet, kind: Fault, after_s: float, for_s: float) -> Harm:
    """Let it be for `after_s`, break something for `for_s`, and watch it come back."""
    await asyncio.sleep(after_s)
    match kind:
        case "backend":
            return await _freeze_backend(fleet, "b", f"{MODELS[0]}/0", for_s)
        case "node":
            return await _hang_node(fleet, "c", for_s, deaf=False)
        case "deaf":
            return await _hang_node(fleet, "c", for_s, deaf=True)
        case _:
            return Harm(kind)


async def _freeze_backend(fleet: Fleet, name: str, backend: str, for_s: float) -> Harm:
    node = fleet.nodes[name]
    await node.status(fleet.http)
    pid = node.engine_pids()[backend]
    harm = Harm("backend", f"{name} {backend}", time.monotonic())

    async def healthy() -> bool:
        status = await node.status(fleet.http)
        return any(
            b["id"] == backend and b["status"] == "healthy" for m in status["models"] for b in m["backends"]
        )

    os.kill(pid, signal.SIGSTOP)
    harm.noticed_s = await _until(healthy, False, harm.began_at, for_s)
    await asyncio.sleep(max(harm.began_at + for_s - time.monotonic(), 0))
    with contextlib.suppress(ProcessLookupError):  # the node has replaced it
        os.kill(pid, signal.SIGCONT)
    harm.ended_at = time.monotonic()
    harm.back_s = await _until(healthy, True, harm.ended_at, 60)
    return harm


async def _hang_node(fleet: Fleet, name: str, for_s: float, *, deaf: bool) -> Harm:
    """Stop the node, or put a stranger at its place that takes connections and never answers."""
    victim = fleet.nodes[name]
    asked = next(node for other, node in fleet.nodes.items() if other != name)
    stranger = None
    harm = Harm("deaf" if deaf else "node", name, time.monotonic())

    async def fresh() -> bool:
        found = await asked.get(fleet.http, "/v1/fleet/capacity")
        hosts = [h for m in found["models"] for h in m["hosts"] if h["node"] == name]
        return bool(hosts) and all(not h.get("stale") and h["slots"] == SLOTS for h in hosts)

    if deaf:
        victim.kill()
        assert victim.process is not None
        victim.process.wait()
        stranger = await asyncio.start_server(_never_answer, victim.host, victim.api_port)
    else:
        victim.kill(signal.SIGSTOP)
    harm.noticed_s = await _until(fresh, False, harm.began_at, for_s)
    await asyncio.sleep(max(harm.began_at + for_s - time.monotonic(), 0))
    harm.sockets = sum(_sockets_to(victim, node) for node in fleet.nodes.values() if node is not victim)
    if stranger is not None:
        stranger.close()
        victim.start()
    else:
        victim.kill(signal.SIGCONT)
    harm.ended_at = time.monotonic()
    harm.back_s = await _until(fresh, True, harm.ended_at, 60)
    return harm


def _sockets_to(victim: NodeProcess, node: NodeProcess) -> int:
    connections = psutil.Process(node.pid).net_connections("tcp")
    return sum(bool(c.raddr) and c.raddr[:2] == (victim.host, victim.api_port) for c in connections)


async def _never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()


async def _until(true: Any, wanted: bool, since: float, within_s: float) -> float | None:
    """Seconds from `since` until it is as wanted; None when that takes longer."""
    while time.monotonic() < since + within_s:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            if await true() == wanted:
                return time.monotonic() - since
        await asyncio.sleep(LOOK_S)
    return None
