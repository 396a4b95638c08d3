"""How long this machine has slept: time that no timer of a process counts."""

from __future__ import annotations

import sys
import time


def suspended_s() -> float:
    """Seconds this machine was suspended since it started; grows by the length of each sleep."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(time.CLOCK_UPTIME_RAW)
    return 0.0
