"""Which kind of GPU this machine has. Blocks; a tool that hangs is cut off."""

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
