"""kill -9 of a node leaves no engine and no child of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from viiwork.config.model import ModelSection
from viiwork.engine.leftovers import EngineRegister

from .conftest import gone, is_alive, kill_if_alive, written_pid

NODE = """
import asyncio, sys
from pathlib import Path
import msgspec, uvloop
from viiwork.config.model import HealthSection, ModelSection
from viiwork.engine.supervisor import HostFacts, Supervisor

async def main():
    def tell(view):
        if view.status == "healthy":
            Path(sys.argv[2] + ".part").write_text(str(view.pid))
            Path(sys.argv[2] + ".part").rename(sys.argv[2])
    folder = Path(sys.argv[2]).parent
    supervisor = Supervisor(
        [msgspec.json.decode(sys.argv[1], type=ModelSection)],
        health=HealthSection(), run_dir=folder / "run",
        save_root=folder / "save", hidden_env=frozenset(), in_flight=lambda backend: 0, on_change=tell,
    )
    await supervisor.start(HostFacts())
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text(str(supervisor._guard.pid))
    await asyncio.Event().wait()

uvloop.run(main())
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Start]:
    """Starts stand-in nodes: a process of its own with just a supervisor, on the real event loop."""
    nodes: list[subprocess.Popen[bytes]] = []

    def start(model: ModelSection, *extra: str) -> subprocess.Popen[bytes]:
        entry = {name: getattr(model, name) for name in ("name", "engine", "path", "context", "env")}
        entry["llamacpp"] = {"binary": model.llamacpp.binary}
        command = [sys.executable, "-c", NODE, json.dumps(entry), str(tmp_path / "engine-pid"), *extra]
        nodes.append(subprocess.Popen(command))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()
        node.wait()


async def test_killed_node_leaves_no_engine_and_no_grandchild(
    start_node: Start, fake_model: Callable[..., ModelSection], tmp_path: Path
) -> None:
    node = start_node(fake_model(deaf=True, child=str(tmp_path / "child")))
    engine, child = await written_pid(tmp_path / "engine-pid"), await written_pid(tmp_path / "child")
    node.kill()
    await gone(engine)
    await gone(child)


async def test_killed_node_takes_its_engine_along_even_without_the_guard(
    start_node: Start, fake_model: Callable[..., ModelSection], tmp_path: Path
) -> None:
    node = start_node(fake_model(deaf=True), str(tmp_path / "guard"))
    engine, guard = await written_pid(tmp_path / "engine-pid"), await written_pid(tmp_path / "guard")
    os.kill(guard, signal.SIGKILL)
    node.kill()
    await gone(engine)


async def test_guard_survives_the_signals_that_end_a_service_and_ends_with_the_node(
    start_node: Start, fake_model: Callable[..., ModelSection], tmp_path: Path
) -> None:
    node = start_node(fake_model(), str(tmp_path / "guard"))
    await written_pid(tmp_path / "engine-pid")
    guard = await written_pid(tmp_path / "guard")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guard, number)
    assert is_alive(guard)
    node.kill()
    await gone(guard)


async def test_node_killed_while_its_engine_loads_can_be_started_again_at_once(
    start_node: Start, fake_model: Callable[..., ModelSection], tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    model = fake_model(deaf=True, loading_s=-1, only_first=1, starts=str(starts))
    first = start_node(model)
    loading = await written_pid(starts)
    first.kill()
    start_node(model)
    serving = await written_pid(tmp_path / "engine-pid")
    await gone(loading)
    assert serving != loading and is_alive(serving)


@pytest.mark.engine
async def test_killed_node_leaves_no_real_engine(start_node: Start, smollm2: Path, tmp_path: Path) -> None:
    model = ModelSection(name="smol", engine="llamacpp", path=str(smollm2), context=256)
    node = start_node(model)
    engine = await written_pid(tmp_path / "engine-pid")
    node.kill()
    await gone(engine)


def test_engine_left_by_an_earlier_node_is_killed_and_a_stranger_with_its_pid_is_not(
    tmp_path: Path,
) -> None:
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    left, stranger = (subprocess.Popen(sleeper, start_new_session=True) for _ in range(2))
    try:
        entries = [
            {"group": left.pid, "started_unix_s": psutil.Process(left.pid).create_time()},
            {"group": stranger.pid, "started_unix_s": psutil.Process(stranger.pid).create_time() - 3600},
        ]
        (tmp_path / "engines.json").write_text(json.dumps(entries))
        assert EngineRegister(tmp_path / "engines.json").kill_leftovers() == [left.pid]
        assert left.wait() == -signal.SIGKILL
        assert is_alive(stranger.pid)
    finally:
        for process in (left, stranger):
            kill_if_alive(process.pid)
            process.wait()


@pytest.mark.parametrize("text", ["", "[", "{}", '[{"group": "x"}]', "\x00" * 100])
def test_damaged_list_of_engines_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "engines.json").write_text(text)
    assert EngineRegister(tmp_path / "engines.json").kill_leftovers() == []
