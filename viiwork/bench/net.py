"""The lab's two hosts: network namespaces, with a switched link and a direct cable shaped at will."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from viiwork.bench.janitor import Janitor, remove_namespace
from viiwork.errors import BenchError

PREFIX = "vwlab"  # of the namespaces' names; the maker's pid follows, so that what a dead one left is known
SWITCH, CABLE = "switch0", "cable0"
_NETWORKS = {SWITCH: "10.214.7", CABLE: "10.214.8"}
# tbf sends at most this much at once: less than a few packets of 64 KiB would not reach the rate.
_BURSTS = ((1.5, "128kb"), (5.0, "512kb"), (float("inf"), "1mb"))
_LATENCY = "50ms"  # the longest queue before the link, about a switch's


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two hosts."""

    namespace: str
    number: int  # last part of its addresses

    def address(self, device: str) -> str:
        return f"{_NETWORKS[device]}.{self.number}"

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]


class LabNet:
    """Two hosts joined by `SWITCH` and `CABLE`, both down until they are shaped. A context manager.

    The janitor removes them however the process ends. Raises `BenchError` where they cannot be made.
    """

    def __init__(self, janitor: Janitor) -> None:
        self._janitor = janitor
        tag = f"{PREFIX}{os.getpid()}"
        self.near, self.far = Host(f"{tag}-near", 1), Host(f"{tag}-far", 2)

    def __enter__(self) -> LabNet:
        check_lab()
        sweep()
        try:
            for host in (self.near, self.far):
                self._janitor.owes_namespace(host.namespace)
                run("ip", "netns", "add", host.namespace)
                run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            for device in (SWITCH, CABLE):
                near, far = self.near.namespace, self.far.namespace
                pair = ("type", "veth", "peer", "name", device, "netns", far)
                run("ip", "link", "add", device, "netns", near, *pair)
                for host in (self.near, self.far):
                    where = ("ip", "-n", host.namespace, "addr", "add")
                    run(*where, f"{host.address(device)}/24", "dev", device)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in (self.near, self.far):
            remove_namespace(host.namespace)

    def shape(self, device: str, mbps: int) -> None:
        """Plug the link in at so many Mb/s, each way."""
        for host in (self.near, self.far):
            shape(host.namespace, device, mbps)
            run("ip", "-n", host.namespace, "link", "set", device, "up")

    def unplug(self, device: str) -> None:
        for host in (self.near, self.far):
            run("ip", "-n", host.namespace, "link", "set", device, "down")


def shape(namespace: str, device: str, mbps: int) -> None:
    """Let what leaves by the device leave at so many Mb/s."""
    burst = next(size for most, size in _BURSTS if mbps / 1000 <= most)
    where = ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root")
    run(*where, "tbf", "rate", f"{mbps}mbit", "burst", burst, "latency", _LATENCY)


def check_lab() -> None:
    """Raises `BenchError` where no lab can be built, with what is missing."""
    if sys.platform != "linux":
        raise BenchError("--lab needs Linux: it is built of network namespaces")
    if os.geteuid() != 0:
        raise BenchError("--lab needs root, to make network namespaces: run it with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise BenchError(f"--lab needs the command {tool}: install iproute2")


def sweep() -> None:
    """Remove the hosts of labs whose process and janitor were both killed."""
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and pid.isascii() and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            remove_namespace(name)


def run(*command: str) -> str:
    """What the command prints. Raises `BenchError` with its own words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())
        raise BenchError(f"the lab cannot be built: {_shown(command)}: {why}")
    return done.stdout


def _shown(command: Sequence[str]) -> str:
    return " ".join(command)
