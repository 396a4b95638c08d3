"""Two network namespaces joined by a shaped veth pair, and iperf3 on it: what the KV benchmarks run over."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NEAR, FAR = "10.99.7.1", "10.99.7.2"


def sh(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def inside(ns: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", ns, *command]


@contextmanager
def namespaces() -> Iterator[tuple[str, str, str]]:
    """Two joined namespaces with unique names, and the near device; removed in every case."""
    tag = f"{os.getpid() % 100_000}"
    near, far, near_dev, far_dev = f"vwn{tag}", f"vwf{tag}", f"vwa{tag}", f"vwb{tag}"
    try:
        sh("ip", "netns", "add", near)
        sh("ip", "netns", "add", far)
        pair = ("type", "veth", "peer", "name", far_dev, "netns", far)
        sh("ip", "link", "add", near_dev, "netns", near, *pair)
        for ns, dev, address in ((near, near_dev, NEAR), (far, far_dev, FAR)):
            sh("ip", "-n", ns, "addr", "add", f"{address}/24", "dev", dev)
            sh("ip", "-n", ns, "link", "set", dev, "up")
            sh("ip", "-n", ns, "link", "set", "lo", "up")
        yield near, far, near_dev
    finally:
        for ns in (near, far):
            sh("ip", "netns", "del", ns, check=False)


def shape(ns: str, dev: str, gbits: int) -> None:
    burst = "128kb" if gbits <= 1 else "1mb"
    command = ("tc", "-n", ns, "qdisc", "replace", "dev", dev, "root")
    sh(*command, "tbf", "rate", f"{gbits}gbit", "burst", burst, "latency", "50ms")


def iperf(near: str, far: str, size: int) -> float:
    """Received Gb/s of one stream."""
    server = subprocess.Popen(
        inside(far, "iperf3", "-s", "-1", "-B", FAR, "--forceflush"), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        out = sh(*inside(near, "iperf3", "-c", FAR, "-n", str(size), "-J"))
    finally:
        server.kill()
        server.wait()
    return float(json.loads(out)["end"]["sum_received"]["bits_per_second"]) / 1e9
