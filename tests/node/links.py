"""Machines on a LAN with direct cables between some of them, and one end of links running in each."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fakes.netns import Lan, ip

PATIENCE_S = 60.0  # only a broken test waits this long
SECRET = base64.b64encode(os.urandom(32)).decode()
PORT = 8086


class Cable:
    """A direct cable between two machines of a LAN: `device` at both ends, PREFIX.1 and PREFIX.2."""

    def __init__(self, lan: Lan, a: int, b: int, device: str, prefix: str = "") -> None:
        """Without a prefix the ends have their link-local addresses alone."""
        self.ends = lan.names[a], lan.names[b]
        self.device = device
        near, far = self.ends
        ip("link", "add", device, "netns", near, "type", "veth", "peer", "name", device, "netns", far)
        for number, end in enumerate(self.ends, 1):
            if prefix:
                ip("-n", end, "addr", "add", f"{prefix}.{number}/24", "dev", device)
            ip("-n", end, "link", "set", device, "up")

    def cut(self) -> None:
        ip("-n", self.ends[1], "link", "set", self.device, "down")

    def mend(self) -> None:
        ip("-n", self.ends[1], "link", "set", self.device, "up")


def shape(netns: str, device: str, rate: str, burst: str = "128kb") -> None:
    """What leaves the device does so at this rate."""
    words = ["tc", "-n", netns, "qdisc", "replace", "dev", device, "root", "tbf"]
    subprocess.run(
        [*words, "rate", rate, "burst", burst, "latency", "100ms"], check=True, capture_output=True
    )


def sent_bytes(netns: str, device: str) -> int:
    """What left the device since it was made."""
    command = ["ip", "netns", "exec", netns, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class End:
    """A running `link_program.py`."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
        self._process = process
        self.name = name
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, **question: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise AssertionError(f"{self.name} ended: {self.log[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def send(self, peer: str) -> dict[str, Any]:
        """One state to the peer; what became of it."""
        self.ask(send=peer)
        return await self.answer()

    async def links(self) -> list[dict[str, Any]]:
        self.ask(status=True)
        return list((await self.answer())["links"])

    async def received(self) -> dict[str, Any]:
        self.ask(status=True)
        return dict((await self.answer())["stats"]["received"])

    async def until_received(self, n_states: int) -> None:
        """Its stats follow a moment after the sender's answer."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.received())["done"] != n_states:
                await asyncio.sleep(0.05)

    async def until_link(self, peer: str, what: str, true: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The peer's links once `true` of them."""
        found: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    found = await self.links()
                    for link in found:
                        if link["peer"] == peer and true(link):
                            return link
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(
                f"{self.name} has no link that {what}: {found}\n{self.log[-3000:]}"
            ) from None

    async def until_best(self, peer: str, addr: str) -> dict[str, Any]:
        return await self.until_link(peer, f"goes to {addr}", lambda link: link["addr"] == addr)

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 30)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def ends(
    lan: Lan,
    folder: Path,
    state: Path,
    *,
    secret: str = SECRET,
    hosts: dict[int, str] | None = None,
    secrets: dict[int, str] | None = None,
    kv: dict[int, dict[str, Any]] | None = None,
    names: dict[int, str] | None = None,
) -> AsyncIterator[list[End]]:
    """One end on each machine of the LAN, called n0, n1, ...; all know one another as members.

    What is given by number differs from the rest.
    """
    running: list[End] = []
    called = [(names or {}).get(i, f"n{i}") for i in range(len(lan.names))]
    try:
        for i, netns in enumerate(lan.names):
            told = {
                "name": called[i],
                "addr": lan.address(i),
                "host": (hosts or {}).get(i, "0.0.0.0"),
                "port": PORT,
                "secret": (secrets or {}).get(i, secret),
                "members": {called[j]: lan.address(j) for j in range(len(lan.names)) if j != i},
                "folder": str(folder),
                "state": str(state),
                "kv": (kv or {}).get(i, {}),
            }
            program = Path(__file__).with_name("link_program.py")
            log = folder / f"n{i}.log"
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *("ip", "netns", "exec", netns, sys.executable, str(program), json.dumps(told)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                )
            running.append(End(process, called[i], log))
        for end in running:
            assert await end.answer() == {"ready": True}
        yield running
    finally:
        for end in running:
            await end.end()
