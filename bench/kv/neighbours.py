"""What kv_share's saves do to another session's stream: its token gaps with kv_share on and off.

Two fleets of two nodes each on loopback, with a real engine (SmolLM2, one thread) and alike but for
`kv_share.enabled`. On the first node of a fleet one client streams without end while another one holds a
long conversation and adds a few words a turn; with kv_share on, each turn's state is saved whole and its
end sent to the second node. Rounds visit the fleets in turn, with the same conversations, so that the
machine's other work falls on both. A gap is the time between two tokens of the stream; the reading of
the turns' prompts is in it on both sides.

    python bench/kv/neighbours.py [--rounds 5] [--seconds 20] [--rest 2.0] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from viiwork.host.demo_model import ensure_demo_model

READY_S = 120.0
CONTEXT = 4096
OPENING_WORDS = 900
WORDS = "anchor bridge candle desert engine forest garden harbour island jacket kernel ladder".split()


def free_port(host: str) -> int:
    with socket.socket() as tcp:
        tcp.bind((host, 0))
        return int(tcp.getsockname()[1])


@dataclass
class Node:
    """One `viiwork serve`."""

    name: str
    host: str
    folder: Path
    slots: int
    api: str = ""
    seed: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self, model: Path, seeds: list[str], share: bool) -> None:
        api_port, mesh_port = free_port(self.host), free_port(self.host)
        self.api, self.seed = f"http://{self.host}:{api_port}", f"{self.host}:{mesh_port}"
        config = self.folder / f"{self.name}.yaml"
        config.write_text(
            f"node: {{name: {self.name}, state_dir: {self.folder / self.name}}}\n"
            f"api: {{host: {self.host}, port: {api_port}}}\n"
            f"mesh: {{network: lan, advertise: {self.host}, bind_port: {mesh_port}, open: true, "
            f"seeds: {json.dumps(seeds)}, rejoin_interval: 1s}}\n"
            f"kv_share: {{enabled: {str(share).lower()}, min_tokens: 64}}\n"
            f"models:\n  - {{name: m, engine: llamacpp, path: {model}, context: {CONTEXT}, "
            f"parallel: {self.slots}, llamacpp: {{binary: embedded, threads: 1}}}}\n"
        )
        with (self.folder / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "viiwork", "serve", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass
class Fleet:
    """Two nodes, and what was measured on the first one."""

    name: str
    share: bool
    nodes: list[Node]
    gaps_ms: list[list[float]] = field(default_factory=list)  # by round
    n_turns: int = 0
    stall_s: float = 0.0
    wall_s: float = 0.0

    @property
    def entry(self) -> Node:
        return self.nodes[0]


async def status(http: aiohttp.ClientSession, node: Node) -> dict[str, Any]:
    async with http.get(f"{node.api}/v1/status") as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def until_ready(http: aiohttp.ClientSession, fleet: Fleet) -> None:
    """Both healthy, and with kv_share on each linked to the other."""
    async with asyncio.timeout(READY_S):
        for node in fleet.nodes:
            while True:
                with suppress(aiohttp.ClientError):
                    told = await status(http, node)
                    healthy = all(b["status"] == "healthy" for m in told["models"] for b in m["backends"])
                    if healthy and (told["kv_share"]["links"] or not fleet.share):
                        break
                await asyncio.sleep(0.2)


def headers(node: Node, session: str) -> dict[str, str]:
    return {"X-Viiwork-Prefer": node.name, "X-Session-Id": session}


async def stream(http: aiohttp.ClientSession, node: Node, gaps_ms: list[float]) -> None:
    """The neighbour, until it is cancelled."""
    body = {
        "model": "m",
        "stream": True,
        "ignore_eos": True,
        "max_tokens": CONTEXT - 200,
        "messages": [{"role": "user", "content": "Tell a story that does not end."}],
    }
    while True:
        last = 0.0
        async with http.post(
            f"{node.api}/v1/chat/completions", json=body, headers=headers(node, "neighbour")
        ) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last:
                        gaps_ms.append((now - last) * 1000)
                    last = now


class Conversation:
    """The one whose turns are saved."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._rng = fleet, random.Random(seed)
        self._session = f"conversation {seed}"
        self._messages: list[dict[str, str]] = []

    async def turn(self, http: aiohttp.ClientSession, n_words: int) -> None:
        text = " ".join(self._rng.choice(WORDS) for _ in range(n_words))
        self._messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self._messages, "max_tokens": 4, "temperature": 0}
        node = self._fleet.entry
        async with http.post(
            f"{node.api}/v1/chat/completions", json=body, headers=headers(node, self._session)
        ) as answer:
            told = await answer.json()
        if answer.status != 200:
            raise SystemExit(f"{self._fleet.name}: {told}")
        self._messages.append(told["choices"][0]["message"])
        self._fleet.n_turns += 1


async def one_round(http: aiohttp.ClientSession, fleet: Fleet, seed: int, args: argparse.Namespace) -> None:
    gaps_ms: list[float] = []
    conversation = Conversation(fleet, seed)
    await conversation.turn(http, OPENING_WORDS)
    neighbour = asyncio.create_task(stream(http, fleet.entry, gaps_ms))
    try:
        while len(gaps_ms) < 20:  # it has begun
            await asyncio.sleep(0.05)
        gaps_ms.clear()
        before = (await status(http, fleet.entry))["kv_share"].get("stall_s", {})
        began = time.monotonic()
        while time.monotonic() < began + args.seconds:
            await conversation.turn(http, 6)
            await asyncio.sleep(args.rest)
    finally:
        neighbour.cancel()
        await asyncio.gather(neighbour, return_exceptions=True)
    after = (await status(http, fleet.entry))["kv_share"].get("stall_s", {})
    fleet.stall_s += sum(after.values()) - sum(before.values())
    fleet.wall_s += time.monotonic() - began
    fleet.gaps_ms.append(gaps_ms)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def row(fleet: Fleet, saves: int) -> dict[str, Any]:
    """Medians of the rounds."""
    mid = statistics.median
    return {
        "fleet": fleet.name,
        "gaps": sum(len(gaps) for gaps in fleet.gaps_ms),
        "p50_ms": round(mid(percentile(gaps, 0.5) for gaps in fleet.gaps_ms), 2),
        "p99_ms": round(mid(percentile(gaps, 0.99) for gaps in fleet.gaps_ms), 2),
        "p99_all_ms": round(percentile([gap for gaps in fleet.gaps_ms for gap in gaps], 0.99), 2),
        "max_ms": round(max(max(gaps) for gaps in fleet.gaps_ms), 1),
        "turns": fleet.n_turns,
        "saves": saves,
        "stall_share": round(fleet.stall_s / fleet.wall_s, 5),
    }


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    model = ensure_demo_model()
    fleets = []
    for i, share in enumerate((True, False)):
        name = "on" if share else "off"
        nodes = [Node(f"{name}-{end}", f"127.0.{60 + i}.{n}", folder, 3) for n, end in enumerate("ab", 1)]
        fleets.append(Fleet(name, share, nodes))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        try:
            for fleet in fleets:
                fleet.nodes[0].start(model, [], fleet.share)
                fleet.nodes[1].start(model, [fleet.nodes[0].seed], fleet.share)
            for fleet in fleets:
                await until_ready(http, fleet)
            for n in range(args.rounds):
                for fleet in fleets if n % 2 == 0 else reversed(fleets):
                    await one_round(http, fleet, n, args)
                    gaps = fleet.gaps_ms[-1]
                    print(f"round {n} {fleet.name}: p99 {percentile(gaps, 0.99):.1f} ms of {len(gaps)} gaps")
            told = [await status(http, fleet.entry) for fleet in fleets]
        finally:
            for fleet in fleets:
                for node in fleet.nodes:
                    node.end()
    rows = []
    for fleet, one in zip(fleets, told, strict=True):
        saves = one["kv_share"]["sent"]["done"] if fleet.share else 0
        rows.append(row(fleet, saves))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds between two turns")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="viiwork-bench-") as folder:
        rows = asyncio.run(measure(args, Path(folder)))
    print("kv_share    gaps  p50 ms  p99 ms  p99 of all  max ms  turns  saves  stopped")
    for one in rows:
        print(
            f"{one['fleet']:8} {one['gaps']:7} {one['p50_ms']:7} {one['p99_ms']:7} {one['p99_all_ms']:11} "
            f"{one['max_ms']:7} {one['turns']:6} {one['saves']:6} {one['stall_share']:8.2%}"
        )
    on, off = rows
    print(f"p99 with kv_share on: {on['p99_ms'] / off['p99_ms'] - 1:+.1%}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
