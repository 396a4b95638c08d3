"""Time the machine slept."""

from __future__ import annotations

import time

import pytest

from viiwork.host import clock


@pytest.mark.parametrize(("platform", "slow", "fast"), [
    ("linux", "CLOCK_MONOTONIC", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_UPTIME_RAW", "CLOCK_MONOTONIC"),
])  # fmt: skip
def test_sleep_is_what_one_clock_counts_and_the_other_does_not(monkeypatch, platform, slow, fast):
    ids = {slow: 1, fast: 2}
    for name, number in ids.items():
        monkeypatch.setattr(time, name, number, raising=False)
    monkeypatch.setattr(clock.sys, "platform", platform)
    monkeypatch.setattr(clock.time, "clock_gettime", {1: 50.0, 2: 10_850.0}.__getitem__)
    assert clock.suspended_s() == 10_800.0


def test_a_machine_that_is_awake_does_not_sleep():
    before = clock.suspended_s()
    assert clock.suspended_s() - before < 0.5
