"""The lab's two hosts with the direct cable between them, and iperf3 on it, for the KV benchmarks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from viiwork.bench import net
from viiwork.bench.janitor import Janitor

FAR = "10.214.8.2"  # the far host's end of the cable


def inside(ns: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", ns, *command]


@contextmanager
def namespaces() -> Iterator[tuple[str, str, str]]:
    """Both hosts and the cable, at 10 Gb/s until it is shaped; removed in every case."""
    janitor = Janitor()
    try:
        with net.LabNet(janitor) as lab:
            lab.shape(net.CABLE, 10_000)
            assert lab.far.address(net.CABLE) == FAR
            yield lab.near.namespace, lab.far.namespace, net.CABLE
    finally:
        janitor.close()


def shape(ns: str, dev: str, gbits: int) -> None:
    net.shape(ns, dev, gbits * 1000)


def iperf(near: str, far: str, size: int) -> float:
    """Received Gb/s of one stream."""
    server = subprocess.Popen(
        inside(far, "iperf3", "-s", "-1", "-B", FAR, "--forceflush"), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        out = net.run(*inside(near, "iperf3", "-c", FAR, "-n", str(size), "-J"))
    finally:
        server.kill()
        server.wait()
    return float(json.loads(out)["end"]["sum_received"]["bits_per_second"]) / 1e9
