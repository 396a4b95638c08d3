"""Two real worker processes and a real TCP socket between them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from viiwork.errors import KvError
from viiwork.kv.client import KvWorker
from viiwork.kv.extract import facts_of
from viiwork.kv.render import PARALLEL_FROM_GROUPS
from viiwork.limits import KV_GROUP_BYTES, KV_JOBS_MAX


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
    target = kit.target_for(data, n_stream=4, slot=2, max_tokens=4096)
    out = tmp_path / "out.bin"
    done = await b.render(received.replica, target, out)
    assert done.total_bytes == out.stat().st_size
    assert out.read_bytes() == kit.make_save(3000, n_layer=8, row=128, n_stream=4, stream=2)
    assert b.stats().received == 1 and b.stats().receive_mb_per_s is not None


async def test_an_older_generation_is_refused_and_a_newer_one_replaces(
    kit: Any, workers: Any, save: Any
) -> None:
    path, data = save
    a = b = await workers("b")
    _, first = await move(kit, a, b, path, data, generation=5)
    refused, _ = await move(kit, a, b, path, data, generation=5)
    assert isinstance(refused, KvError) and refused.reason == "have_newer"
    _, second = await move(kit, a, b, path, data, generation=6)
    assert second.dropped == (first.replica,)
    assert (await b.store_stats()).replicas == 1


async def test_many_transfers_run_side_by_side_and_beyond_the_bound_are_refused(
    kit: Any, workers: Any, save: Any
) -> None:
    path, data = save
    a = b = await workers("b")
    moves = [move(kit, a, b, path, data, session=bytes([n]) * 32) for n in range(8)]
    for sent, received in await asyncio.gather(*moves):
        assert sent.replica == received.replica
    assert (await b.store_stats()).replicas == 8
    pairs = [kit.tcp_pair() for _ in range(KV_JOBS_MAX + 1)]
    grant = kit.grant_for(data, silence_s=1.0)
    results = await asyncio.gather(*(b.receive(far, grant) for _, far in pairs), return_exceptions=True)
    for near, _ in pairs:
        near.close()
    assert sorted(error.reason for error in results) == ["busy"] + ["timeout"] * KV_JOBS_MAX


async def test_a_second_worker_on_the_same_folder_does_not_start(workers: Any) -> None:
    await workers("a")
    with pytest.raises(KvError, match="in use"):
        await workers("a")


async def test_a_worker_that_cannot_start_says_so(workers: Any, tmp_path: Path) -> None:
    (tmp_path / "store-a").write_text("a file is in the way")
    with pytest.raises(KvError):
        await workers("a")


async def test_secrets_of_the_environment_do_not_reach_the_worker(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIIWORK_MESH_SECRET", "hush")
    worker = await workers("a", hidden_env=frozenset({"VIIWORK_MESH_SECRET"}))
    environment = psutil.Process(worker.pid).environ()
    assert "VIIWORK_MESH_SECRET" not in environment and "PATH" in environment
    assert "hush" not in str(environment)


async def test_inspecting_tells_the_layout_and_dropping_forgets(kit: Any, workers: Any, save: Any) -> None:
    path, data = save
    a = await workers("a")
    assert await a.inspect(path) == facts_of(kit.info_of(data))
    path.write_bytes(data[:-1])
    with pytest.raises(KvError) as caught:
        await a.inspect(path)
    assert caught.value.reason == "bad_file"
    path.write_bytes(data)
    _, received = await move(kit, a, a, path, data, grant=kit.grant_for(data))
    assert await a.drop(received.replica)
    assert not await a.drop(received.replica)


async def test_a_large_state_is_rendered_by_several_threads_and_is_the_same(
    kit: Any, workers: Any, tmp_path: Path
) -> None:
    data = kit.make_save(2000, n_layer=20, row=1024)
    path, out = tmp_path / "state.bin", tmp_path / "out.bin"
    path.write_bytes(data)
    a = await workers("a")
    _, received = await move(kit, a, a, path, data)
    target = kit.target_for(data, max_tokens=2000)
    await a.render(received.replica, target, out)
    assert len(data) > PARALLEL_FROM_GROUPS * KV_GROUP_BYTES
    assert out.read_bytes() == kit.make_save(2000, n_layer=20, row=1024, n_stream=1)


async def test_stopping_removes_every_replica(kit: Any, workers: Any, save: Any, tmp_path: Path) -> None:
    path, data = save
    a = await workers("a")
    await move(kit, a, a, path, data)
    assert list((tmp_path / "store-a").iterdir())
    await a.stop()
    assert list((tmp_path / "store-a").iterdir()) == []
    assert a.pid is None


def test_a_worker_serves_a_node_that_runs_on_uvloop(kit: Any, save: Any, tmp_path: Path) -> None:
    path, data = save

    async def node() -> None:
        worker = KvWorker(tmp_path / "store", 1 << 30)
        await worker.start()
        try:
            sent, received = await move(kit, worker, worker, path, data)
            assert sent.replica == received.replica
        finally:
            await worker.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(node())


async def test_a_prompt_shares_tokens_with_a_replica_up_to_the_first_that_differs(
    kit: Any, workers: Any, save: Any, tmp_path: Path
) -> None:
    path, data = save
    worker = await workers("a")
    name = (await worker.keep(kit.state_file(path))).replica
    info = kit.info_of(data)
    tokens = data[info.tokens_offset :][: 4 * info.n_tokens]
    other = (12345).to_bytes(4, "little")
    assert other * 2 not in tokens
    assert await worker.common_tokens(name, tokens) == 3000
    assert await worker.common_tokens(name, tokens + other * 600) == 3000
    for n in (0, 1, 255, 256, 257, 512, 2815, 2816, 2999):
        assert await worker.common_tokens(name, tokens[: 4 * n]) == n
        differing = tokens[: 4 * n] + bytes(byte ^ 1 for byte in tokens[4 * n : 4 * n + 4])
        assert await worker.common_tokens(name, differing + tokens[4 * n + 4 :]) == n
        assert await worker.common_tokens(name, differing) == n
    with pytest.raises(KvError) as caught:
        await worker.common_tokens("nobody's", tokens)
    assert caught.value.reason == "no_replica"
