"""Two machines, as far as the network can tell: an open LAN mesh over private addresses and a cut cable."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("member_program.py")
PATIENCE_S = 30.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines():
    """Names of two namespaces joined by a cable; 10.77.7.1 and 10.77.7.2."""
    tag = uuid.uuid4().hex[:6]
    names = [f"vw{tag}a", f"vw{tag}b"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for n, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.7.{n}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.netns
async def test_an_open_lan_mesh_joins_over_private_addresses_and_notices_a_cut_cable(machines):
    processes = [await member_in(machines, n) for n in (0, 1)]
    try:
        await heard(processes[0], "joined b 10.77.7.2")
        await heard(processes[1], "joined a 10.77.7.1")
        ip("-n", machines[0], "link", "set", machines[0], "down")
        await heard(processes[0], "dead b 10.77.7.2")
        await heard(processes[1], "dead a 10.77.7.1")
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def member_in(machines: list[str], n: int) -> asyncio.subprocess.Process:
    args = ["ab"[n], f"10.77.7.{n + 1}", "7946", f"10.77.7.{2 - n}:7946"]
    return await asyncio.create_subprocess_exec(
        "ip",
        "netns",
        "exec",
        machines[n],
        sys.executable,
        str(PROGRAM),
        *args,
        stdout=asyncio.subprocess.PIPE,
    )


async def heard(process: asyncio.subprocess.Process, line: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            got = await process.stdout.readline()
            assert got, f"the program ended before it said {line!r}"
            if got.decode().strip() == line:
                return
