"""Which kind of GPU this machine has, and who uses it. Blocks; a tool that hangs is cut off."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from typing import Literal, cast

Vendor = Literal["nvidia", "amd", "apple", "none"]

_TOOL_TIMEOUT_S = 10.0  # a driver that resets a card can block its tool for ever
_CARD = re.compile(r"^GPU \d+: ", re.MULTILINE)


def detect_vendor(wanted: str = "auto") -> Vendor:
    """The vendor whose cards engines are pinned to; `wanted` is `gpu.vendor` and wins unless it is `auto`."""
    if wanted != "auto":
        return cast(Vendor, wanted)
    listed = _run("nvidia-smi", "-L")
    if listed is not None and _CARD.search(listed):
        return "nvidia"
    if _run("rocm-smi", "--version") is not None:
        return "amd"
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "apple"
    return "none"


def card_pids(vendor: Vendor) -> dict[int, frozenset[int]] | None:
    """The processes on each card by its host index; None when the vendor's tool cannot tell.

    Only NVIDIA's does in a form that is the same in all releases.
    """
    if vendor != "nvidia":
        return None
    cards = _run("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
    apps = _run("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    if cards is None or apps is None:
        return None
    index_of = {uuid: int(index) for index, uuid in _pairs(cards) if index.isdecimal()}
    found: dict[int, set[int]] = {index: set() for index in index_of.values()}
    for uuid, pid in _pairs(apps):
        if uuid in index_of and pid.isdecimal():  # else "[N/A]", an error text, a card that is gone
            found[index_of[uuid]].add(int(pid))
    return {index: frozenset(pids) for index, pids in found.items()}


def _pairs(text: str) -> list[tuple[str, str]]:
    rows = [line.split(",") for line in text.splitlines()]
    return [(row[0].strip(), row[1].strip()) for row in rows if len(row) == 2]


def _run(tool: str, *arguments: str) -> str | None:
    """What the tool prints; None when it is not there, fails or hangs."""
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.decode("utf-8", "replace")
