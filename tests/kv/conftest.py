"""A worker, pairs of them joined by a real socket, and save-files to move."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import ModelTerms, ReceiveGrant, SendJob
from viiwork.wire.channel import mesh_key
from viiwork.wire.whole_file import SaveInfo, parse

KEY = mesh_key("a secret")
MODEL = b"m" * 32


def _load_saves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("viiwork_test_saves", Path(__file__).with_name("saves.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_save = _load_saves().make_save


@pytest.fixture(name="make_save")
def make_save_fixture() -> Callable[..., bytes]:
    return make_save


def info_of(data: bytes) -> SaveInfo:
    return parse(lambda off, n: data[off : off + n], len(data))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def send_job(path: Path, **changes: Any) -> SendJob:
    values: dict[str, Any] = {
        "path": str(path),
        "session": b"s" * 32,
        "model_fp": MODEL,
        "generation": 1,
        "created_unix_s": 1.0,
        "key": KEY,
        "local_name": "a",
        "peer_name": "b",
        "encrypt": False,
    }
    return SendJob(**{**values, **changes})


def grant_for(data: bytes, **changes: Any) -> ReceiveGrant:
    terms = ModelTerms(model_fp=MODEL, shape=info_of(data).shape, max_tokens=1 << 20)
    values: dict[str, Any] = {"keys": (KEY,), "local_name": "b", "peer_name": "a", "models": (terms,)}
    return ReceiveGrant(**{**values, **changes})


@pytest.fixture
def kit() -> Any:
    """The helpers above, for tests that cannot import this file."""

    class Kit:
        pass

    kit = Kit()
    for helper in (make_save, info_of, tcp_pair, send_job, grant_for):
        setattr(kit, helper.__name__, helper)
    kit.KEY, kit.MODEL = KEY, MODEL  # type: ignore[attr-defined]
    return kit


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts workers with folders of their own; all are stopped at the end."""
    started: list[KvWorker] = []

    async def start(name: str, budget: int = 1 << 30, **options: Any) -> KvWorker:
        worker = KvWorker(tmp_path / f"store-{name}", budget, **options)
        await worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.stop()
