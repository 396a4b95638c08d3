"""A whole node inside of this process, so that its tasks, sockets and counters can be looked at."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, seed, settings

from tests.node.nodes import free_port
from viiwork.api.routes import AnyRoute
from viiwork.config.load import parse_config
from viiwork.node.node import Node

HOST = "127.0.16.1"
PATIENCE_S = 60.0
_T = TypeVar("_T")


def fuzzed(n_examples: int, key: str) -> Callable[[Any], Any]:
    """So many examples, the same ones each time; with `VIIWORK_FUZZ=20` 20 times as many, and new ones."""
    factor = int(os.environ.get("VIIWORK_FUZZ", "0"))

    def decorate(test: Any) -> Any:
        bounded = settings(
            max_examples=n_examples * max(factor, 1),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(test)
        return bounded if factor else seed(zlib.crc32(key.encode()))(bounded)

    return decorate


class _Faults(logging.Handler):
    """Every record that tells of a fault of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.seen.append(f"{record.name}: {record.getMessage()} {record.exc_info or ''}")


class Running:
    """The node on a loop of its own."""

    def __init__(self, config: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.node = Node(parse_config(config.encode(), "fuzz.yaml", {}))
        self.node._catch_signals = lambda: None  # type: ignore[method-assign]  # they belong to the main thread
        self.faults = _Faults()
        self.address = (HOST, self.node._config.api.port)
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, name="node")

    def start(self) -> None:
        logging.getLogger().addHandler(self.faults)
        self._thread.start()
        self.until("healthy", lambda: self.inside(lambda: self.node._facts.health()[0]) == 200)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.node._stopping.set)
        self._thread.join(PATIENCE_S)
        logging.getLogger().removeHandler(self.faults)

    def _run(self) -> None:
        try:
            self.exit_code = self.loop.run_until_complete(self.node.run())
        finally:
            self.loop.close()

    def inside(self, ask: Callable[[], _T]) -> _T | None:
        """What `ask` says on the node's loop, None while the node is not built."""

        async def asked() -> _T | None:
            return ask() if hasattr(self.node, "_api") else None

        return asyncio.run_coroutine_threadsafe(asked(), self.loop).result(PATIENCE_S)

    def until(self, what: str, true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert self._thread.is_alive(), f"the node ended: {self.faults.seen}"
            assert time.monotonic() < deadline, f"not {what}: {self.held()} {self.faults.seen}"
            time.sleep(0.05)

    @property
    def routes(self) -> list[AnyRoute]:
        """Every route of the node, each once."""
        table = self.node._api._routes
        found = [
            r for by_method in (*table._exact.values(), *table._below.values()) for r in by_method.values()
        ]
        return list(dict.fromkeys(found))

    def held(self) -> dict[str, int]:
        """What requests hold while they run, and must have given back."""

        def count() -> dict[str, int]:
            api, dispatcher = self.node._api, self.node._dispatcher
            return {
                "running": api._n_running,
                "bodies": api.inference._bodies._n_bytes,
                "inferences": len(api.inference._running),
                "controls": api._controls._n_reading,
                "connections": len(api._server.connections) if api._server is not None else 0,
                "leases": dispatcher.slots.open_leases,
                "forwards": dispatcher.peers.open_forwards,
                "queued": sum(m.queued for m in self.node._facts.report().models),
                "busy": sum(m.busy for m in self.node._facts.report().models),
            }

        return self.inside(count) or {}

    def size(self) -> tuple[int, int]:
        """Open descriptors and tasks."""
        return psutil.Process().num_fds(), self.inside(lambda: len(asyncio.all_tasks())) or 0

    def assert_clean(self, before: tuple[int, int]) -> None:
        """Nothing is held, nothing leaked (a leak would count hundreds), and nothing of ours went wrong."""
        self.until("idle", lambda: not any(self.held().values()))
        fds, tasks = before
        self.until("as small as before", lambda: (s := self.size())[0] <= fds + 5 and s[1] <= tasks + 5)
        assert self.faults.seen == []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    binary = folder / "llama-server"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "engine.py"} "$@"\n')
    binary.chmod(0o755)
    (folder / "m.gguf").write_bytes(b"GGUF")
    node = Running(
        f"node: {{name: fuzzed, state_dir: {folder / 'state'}}}\n"
        f"api: {{host: {HOST}, port: {free_port(HOST)}}}\n"
        f"mesh: {{network: lan, advertise: {HOST}, bind_port: {free_port(HOST)}, open: true}}\n"
        "routing: {queue_max: 4, queue_timeout: 200ms}\n"
        "models:\n"
        f"  - {{name: m, engine: llamacpp, path: {folder / 'm.gguf'}, context: 1024, parallel: 2,\n"
        f"     llamacpp: {{binary: {binary}, threads: 1}}}}\n"
    )
    node.start()
    try:
        yield node
    finally:
        node.stop()
    assert node.exit_code == 0 and node.faults.seen == []
