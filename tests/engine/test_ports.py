"""Who listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from viiwork.engine.ports import PortPicker, foreign_listener, tree_rss


@pytest.fixture
def listening() -> Iterator[int]:
    """A port this test process listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def other() -> Iterator[int]:
    """A process that listens on nothing."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


def test_own_listener_is_no_stranger(listening: int) -> None:
    assert foreign_listener(listening, os.getpid()) == ""


def test_child_that_listens_belongs_to_its_parent(listening: int, other: int) -> None:
    assert foreign_listener(listening, os.getppid()) == ""


def test_stranger_is_named(listening: int, other: int) -> None:
    name = psutil.Process().name()
    assert foreign_listener(listening, other) == f"process {os.getpid()} ({name})"


def test_nobody_is_no_stranger(other: int) -> None:
    assert foreign_listener(PortPicker().pick(), other) == ""


def test_engine_that_cannot_be_looked_into_is_not_taken_for_a_stranger(
    listening: int, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: psutil.Process, kind: str) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "net_connections", denied)
    assert foreign_listener(listening, other) == ""


def test_ports_given_out_lately_are_not_given_again() -> None:
    picker = PortPicker()
    ports = [picker.pick() for _ in range(50)]
    assert len(set(ports)) == 50


def test_memory_of_a_process_that_is_gone_is_unknown(other: int) -> None:
    assert (tree_rss(other) or 0) > 1 << 20
    assert tree_rss(2**22 - 1) is None
