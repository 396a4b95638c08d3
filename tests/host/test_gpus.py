"""Vendor detection against tools that answer, lie, fail and hang."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from viiwork.host import gpus
from viiwork.host.gpus import card_pids, detect_vendor

Tool = Callable[[str, str], None]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a tool with a shell script as its body on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("platform.system", lambda: "Linux")

    def put(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return put


def test_machine_without_tools_has_none(tool: Tool) -> None:
    assert detect_vendor() == "none"


def test_nvidia_is_one_that_lists_a_card(tool: Tool) -> None:
    tool("nvidia-smi", "echo 'GPU 0: NVIDIA GB10 (UUID: GPU-1)'")
    tool("rocm-smi", "echo 3.0")
    assert detect_vendor() == "nvidia"


@pytest.mark.parametrize(
    "body",
    [
        "echo 'No devices were found'; exit 6",
        "echo 'No devices were found'",
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
        "",
        "printf '\\377\\376'",
    ],
)
def test_nvidia_tool_without_a_card_does_not_count(tool: Tool, body: str) -> None:
    tool("nvidia-smi", body)
    assert detect_vendor() == "none"
    tool("rocm-smi", "echo 3.0")
    assert detect_vendor() == "amd"


def test_tool_that_hangs_is_cut_off(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_TOOL_TIMEOUT_S", 0.2)
    tool("nvidia-smi", f"exec {sys.executable} -S -c 'import time; time.sleep(600)'")
    assert detect_vendor() == "none"


def test_apple_silicon_is_found_by_the_platform(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert detect_vendor() == "apple"


def test_vendor_of_the_config_wins(tool: Tool) -> None:
    assert [detect_vendor(wanted) for wanted in ("amd", "apple", "none", "nvidia")] == [
        "amd",
        "apple",
        "none",
        "nvidia",
    ]


def test_processes_are_found_by_card_and_bad_rows_are_left_out(tool: Tool) -> None:
    error = "Unable to determine the device handle for GPU0000:0A:00.0: Unknown Error"
    cards = f"0, GPU-a\\n1, GPU-b\\n{error}\\n[N/A], GPU-c\\n"
    apps = "GPU-a, 10\\nGPU-a, 11\\nGPU-b, [N/A]\\nGPU-z, 12\\n[Insufficient Permissions]\\n"
    tool("nvidia-smi", f"case $1 in *query-gpu*) printf '{cards}';; *) printf '{apps}';; esac")
    assert card_pids("nvidia") == {0: frozenset({10, 11}), 1: frozenset()}


def test_processes_on_cards_are_unknown_when_the_tool_fails_or_there_is_none(tool: Tool) -> None:
    assert card_pids("nvidia") is None and card_pids("amd") is None
    tool("nvidia-smi", "exit 9")
    assert card_pids("nvidia") is None
