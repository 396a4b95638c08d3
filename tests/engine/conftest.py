"""A supervisor over fake or real engines, and a way to wait for what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from viiwork.config.model import HealthSection, LlamacppSection, ModelSection
from viiwork.engine.backend import Pace
from viiwork.engine.ladder import Rules
from viiwork.engine.supervisor import BackendView, HostFacts, Supervisor

FAKE = Path(__file__).parent.parent / "fakes" / "llama_server.py"
PATIENCE_S = 40.0  # nothing waits so long unless it is broken


@pytest.fixture
def fake_binary(tmp_path: Path) -> Path:
    """The fake as an executable on its own, started without site packages."""
    script = tmp_path / "llama-server"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def fake_model(tmp_path: Path, fake_binary: Path) -> Callable[..., ModelSection]:
    """Builds a model entry served by the fake; keyword arguments are its faults."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")

    def build(
        name: str = "fake", *, parallel: int = 1, env: dict[str, str] | None = None, **faults: Any
    ) -> ModelSection:
        return ModelSection(
            name=name,
            engine="llamacpp",
            path=str(path),
            context=256,
            parallel=parallel,
            env={"FAKE": json.dumps(faults)} | (env or {}),
            llamacpp=LlamacppSection(binary=str(fake_binary)),
        )

    return build


class Watched:
    """A supervisor together with everything it said."""

    def __init__(self, models: list[ModelSection], tmp_path: Path, rules: Rules, pace: Pace) -> None:
        self.seen: list[BackendView] = []
        self.in_flight: dict[str, int] = {}
        self.occupied: set[str] = set()  # by a save or restore of kv_share
        self.gone: list[tuple[str, str]] = []
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(
            models,
            health=HealthSection(),
            run_dir=tmp_path / "run",
            save_root=tmp_path / "save",
            hidden_env=frozenset({"SECRET_OF_THE_MESH"}),
            in_flight=lambda backend: self.in_flight.get(backend, 0),
            on_change=self._hear,
            occupied=self.occupied.__contains__,
            on_gone=self._hear_gone,
            api_keys={"A_KEY": "k3y"},
            rules=rules,
            pace=pace,
        )

    def _hear(self, view: BackendView) -> None:
        self.seen.append(view)
        self._changed.set()

    def _hear_gone(self, backend: str, model: str) -> None:
        self.gone.append((backend, model))
        self._changed.set()

    def apply(self, *models: ModelSection) -> None:
        self.supervisor.apply(models, facts=HostFacts(), hidden_env=frozenset(), api_keys={"A_KEY": "k3y"})

    async def until_gone(self, *backends: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while {backend for backend, _ in self.gone} < set(backends):
                self._changed.clear()
                await self._changed.wait()

    async def until(self, what: Callable[[BackendView], bool], after: int = 0) -> BackendView:
        """The first view from number `after` on for which `what` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._changed.clear()
                for view in self.seen[after:]:
                    if what(view):
                        return view
                await self._changed.wait()

    async def until_healthy(self, epoch: int = 1) -> BackendView:
        return await self.until(lambda view: view.status == "healthy" and view.epoch >= epoch)


Watch = Callable[..., Any]


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Watch]:
    """Starts supervisors; ends them and proves that nothing of them is left."""
    running: list[Watched] = []

    async def start(
        *models: ModelSection, rules: Rules | None = None, pace: Pace | None = None, card_pids: Any = None
    ) -> Watched:
        watched = Watched(
            list(models),
            tmp_path,
            rules or Rules(backoff_first_s=0.05, dead_retry_first_s=600.0, stop_grace_s=0.5),
            pace or Pace(starting_probe_s=0.05, probe_s=0.1, probe_timeout_s=1.0, load_poll_s=0.1),
        )
        running.append(watched)
        await watched.supervisor.start(HostFacts(), card_pids)
        return watched

    yield start
    for watched in running:
        await watched.supervisor.stop(timeout_s=0.5)
        pids = {view.pid for view in watched.seen if view.pid is not None}
        assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    await asyncio.to_thread(_poll, lambda: not is_alive(pid))


async def written_pid(path: Path) -> int:
    """The process id a helper program writes to `path`, as soon as it has."""
    await asyncio.to_thread(_poll, lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def _poll(condition: Callable[[], bool]) -> None:
    """Other processes' ends and files have no event to wait for."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


def kill_if_alive(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
