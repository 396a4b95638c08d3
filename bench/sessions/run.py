"""Conversations of growing context that enter three nodes at random, with and without session logic.

Three nodes on loopback with a real engine of two slots each serve eight conversations at once; half of them
name their session in a header. Each turn sends the whole conversation so far, as an agent does, and then its
tools work for about as long as the turn took, so that the share of busy slots does not depend on how fast
the machine is. First each node reads a few prompts of nobody's conversation, for a mesh that is in use has
measured its nodes. Some begin their prompt anew once, as a compaction does. A hit is a turn that found at
least 80 % of its conversation's last context read already, by the engine's own counts; first turns and
compactions are left out.

`plain` runs the same nodes with `routing.performance: false`: here first, then the peer with most room. Both
run in turn, with the same conversations and the same random numbers.

    python bench/sessions/run.py [--turns 10] [--sessions 8] [--rest 1.0] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from viiwork.host.demo_model import ensure_demo_model

NODES = 3
SLOTS = 2
CONTEXT = 4096
MODEL = "bench"
HIT_SHARE = 0.8
ANSWER_TOKENS = 16
READY_S = 180.0
WARM_UPS = 4
TURN_S = 900.0
WORDS = """
    account archive balance bridge candle carbon castle circuit copper cotton crystal delta desert engine
    fabric falcon filter forest garden glacier harbor hollow island jungle kernel ladder lantern magnet
    marble meadow mirror needle ocean orbit paper pepper piston planet pocket prism quarry ribbon river
    rocket saddle signal silver socket spiral station stream summit temple thread timber tunnel valley
    velvet window winter
""".split()


@dataclass
class Node:
    """One `viiwork serve`."""

    name: str
    host: str
    folder: Path
    api_port: int
    mesh_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def api(self) -> str:
        return f"http://{self.host}:{self.api_port}"

    def start(self, model: Path, seeds: list[str], extra: str) -> None:
        config = self.folder / f"{self.name}.yaml"
        config.write_text(
            f"node: {{name: {self.name}, state_dir: {self.folder / self.name}}}\n"
            f"api: {{host: {self.host}, port: {self.api_port}}}\n"
            f"mesh: {{network: lan, advertise: {self.host}, bind_port: {self.mesh_port}, open: true, "
            f"seeds: {json.dumps(seeds)}, rejoin_interval: 1s}}\n{extra}"
            f"models:\n  - {{name: {MODEL}, engine: llamacpp, path: {model}, context: {CONTEXT}, "
            f"parallel: {SLOTS}, llamacpp: {{binary: embedded, threads: 1}}}}\n"
        )
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "viiwork", "serve", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("VIIWORK_MESH")},
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
class Turn:
    """What one turn cost."""

    session: int
    number: int
    entry: str
    node: str
    ttft_s: float
    cached: int
    prompt: int
    total: int  # tokens the conversation holds after it
    kind: str  # first | continued | compaction
    before: int = 0  # tokens it held before
    moved: bool = False
    why: Any = None  # of a miss: the decisions, as the entry node tells them

    @property
    def is_hit(self) -> bool:
        return self.cached >= HIT_SHARE * self.before


@dataclass
class Session:
    """One agent: its conversation, its random numbers, its last turn."""

    number: int
    rng: random.Random
    compacts_at: int  # turn, -1 = never
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Turn | None = None
    n_refused: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Session-Id": f"bench {self.number}"} if self.number % 2 == 0 else {}

    def text(self, n_words: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(n_words))

    def begin(self) -> None:
        self.messages = [
            {"role": "system", "content": "You are an agent. Answer with one short sentence."},
            {"role": "user", "content": f"Task {self.number}. {self.text(800)}"},
        ]

    def compact(self) -> None:
        self.messages = [
            self.messages[0],
            {"role": "user", "content": f"Summary of task {self.number}: {self.text(400)}"},
        ]


def free_port(host: str) -> int:
    while True:
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind((host, 0))
            port: int = tcp.getsockname()[1]
            with contextlib.suppress(OSError):
                udp.bind((host, port))
                return port


async def ask(
    http: aiohttp.ClientSession, entry: Node, body: dict[str, Any], headers: dict[str, str]
) -> tuple[dict[str, Any], str, str, float, str] | None:
    """Timings, text, node, time of the first token and request id of an answer; None: refused or cut."""
    first_at, answer = 0.0, ""
    timings: dict[str, Any] = {}
    try:
        async with http.post(f"{entry.api}/v1/chat/completions", json=body, headers=headers) as response:
            if response.status in (429, 502, 503):
                return None
            if response.status != 200:
                raise SystemExit(f"{entry.name} answered {response.status}: {await response.text()}")
            node, request_id = response.headers["X-Viiwork-Node"], response.headers["X-Viiwork-Request"]
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                timings = event.get("timings") or timings
                for choice in event.get("choices", ()):
                    piece = choice.get("delta", {}).get("content") or ""
                    if piece and not first_at:
                        first_at = time.monotonic()
                    answer += piece
    except aiohttp.ClientPayloadError:
        return None
    return (timings, answer, node, first_at or time.monotonic(), request_id) if timings else None


async def one_turn(http: aiohttp.ClientSession, nodes: list[Node], session: Session, number: int) -> Turn:
    entry = session.rng.choice(nodes)
    last = session.last
    kind = "first" if last is None else "continued"
    if number == session.compacts_at:
        session.compact()
        kind = "compaction"
    body = {
        "model": MODEL,
        "messages": session.messages,
        "stream": True,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.8,
        "seed": session.number,
    }
    started = time.monotonic()
    while (reply := await ask(http, entry, body, session.headers)) is None:
        session.n_refused += 1
        await asyncio.sleep(0.5)  # as a client does that tries again; the time counts
    timings, answer, node, first_at, request_id = reply
    cached, prefilled = timings["cache_n"], timings["prompt_n"]
    turn = Turn(
        session=session.number,
        number=number,
        entry=entry.name,
        node=node,
        ttft_s=first_at - started,
        cached=cached,
        prompt=cached + prefilled,
        total=cached + prefilled + max(timings["predicted_n"] - 1, 0),
        kind=kind,
        before=last.total if last is not None else 0,
        moved=last is not None and last.node != node,
    )
    if kind == "continued" and not turn.is_hit:
        async with http.get(f"{entry.api}/v1/why/{request_id}") as response:
            turn.why = await response.json()
    session.last = turn
    result = f"Result of step {number}: {session.text(session.rng.randint(60, 140))}"
    session.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": result}]
    return turn


async def converse(
    http: aiohttp.ClientSession, nodes: list[Node], session: Session, n_turns: int, rest: float
) -> list[Turn]:
    session.begin()
    await asyncio.sleep(session.number)
    turns = []
    for number in range(n_turns):
        started = time.monotonic()
        turns.append(await one_turn(http, nodes, session, number))
        took_s = time.monotonic() - started
        await asyncio.sleep(took_s * rest * session.rng.uniform(0.5, 1.5))
    return turns


async def measure(http: aiohttp.ClientSession, node: Node) -> None:
    """Let the node find out how fast it reads."""
    rng = random.Random(node.name)
    for n in range(WARM_UPS):
        text = " ".join(rng.choice(WORDS) for _ in range(560))
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"{n} {text}"}], "max_tokens": 4}
        url = f"{node.api}/v1/chat/completions?host={node.name}"
        async with http.post(url, json=body | {"stream": True}) as response:
            await response.read()


async def until_ready(http: aiohttp.ClientSession, nodes: list[Node]) -> None:
    deadline = time.monotonic() + READY_S
    for node in nodes:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError, IndexError):
                async with http.get(f"{node.api}/v1/fleet/capacity") as response:
                    hosts = (await response.json())["models"][0]["hosts"]
                    if sum(host.get("slots", 0) for host in hosts) == NODES * SLOTS:
                        break
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"{node.name} is not ready:\n{(node.folder / f'{node.name}.log').read_text()}"
                )
            await asyncio.sleep(0.1)


async def run(label: str, extra: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All conversations against three fresh nodes."""
    with tempfile.TemporaryDirectory(prefix="viiwork-bench-") as folder:
        hosts = [f"127.0.33.{n + 1}" for n in range(NODES)]
        nodes = [
            Node(name, host, Path(folder), free_port(host), free_port(host))
            for name, host in zip("abc", hosts, strict=True)
        ]
        seeds = [f"{node.host}:{node.mesh_port}" for node in nodes]
        timeout = aiohttp.ClientTimeout(total=TURN_S)
        connector = aiohttp.TCPConnector(limit=0)
        try:
            for node in nodes:
                node.start(model, [seed for seed in seeds if not seed.startswith(f"{node.host}:")], extra)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
                await until_ready(http, nodes)
                await asyncio.gather(*(measure(http, node) for node in nodes))
                sessions = [
                    Session(
                        n, random.Random(options.seed * 100 + n), options.turns // 2 if n in (2, 5) else -1
                    )
                    for n in range(options.sessions)
                ]
                started = time.monotonic()
                found = await asyncio.gather(
                    *(converse(http, nodes, s, options.turns, options.rest) for s in sessions)
                )
                took_s = time.monotonic() - started
                said = []
                for node in nodes:
                    async with http.get(f"{node.api}/v1/status") as response:
                        said.append((await response.json())["sessions"])
        except BaseException:
            for node in nodes:
                print((node.folder / f"{node.name}.log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            for node in nodes:
                node.end()
    result = summary(label, [turn for turns in found for turn in turns], said, took_s)
    return result | {"refused_or_cut": sum(session.n_refused for session in sessions)}


def summary(label: str, turns: list[Turn], said: list[dict[str, Any]], took_s: float) -> dict[str, Any]:
    judged = [turn for turn in turns if turn.kind == "continued"]
    ttft = sorted(turn.ttft_s for turn in judged)
    with_key = [turn for turn in judged if turn.session % 2 == 0]
    without = [turn for turn in judged if turn.session % 2]
    return {
        "label": label,
        "turns": len(turns),
        "judged": len(judged),
        "hit_rate": share(judged),
        "hit_rate_with_header": share(with_key),
        "hit_rate_without": share(without),
        "ttft_p50_s": round(statistics.median(ttft), 3),
        "ttft_p90_s": round(ttft[int(len(ttft) * 0.9)], 3),
        "node_moves": sum(turn.moved for turn in judged),
        "tokens_read": sum(turn.prompt - turn.cached for turn in turns),
        "took_s": round(took_s, 1),
        "nodes_say": {
            "judged": sum(s["judged"] for s in said),
            "hits": sum(s["hits"] for s in said),
            "new": sum(s["new"] for s in said),
            "compactions": sum(s["compactions"] for s in said),
            "forks": sum(s["forks"] for s in said),
            "moves": {what: sum(s["moves"][what] for s in said) for what in ("nodes", "backends", "slots")},
        },
        "all_turns": [dataclasses.asdict(turn) for turn in turns],
        "misses": [
            f"session {t.session} turn {t.number} {t.entry}->{t.node}: {t.cached} of {t.before}"
            for t in judged
            if not t.is_hit
        ],
    }


def share(turns: list[Turn]) -> float | None:
    return round(sum(turn.is_hit for turn in turns) / len(turns), 4) if turns else None


def show(results: list[dict[str, Any]]) -> None:
    rows = [
        ("hit rate", lambda r: f"{r['hit_rate']:.1%}"),
        ("- with a header", lambda r: f"{r['hit_rate_with_header']:.1%}"),
        ("- without", lambda r: f"{r['hit_rate_without']:.1%}"),
        ("turns judged", lambda r: f"{r['judged']} of {r['turns']}"),
        ("TTFT p50", lambda r: f"{r['ttft_p50_s']:.2f} s"),
        ("TTFT p90", lambda r: f"{r['ttft_p90_s']:.2f} s"),
        ("moves between nodes", lambda r: str(r["node_moves"])),
        ("refused or cut", lambda r: str(r["refused_or_cut"])),
        ("prompt tokens read", lambda r: str(r["tokens_read"])),
        ("seconds", lambda r: f"{r['took_s']:.0f}"),
    ]
    print(f"\n{'':22}" + "".join(f"{r['label']:>14}" for r in results))
    for name, value in rows:
        print(f"{name:22}" + "".join(f"{value(r):>14}" for r in results))
    for r in results:
        print(f"\n{r['label']}: the nodes say {json.dumps(r['nodes_say'])}")
        for miss in r["misses"][:12] if r["label"] != "plain" else ():
            print(f"  miss: {miss}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument(
        "--rest", type=float, default=1.0, help="mean pause after a turn, in times its length"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("plain", "sessions"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = ensure_demo_model()
    modes = {
        "plain": "routing: {performance: false, queue_timeout: 600s}\nkv_share: {enabled: false}\n",
        "sessions": "routing: {queue_timeout: 600s}\n",
    }
    results = [
        asyncio.run(run(label, extra, model, options))
        for label, extra in modes.items()
        if options.only in (None, label)
    ]
    show(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
