"""Two real worker processes and a real TCP socket between them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from viiwork.errors import KvError
from viiwork.wire.savefile import Layout


async def move(kit: Any, a: Any, b: Any, path: Path, data: bytes, *, grant: Any = None, **job: Any) -> Any:
    near, far = kit.tcp_pair()
    return await asyncio.gather(
        a.send(near, kit.send_job(path, **job)),
        b.receive(far, grant or kit.grant_for(data)),
        return_exceptions=True,
    )


@pytest.fixture
def save(tmp_path: Path, kit: Any) -> tuple[Path, bytes]:
    data = kit.make_save(3000, n_layer=8, row=128, n_stream=2, stream=1)
    path = tmp_path / "state.bin"
    path.write_bytes(data)
    return path, data


@pytest.mark.parametrize("encrypt", [False, True])
async def test_a_state_travels_between_workers_and_renders_for_another_slot_count(
    kit: Any, workers: Any, save: Any, tmp_path: Path, encrypt: bool
) -> None:
    path, data = save
    a, b = await workers("a"), await workers("b")
    sent, received = await move(kit, a, b, path, data, encrypt=encrypt)
    assert sent.replica == received.replica
    assert sent.total_bytes == len(data)
    target = Layout(shape=sent.info.shape, n_stream=4, slot=2, max_tokens=4096)
    out = tmp_path / "out.bin"
    done = await b.render(received.replica, target, out)
    assert done.total_bytes == out.stat().st_size
    assert out.read_bytes() == kit.make_save(3000, n_layer=8, row=128, n_stream=4, stream=2)
    assert b.stats().received == 1 and b.stats().receive_mb_per_s is not None


async def test_an_older_generation_is_refused_and_a_newer_one_replaces(
    kit: Any, workers: Any, save: Any
) -> None:
    path, data = save
    a, b = await workers("a"), await workers("b")
    _, first = await move(kit, a, b, path, data, generation=5)
    refused, _ = await move(kit, a, b, path, data, generation=5)
    assert isinstance(refused, KvError) and refused.reason == "have_newer"
    _, second = await move(kit, a, b, path, data, generation=6)
    assert second.dropped == (first.replica,)
    assert (await b.store_stats()).replicas == 1
