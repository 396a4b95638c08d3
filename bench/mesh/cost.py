"""What a mesh costs each of its nodes while nothing happens: gossip, capacity polls and discovery.

    python bench/mesh/cost.py [--nodes 32] [--seconds 60] [--models 0] [--json FILE]

All nodes are whole `viiwork serve` processes on loopback addresses of this machine; with `--models N` each
serves N models of a fake engine. Counted is CPU time of the node's own process, so that other work on the
machine matters little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.node.lan import NO_SHARING, alive, fake_model
from tests.node.nodes import NodeProcess

BAR_PERCENT = 5.0
STARTS_AT_ONCE = 4
SETTLE_S = 5.0


def cpu_s(node: NodeProcess) -> float:
    times = psutil.Process(node.pid).cpu_times()
    return times.user + times.system


async def measure(n: int, seconds: float, n_models: int, folder: Path) -> dict[str, float]:
    models = "".join(fake_model(folder, f"m{k}") for k in range(n_models))
    hosts = [f"127.0.{90 + i // 200}.{1 + i % 200}" for i in range(n)]
    nodes = [NodeProcess(f"n{i}", host, folder, models, extra=NO_SHARING) for i, host in enumerate(hosts)]
    for node in nodes:
        node.seeds = (nodes[0].seed,)
        node.mesh = "rejoin_interval: 60s, "
    timeout = aiohttp.ClientTimeout(total=20)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for i, node in enumerate(nodes):
                node.start()
                if i % STARTS_AT_ONCE == STARTS_AT_ONCE - 1:
                    await node.until(http, "in", lambda s: len(alive(s)) > 1)
            for node in nodes:
                await node.until(http, "aware of all", lambda s: len(alive(s)) == n)
        await asyncio.sleep(SETTLE_S)
        before, began = [cpu_s(node) for node in nodes], time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began
        percent = [100 * (cpu_s(node) - b) / took_s for node, b in zip(nodes, before, strict=True)]
        rss_mib = [psutil.Process(node.pid).memory_info().rss / 2**20 for node in nodes]
    finally:
        for node in nodes:
            node.kill()
        for node in nodes:
            node.end()
    return {
        "median_percent": statistics.median(percent),
        "worst_percent": max(percent),
        "median_rss_mib": statistics.median(rss_mib),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--models", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and end what was started
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(args.nodes, args.seconds, args.models, Path(folder)))
    median, worst = figures["median_percent"], figures["worst_percent"]
    print(f"{args.nodes} nodes, of a core each: {median:.2f} % (median), {worst:.2f} % (worst); ", end="")
    print(f"bar {BAR_PERCENT:.0f} %; {figures['median_rss_mib']:.0f} MiB each")
    if args.json:
        args.json.write_text(json.dumps({"nodes": args.nodes, "seconds": args.seconds, **figures}, indent=2))


if __name__ == "__main__":
    main()
