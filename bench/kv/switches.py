"""Sessions that must change hosts of unlike layouts, with models of every form: how warm, is an answer wrong?

    sudo python bench/kv/switches.py [--switches 200] [--turns 2000] [--clients 6] [--json FILE]
                                     [--only switches,shapes,secrets]

Each host is a whole `viiwork serve` with real engines in a network namespace of its own, on one bridge. `a`
has two slots, `b` four in one unified cache, `c` three with flash attention off. Every one serves
SmolLM2-135M (dense) and two tiny random models, a hybrid and one with a sliding window. Two hosts (a, b) and
three run in turn.

`switches`: conversations whose every turn is sent to another host than the one before, through a random node,
once all hosts hold the state that was left. `shapes`: conversations that lose their last messages, part in
two, and are compacted, on another host each time. `secrets`: conversations that begin with the same words,
have one secret word each, and are asked for it again and again, everywhere, without any wait. All that was
said is then asked of one engine with one slot, turn after turn, and every fourth turn once more, from
nothing; `unmoved` tells how often that engine says the same again, parts at a tie, and says something else.

Needs root, ip(8) and the `dev` extra. Ends with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fakes.netns import Lan
from tests.fakes.tiny_models import make_tiny_model
from tests.node.nodes import NodeProcess
from tests.node.secret_words import Told, tell_secrets
from tests.node.switching import HostKind, Kind, Session, Switcher, Turn, judge, unmoved
from viiwork.host.demo_model import ensure_demo_model

KINDS = {"a": HostKind(2), "b": HostKind(4, unified=True), "c": HostKind(3, transposed=True)}
CONTEXT = 1024
SHARES = {"dense": 0.4, "hybrid": 0.3, "swa": 0.3}  # of the switches
HOSTS = {"ab": 0.3, "abc": 0.7}
SWITCHES_EACH = 10  # of one conversation; each adds some 30 tokens
AT_ONCE = 2  # with more than slots, another turn takes a slot before its state is saved
REPEATED = 4  # every fourth turn is asked of the unmoved engine once more, from nothing
WORDS = {
    "dense": 150,
    "hybrid": 450,
    "swa": 450,
}  # what random models say is read as other tokens
SHAPES = ("shrunk", "forked", "compacted")


@contextmanager
def running(names: str, models: dict[str, Path], folder: Path) -> Iterator[list[NodeProcess]]:
    """Hosts of these names in one secured mesh, each on a machine of its own."""
    env = {"VIIWORK_MESH_SECRET": base64.b64encode(os.urandom(32)).decode()}
    share = f"kv_share: {{min_tokens: 64, replicas: {len(names) - 1}}}"
    folder.mkdir()
    with Lan(len(names)) as lan:
        nodes = [
            NodeProcess(
                name,
                lan.address(i),
                folder,
                KINDS[name].models(models, CONTEXT),
                extra=share,
                env=env,
                netns=lan.names[i],
                api_port=8086,
                mesh_port=7946,
            )
            for i, name in enumerate(names)
        ]
        for node in nodes:
            node.seeds = tuple(other.seed for other in nodes if other is not node)
        try:
            for node in nodes:
                node.start()
            yield nodes
        finally:
            for node in nodes:
                node.end()


async def forced(switcher: Switcher, model: str, n: int) -> list[Turn]:
    """`n` switches of a model's conversations, some at once."""
    sizes = [min(SWITCHES_EACH, n - begun) for begun in range(0, n, SWITCHES_EACH)]
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, size: int) -> list[Turn]:
        name = f"{model} {number}"
        async with limit:
            session = Session(name, model, random.Random(name), name)
            return await switcher.switched(session, size, n_words=WORDS[model])

    runs = await asyncio.gather(*(one(number, size) for number, size in enumerate(sizes)))
    return [turn for run in runs for turn in run]


async def shapes(switcher: Switcher, model: str) -> list[Turn]:
    """Conversations with a key and without that shrink, fork and are compacted, on another host each time."""
    turns: list[Turn] = []
    for key in ("", "key"):
        rng = random.Random(f"{model}{key}")
        session = Session(f"{model} shapes {key}", model, rng, key and f"{model} {key}")
        turns += await switcher.switched(session, 2, n_words=WORDS[model])
        for kind in SHAPES:
            await switcher.until_committed(session, turns[-1])
            turns += await _shaped(switcher, session, kind, rng)
    for turn in turns:
        if turn.moved and turn.warmth != "warm" and not turn.log:
            await switcher.explain(turn)
    return turns


async def _shaped(switcher: Switcher, session: Session, kind: Kind, rng: random.Random) -> list[Turn]:
    others = [name for name in sorted(switcher.nodes) if name != session.host]
    host, entry = rng.choice(others), rng.choice(sorted(switcher.nodes))
    turns = []
    if kind == "forked":
        branch = session.fork(f"{session.name} branch", session.key)
        turns.append(await switcher.turn(branch, "forked", entry, host))
        session.grow()
    elif kind == "shrunk":
        session.shrink()
    else:
        session.compact(250)
    return [*turns, await switcher.turn(session, kind, entry, host)]


class Report:
    """Lines of the table, and whether all bars hold."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.misses: list[str] = []
        self.not_warm: list[Turn] = []

    async def add(self, hosts: str, model: str, path: Path, turns: Sequence[Turn], folder: Path) -> None:
        """Judge the turns by what an unmoved engine says."""
        again = await unmoved(path, folder, turns)
        anew = await unmoved(path, folder, turns[::REPEATED], cold=True)
        for kind in ("first", "grown", *SHAPES):
            mine = [turn for turn in turns if turn.kind == kind and (turn.moved or kind == "first")]
            if not mine:
                continue
            said = collections.Counter(judge(turn.said, again[turn.request]) for turn in mine)
            repeated = [turn.request for turn in mine if turn.request in anew]
            own = collections.Counter(judge(anew[request], again[request]) for request in repeated)
            warmth = collections.Counter(turn.warmth for turn in mine)
            row = {"hosts": hosts, "model": model, "kind": kind, "turns": len(mine)}
            row |= {word: warmth[word] for word in ("warm", "partly", "cold")}
            row["reused"] = round(statistics.median(turn.share for turn in mine), 3)
            row |= {word: said[word] for word in ("same", "tie", "wrong")}
            row["unmoved"] = f"{own['same']} {own['tie']} {own['wrong']}"
            held = [turn for turn in mine if turn.n_committed == len(hosts)]
            row["not_held"] = sum(turn.moved for turn in mine) - len(held)
            row["not_warm_though_held"] = sum(turn.warmth != "warm" for turn in held)
            self.rows.append(row)
            self._judge(row, kind)
            self.not_warm += [turn for turn in mine if turn.moved and turn.warmth != "warm"]
            for turn in mine:
                if judge(turn.said, again[turn.request]) == "wrong":
                    print(f"WRONG {hosts} {turn.model} {turn.session} {kind} at {turn.host}: {turn.text!r}")
                    print(f"   unmoved {again[turn.request]}\n   said {turn.said}")

    def _judge(self, row: dict[str, Any], kind: str) -> None:
        place = f"{row['hosts']} {row['model']} {kind}"
        if row["wrong"]:
            self.misses.append(f"{place}: {row['wrong']} wrong answers")
        if row["not_warm_though_held"] and kind == "grown":
            self.misses.append(f"{place}: {row['not_warm_though_held']} not warm after commit")

    def print(self) -> None:
        columns = list(self.rows[0])
        lines = [columns, *([str(row[column]) for column in columns] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def print_secrets(told: Sequence[Told], seconds: float, report: Report) -> dict[str, Any]:
    """What came of the secret words."""
    others = [one for one in told if one.others]
    silent = [one for one in told if not one.others and not one.is_right]
    moved = [one.turn for one in told if one.turn.moved]
    warmth = collections.Counter(turn.warmth for turn in moved)
    figures = {
        "turns": len(told),
        "moves": len(moved),
        "warm": warmth["warm"],
        "partly": warmth["partly"],
        "cold": warmth["cold"],
        "own_word": sum(one.is_right for one in told),
        "no_word": len(silent),
        "others_word": len(others),
        "seconds": round(seconds),
    }
    print("secret words: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    for one in [*others, *silent]:
        print(f"  {one.word}: {one.turn.text!r} by {one.turn.session} at {one.turn.host}")
    if others:
        report.misses.append(f"secrets: {len(others)} turns named another's word")
    return figures


async def measure(args: argparse.Namespace, folder: Path) -> tuple[Report, dict[str, Any]]:
    smollm2 = ensure_demo_model()
    models = {"dense": smollm2}
    models |= {
        name: make_tiny_model(kind, smollm2, folder)
        for name, kind in (("hybrid", "qwen35"), ("swa", "gemma3"))
    }
    report, figures = Report(), {}
    timeout = aiohttp.ClientTimeout(total=300)
    for hosts, share in HOSTS.items():
        is_last = len(hosts) == max(map(len, HOSTS))
        if args.only == ["secrets"] and not is_last:
            continue
        runs: dict[str, list[Turn]] = {model: [] for model in models}
        with running(hosts, models, folder / hosts) as nodes:
            async with aiohttp.ClientSession(timeout=timeout) as http:
                switcher = Switcher(http, nodes)
                await switcher.until_ready(list(models))
                for model in models if args.only != ["secrets"] else ():
                    began = time.monotonic()
                    if "switches" in args.only:
                        n = round(args.switches * share * SHARES[model])
                        runs[model] += await forced(switcher, model, n)
                    if "shapes" in args.only:
                        runs[model] += await shapes(switcher, model)
                    print(
                        f"{hosts} {model}: {len(runs[model])} turns, {time.monotonic() - began:.0f} s",
                        flush=True,
                    )
                if "secrets" in args.only and is_last:
                    began = time.monotonic()
                    told = await tell_secrets(switcher, "dense", args.turns, at_once=args.clients)
                    figures = print_secrets(told, time.monotonic() - began, report)
                for node in nodes:
                    status = (await node.status(http))["kv_share"]
                    print(f"  {node.name}: moves {status['moves']}, not warm {status['not_warm_causes']}")
        for model, turns in runs.items():
            if turns:
                await report.add(hosts, model, models[model], turns, folder)
    return report, figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--switches", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2000, help="questions for secret words")
    parser.add_argument("--clients", type=int, default=6, help="conversations with secret words at once")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=["switches", "shapes", "secrets"]
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report, figures = asyncio.run(measure(args, Path(name)))
    for turn in report.not_warm:
        if turn.kind != "compacted":
            reused = f"{turn.cached} of {turn.prompt} reused"
            print(f"{turn.model} {turn.session} {turn.kind} at {turn.host}: {reused}")
            print("".join(f"    {line}\n" for line in turn.log), end="")
    if report.rows:
        report.print()
    for miss in report.misses:
        print(f"MISS {miss}")
    if args.json:
        args.json.write_text(
            json.dumps({"rows": report.rows, "secrets": figures, "misses": report.misses}, indent=1)
        )
    return 1 if report.misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
