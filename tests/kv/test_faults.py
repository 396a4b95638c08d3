"""Links that break, peers that lie or stall, workers that die: an error with a reason, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.kv_relay import outcome, relayed
from viiwork.errors import KvError
from viiwork.wire.channel import Initiator, mesh_key


@pytest.fixture
def save(tmp_path: Path, kit: Any) -> tuple[Path, bytes]:
    data = kit.make_save(3000, n_layer=8, row=256)
    path = tmp_path / "state.bin"
    path.write_bytes(data)
    return path, data


async def assert_empty(worker: Any, tmp_path: Path, name: str) -> None:
    stats = await worker.store_stats()
    assert (stats.replicas, stats.unfinished, stats.incoming, stats.transfers) == (0, 0, 0, 0)
    assert list((tmp_path / f"store-{name}").iterdir()) == []


async def assert_only_verified_rows(worker: Any, kit: Any, path: Path, data: bytes, tmp_path: Path) -> Any:
    """What broke left no replica and no piece; the same state sent again is whole and right."""
    while (stats := await worker.store_stats()).incoming:
        await asyncio.sleep(0.01)
    assert stats.replicas == 0 and stats.unfinished <= 1
    left = {file.name.partition(".")[2] for file in (tmp_path / "store-b").iterdir()}
    assert left <= ({"rows-0", "journal"} if stats.unfinished else set())
    near, far = kit.tcp_pair()
    sent, received = await asyncio.gather(
        worker.send(near, kit.send_job(path)), worker.receive(far, kit.grant_for(data))
    )
    assert (sent.kept > 0) == bool(stats.unfinished)
    out = tmp_path / "again.bin"
    await worker.render(received.replica, kit.target_for(data, n_stream=2), out)
    assert out.read_bytes() == data
    out.unlink()
    await worker.drop(received.replica)
    assert list((tmp_path / "store-b").iterdir()) == []
    return sent


async def test_a_link_cut_at_any_byte_leaves_only_verified_rows_which_are_not_sent_again(
    kit: Any, workers: Any, save: Any, tmp_path: Path
) -> None:
    path, data = save
    a = b = await workers("b")
    rng = random.Random(11)
    resumed = 0
    # The handshake is the first 360 bytes, the offer the next few hundred, the commit the last hundreds.
    cuts = [0, 100, 340, 400, *(rng.randrange(700, len(data) - 80_000) for _ in range(9))]
    for cut in cuts:

        def hook(offset: int, piece: bytearray, cut: int = cut) -> bytearray | None:
            return piece if offset + len(piece) <= cut else None

        near, far, relay = await relayed(kit, hook)
        reasons = await outcome(a.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
        assert set(reasons) == {"link_lost"}, cut
        await relay
        resumed += (await assert_only_verified_rows(b, kit, path, data, tmp_path)).kept > 0
    assert resumed >= 5


@pytest.mark.parametrize("encrypt", [False, True])
async def test_a_flipped_bit_anywhere_is_noticed(
    kit: Any, workers: Any, save: Any, tmp_path: Path, encrypt: bool
) -> None:
    path, data = save
    a = b = await workers("b")
    rng = random.Random(12)
    for at in (50, 350, 420, *(rng.randrange(700, len(data) - 80_000) for _ in range(6))):

        def hook(offset: int, piece: bytearray, at: int = at) -> bytearray:
            if offset <= at < offset + len(piece):
                piece[at - offset] ^= 0x10
            return piece

        near, far, relay = await relayed(kit, hook)
        job = kit.send_job(path, encrypt=encrypt)
        sent, received = await outcome(a.send(near, job), b.receive(far, kit.grant_for(data)))
        assert received in ("corrupt", "wrong_key", "protocol", "version", "wrong_peer"), at
        assert sent in ("corrupt", "protocol", "link_lost"), at
        await relay
        await assert_only_verified_rows(b, kit, path, data, tmp_path)


MISFITS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"key": mesh_key("other")}, {}, ["link_lost", "wrong_key"]),
    ({"local_name": "mallory"}, {}, ["link_lost", "wrong_peer"]),
    ({"peer_name": "c"}, {}, ["wrong_peer", "link_lost"]),
    ({}, {"require_encrypt": True}, ["link_lost", "plaintext"]),
    ({"model_fp": b"x" * 32}, {}, ["wrong_model", "wrong_model"]),
    ({}, {"models": ()}, ["wrong_model", "wrong_model"]),
    ({"n_written": 5}, {}, ["bad_file", "link_lost"]),
    ({"n_saved": 5}, {}, ["bad_file", "link_lost"]),
    ({"n_vocab": 10}, {}, ["bad_file", "link_lost"]),
    ({"path": "/nowhere/at/all"}, {}, ["io_error", "link_lost"]),
    ({"path": "/dev/null"}, {}, ["bad_file", "link_lost"]),
]


async def test_what_does_not_fit_is_refused_with_its_reason(
    kit: Any, workers: Any, save: Any, tmp_path: Path
) -> None:
    path, data = save
    b = await workers("b")
    for job, grant, reasons in MISFITS:
        near, far = kit.tcp_pair()
        sending = b.send(near, kit.send_job(**{"path": path, **job}))
        receiving = b.receive(far, kit.grant_for(data, **grant))
        assert await outcome(sending, receiving) == reasons, job or grant
    await assert_empty(b, tmp_path, "b")
    assert sum(b.stats().failures.values()) == 2 * len(MISFITS)


async def test_a_session_longer_than_the_slot_is_refused(kit: Any, workers: Any, save: Any) -> None:
    path, data = save
    b = await workers("b")
    full = kit.grant_for(data)
    terms = type(full.models[0])(model_fp=kit.MODEL, shape=full.models[0].shape, max_tokens=2999)
    near, far = kit.tcp_pair()
    grant = kit.grant_for(data, models=(terms,))
    assert await outcome(b.send(near, kit.send_job(path)), b.receive(far, grant)) == ["too_long", "too_long"]


async def test_an_engine_with_another_cache_type_is_sent_nothing(
    kit: Any, workers: Any, save: Any, tmp_path: Path
) -> None:
    path, data = save
    b = await workers("b")
    quantised = kit.make_save(40, n_layer=8, type_=8, row=272)
    grant = kit.grant_for(data, models=kit.grant_for(quantised).models)
    near, far = kit.tcp_pair()
    assert await outcome(b.send(near, kit.send_job(path)), b.receive(far, grant)) == ["layout", "layout"]
    await assert_empty(b, tmp_path, "b")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
async def test_a_full_store_refuses_and_takes_the_next_that_fits(
    kit: Any, workers: Any, save: Any, tmp_path: Path, share: float
) -> None:
    path, data = save
    b = await workers("b", budget=int(len(data) * share))
    near, far = kit.tcp_pair()
    reasons = await outcome(b.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    assert reasons == ["no_space", "no_space"]
    small = kit.make_save(100, n_layer=8, row=256)
    path.write_bytes(small)
    near, far = kit.tcp_pair()
    reasons = await outcome(b.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(small)))
    assert reasons == ["done", "done"]


async def test_a_peer_that_never_speaks_frees_everything(
    kit: Any, workers: Any, save: Any, tmp_path: Path
) -> None:
    path, data = save
    b = await workers("b")
    silent, far = kit.tcp_pair()
    with silent:
        assert await outcome(b.receive(far, kit.grant_for(data, silence_s=0.2))) == ["timeout"]
    near, silent = kit.tcp_pair()
    with silent:
        assert await outcome(b.send(near, kit.send_job(path, silence_s=0.2))) == ["timeout"]
    await assert_empty(b, tmp_path, "b")


async def test_a_peer_that_stops_reading_frees_everything(kit: Any, workers: Any, save: Any) -> None:
    path, data = save
    path.write_bytes(data := kit.make_save(3000, n_layer=40, row=256))
    a, b = await workers("a"), await workers("b")
    stop = asyncio.Event()

    def hook(offset: int, piece: bytearray) -> bytearray:
        if offset > 100_000:
            stop.set()
        return piece

    near, far, relay = await relayed(kit, hook)
    receiving = asyncio.create_task(outcome(b.receive(far, kit.grant_for(data))))
    sending = asyncio.create_task(outcome(a.send(near, kit.send_job(path, silence_s=0.3))))
    await stop.wait()
    os.kill(b.pid, signal.SIGSTOP)
    try:
        assert await sending == ["timeout"]
    finally:
        os.kill(b.pid, signal.SIGCONT)
    assert await receiving == ["link_lost"]
    await relay


async def test_a_trickle_ends_at_the_deadline(kit: Any, workers: Any, save: Any, tmp_path: Path) -> None:
    b = await workers("b")
    trickler, far = kit.tcp_pair()
    trickler.setblocking(False)
    hello = Initiator(kit.KEY, "a", b"1" * 32, encrypt=False).hello()

    async def trickle() -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            for at in range(len(hello)):
                await loop.sock_sendall(trickler, hello[at : at + 1])
                await asyncio.sleep(0.01)

    task = asyncio.create_task(trickle())
    grant = kit.grant_for(save[1], silence_s=5.0, deadline_s=0.5)
    with trickler:
        assert await outcome(b.receive(far, grant)) == ["timeout"]
        await task
    await assert_empty(b, tmp_path, "b")


async def test_a_slow_receiver_slows_the_sender_and_nothing_else(kit: Any, workers: Any, save: Any) -> None:
    path, data = save
    a = b = await workers("b")

    class Slow:
        def __call__(self, offset: int, piece: bytearray) -> bytearray:
            time.sleep(0.001)
            return piece

    near, far, relay = await relayed(kit, Slow())
    reasons = await outcome(a.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    assert reasons == ["done", "done"]
    await relay


async def test_an_answer_is_waited_for_while_the_rest_still_leaves_this_machine(
    kit: Any, workers: Any, tmp_path: Path
) -> None:
    """The sender's kernel takes all at once, and needs longer than the silence allowed to get rid of it."""
    path, data = tmp_path / "state.bin", kit.make_save(48, n_layer=8, row=256)
    path.write_bytes(data)
    a, b = await workers("a"), await workers("b")
    near, near_mid = kit.tcp_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * len(data))
    near_mid.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    far_mid, far = kit.tcp_pair()
    for sock in (near_mid, far_mid):
        sock.setblocking(False)
    loop = asyncio.get_running_loop()

    async def slowly() -> None:
        while piece := await loop.sock_recv(near_mid, len(data) // 60):
            await loop.sock_sendall(far_mid, piece)
            await asyncio.sleep(0.1)

    async def back() -> None:
        while piece := await loop.sock_recv(far_mid, 1 << 16):
            await loop.sock_sendall(near_mid, piece)

    pumps = [asyncio.create_task(slowly()), asyncio.create_task(back())]
    try:
        done = await asyncio.gather(
            a.send(near, kit.send_job(path, silence_s=4.0)), b.receive(far, kit.grant_for(data))
        )
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        near_mid.close()
        far_mid.close()
    assert done[0].stages.wait_s > 4.0


@pytest.mark.parametrize("victim", ["sender", "receiver"])
async def test_a_killed_worker_fails_its_jobs_and_another_one_takes_over(
    kit: Any, workers: Any, save: Any, tmp_path: Path, victim: str
) -> None:
    path, data = save
    lost: list[bool] = []
    a = await workers("a", on_lost=lambda: lost.append(True))
    b = await workers("b", on_lost=lambda: lost.append(True))
    dying = a if victim == "sender" else b
    started = asyncio.Event()

    def hook(offset: int, piece: bytearray) -> bytearray:
        if offset > 3_000_000 and not started.is_set():
            started.set()
            os.kill(dying.pid, signal.SIGKILL)
        return piece

    near, far, relay = await relayed(kit, hook)
    reasons = await outcome(a.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    assert reasons == (["worker_died", "link_lost"] if dying is a else ["link_lost", "worker_died"])
    await relay
    async with asyncio.timeout(20):
        await dying.wait_up()
    assert lost == [True] and dying.stats().restarts == 1
    near, far = kit.tcp_pair()
    sent, _ = await asyncio.gather(a.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    assert (sent.kept > 0) == (dying is a)  # a worker that died holds nothing


async def test_stopping_a_stuck_worker_kills_it_and_removes_its_files(
    kit: Any, workers: Any, save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = save
    b = await workers("b")
    near, far = kit.tcp_pair()
    assert (
        await outcome(b.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data))) == ["done"] * 2
    )
    monkeypatch.setattr("viiwork.kv.client.STOP_WITHIN_S", 0.1)
    os.kill(b.pid, signal.SIGSTOP)
    await b.stop()
    assert list((tmp_path / "store-b").iterdir()) == []


async def test_a_worker_that_does_not_answer_is_killed_and_replaced(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = asyncio.Event()
    b = await workers("b", on_lost=lost.set)
    monkeypatch.setattr("viiwork.kv.client.LOCAL_JOB_S", 0.1)
    os.kill(b.pid, signal.SIGSTOP)
    assert await outcome(b.store_stats()) == ["worker_stuck"]
    monkeypatch.undo()
    await lost.wait()
    await b.wait_up()
    assert (await b.store_stats()).replicas == 0


async def test_a_job_without_a_worker_fails_at_once(kit: Any, workers: Any, tmp_path: Path) -> None:
    b = await workers("b")
    await b.stop()
    near, far = kit.tcp_pair()
    with far, pytest.raises(KvError) as caught:
        await b.send(near, kit.send_job(tmp_path / "none"))
    assert caught.value.reason == "worker_down"
    assert near.fileno() == -1


async def test_a_cancelled_job_closes_its_connection(kit: Any, workers: Any, save: Any) -> None:
    b = await workers("b")
    near, far = kit.tcp_pair()
    near.setblocking(False)
    task = asyncio.create_task(b.receive(far, kit.grant_for(save[1])))
    hello = Initiator(kit.KEY, "a", b"1" * 32, encrypt=False).hello()
    loop = asyncio.get_running_loop()
    with near:
        await loop.sock_sendall(near, hello)
        await loop.sock_recv(near, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while await loop.sock_recv(near, 4096):
            pass
    assert (await b.store_stats()).incoming == 0


async def test_a_changed_replica_is_not_rendered(kit: Any, workers: Any, save: Any, tmp_path: Path) -> None:
    path, data = save
    b = await workers("b")
    near, far = kit.tcp_pair()
    _, received = await asyncio.gather(b.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    (state,) = (tmp_path / "store-b").glob("*.rows-0")
    with state.open("r+b") as file:
        file.seek(len(data) - 1000)
        file.write(b"\0" * 8)
    out = tmp_path / "out.bin"
    target = kit.target_for(data, n_stream=2, max_tokens=5000)
    assert await outcome(b.render(received.replica, target, out)) == ["corrupt"]
    assert not out.exists()
    assert await outcome(b.render(received.replica, target, out)) == ["no_replica"]
    await assert_empty(b, tmp_path, "b")


async def test_a_rendered_file_never_replaces_another(
    kit: Any, workers: Any, save: Any, tmp_path: Path
) -> None:
    path, data = save
    b = await workers("b")
    near, far = kit.tcp_pair()
    _, received = await asyncio.gather(b.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    target = kit.target_for(data, n_stream=2, max_tokens=5000)
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("keep")
    link.symlink_to(victim)
    for out in (victim, link):
        with pytest.raises(KvError):
            await b.render(received.replica, target, out)
    assert victim.read_text() == "keep"


NODE = """
import asyncio, sys
from pathlib import Path
from viiwork.kv.client import KvWorker

async def main():
    worker = KvWorker(Path(sys.argv[1]), 1 << 20)
    await worker.start()
    print(worker.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_worker_ends_with_its_node_and_takes_its_files_along(tmp_path: Path) -> None:
    store = tmp_path / "store"
    node = subprocess.Popen([sys.executable, "-c", NODE, str(store)], stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None
        worker = psutil.Process(int(node.stdout.readline()))
        (store / f"{'0' * 32}.rows-0").write_bytes(b"a replica")
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
        node.kill()
        psutil.wait_procs([worker], timeout=5)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        assert list(store.iterdir()) == []
    finally:
        node.kill()
        node.wait()
        assert node.stdout is not None
        node.stdout.close()
