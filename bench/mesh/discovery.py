"""How soon nodes that nobody told of each other are one mesh, lose a killed one, and mend a split.

    sudo python bench/mesh/discovery.py [--nodes 5] [--split-s 60] [--rounds 1] [--json FILE]

Each node is a whole `viiwork serve` with a fake engine, in a network namespace of its own on one bridge, with
the ports and the config of a user: mDNS, no seeds. Needs root, ip(8) and the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fakes.netns import Lan
from tests.node.lan import aliases, alive, fake_model, lan_node, set_alias, state_of
from tests.node.nodes import NodeProcess

POLL_S = 0.02
GIVE_UP_S = 180.0
BARS_S = {
    "all see all": 5.0,
    "killed: not routed to": 3.0,
    "killed: dead": 12.0,
    "split: one mesh again": 65.0,
    "split: one alias table": 65.0,
}


async def until(what: str, true: Callable[[], Awaitable[bool]]) -> float:
    """Seconds from now until it holds."""
    began = time.monotonic()
    while time.monotonic() - began < GIVE_UP_S:
        try:
            if await true():
                return time.monotonic() - began
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"not {what} within {GIVE_UP_S:.0f} s")


async def measure(n: int, split_s: float, folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
        with Lan(n) as lan:
            nodes = [
                lan_node(lan, i, folder, fake_model(folder), mesh="rejoin_interval: 60s, ") for i in range(n)
            ]
            everyone = {(node.name, node.host) for node in nodes}

            async def all_see_all() -> bool:
                return all([alive(await node.status(http)) == everyone for node in nodes])

            async def all_answer() -> bool:
                return all([bool(await node.status(http)) for node in nodes])

            try:
                for node in nodes:
                    node.start()
                up_s, seen_s = await asyncio.gather(until("up", all_answer), until("one mesh", all_see_all))
                figures |= {"all answer": up_s, "all see all": seen_s}
                for node in nodes:
                    await node.until_healthy(http)
                    await node.until_sees(http, "m", n)

                gone, rest = nodes[-1], nodes[:-1]
                gone.kill(signal.SIGKILL)
                figures |= await lost(http, gone, rest)
                gone.end()
                gone.start()
                figures["killed: back"] = await until("one mesh", all_see_all)

                few = range(n // 2)
                lan.split(*few)

                async def apart() -> bool:
                    return all([len(alive(await node.status(http))) < n for node in rest])

                began = time.monotonic()
                # This process stays with the larger part; the smaller one is asked again after the split.
                rest = [node for i, node in enumerate(nodes) if i not in few]
                figures["split: noticed"] = await until("apart", apart)
                for node in (nodes[0], nodes[-1]):  # one in each part
                    await asyncio.to_thread(set_alias, node, f"of-{node.name}", "m")
                    await asyncio.to_thread(set_alias, node, "both", node.name)

                async def one_table() -> bool:
                    tables = [await aliases(http, node) for node in nodes]
                    return len(tables[0]) == 3 and all(table == tables[0] for table in tables)

                await asyncio.sleep(max(split_s - (time.monotonic() - began), 0.0))
                lan.heal()
                view_s, table_s = await asyncio.gather(
                    until("one mesh", all_see_all), until("one table", one_table)
                )
                figures |= {"split: one mesh again": view_s, "split: one alias table": table_s}
            finally:
                for node in nodes:
                    node.end()
    return figures


async def lost(http: aiohttp.ClientSession, gone: NodeProcess, rest: list[NodeProcess]) -> dict[str, float]:
    async def unrouted() -> bool:
        return not any([has_numbers(await node.get(http, "/v1/fleet/capacity"), gone.name) for node in rest])

    async def dead() -> bool:
        return all([state_of(await node.status(http), gone.name) == "dead" for node in rest])

    unrouted_s, dead_s = await asyncio.gather(until("stale", unrouted), until("dead", dead))
    return {"killed: not routed to": unrouted_s, "killed: dead": dead_s}


def has_numbers(fleet: dict[str, Any], name: str) -> bool:
    """Whether a node's report is fresh; routing uses no other."""
    return any(
        host.get("node") == name and "slots" in host for model in fleet["models"] for host in model["hosts"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--split-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and end what was started
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(asyncio.run(measure(args.nodes, args.split_s, Path(folder))))
    for name in rounds[0]:
        worst = max(figures[name] for figures in rounds)
        bar = f"  (bar {BARS_S[name]:.0f} s)" if name in BARS_S else ""
        print(f"{name:24} {worst:6.2f} s{bar}")
    if args.json:
        args.json.write_text(
            json.dumps({"nodes": args.nodes, "split_s": args.split_s, "rounds": rounds}, indent=2)
        )


if __name__ == "__main__":
    main()
