"""Links that spoil frames at a rate, receivers killed at any step, and peers that want our memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zstandard

from tests.fakes.kv_relay import outcome, relayed
from viiwork.errors import KvError
from viiwork.kv.extract import open_state
from viiwork.kv.link import Cancel, Link
from viiwork.wire.channel import (
    HEADER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    TAG_BYTES,
    Codec,
    FrameType,
    Header,
    Initiator,
    Opener,
    Sealer,
)
from viiwork.wire.delta import pieces_of
from viiwork.wire.replica import Begin, Have, Mark, pack_message

FRONT = HELLO_BYTES + PROOF_BYTES  # what a sender says before its first frame
MIB = 1 << 20


@pytest.fixture
def save(tmp_path: Path, kit: Any) -> tuple[Path, bytes]:
    data = kit.make_save(3000, n_layer=8, row=256)
    path = tmp_path / "state.bin"
    path.write_bytes(data)
    return path, data


# -- a link that spoils frames ---------------------------------------------------------------------


class Spoiler:
    """Stands between two workers and flips a bit in a share of the sender's frames."""

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.rng = share, random.Random(seed)
        self.frames = self.spoiled = 0

    async def join(self, kit: Any) -> tuple[socket.socket, socket.socket, asyncio.Task[None]]:
        near, near_mid = kit.tcp_pair()
        far_mid, far = kit.tcp_pair()
        return near, far, asyncio.create_task(self._run(near_mid, far_mid))

    async def _run(self, near_mid: socket.socket, far_mid: socket.socket) -> None:
        sender, to_sender = await asyncio.open_connection(sock=near_mid)
        receiver, to_receiver = await asyncio.open_connection(sock=far_mid)

        async def there() -> None:
            for size in (HELLO_BYTES, PROOF_BYTES):
                to_receiver.write(await sender.readexactly(size))
            while True:
                head = await sender.readexactly(HEADER_BYTES)
                body = await sender.readexactly(int.from_bytes(head[44:48], "little") + TAG_BYTES)
                to_receiver.write(self._maybe_spoiled(bytearray(head + body)))
                await to_receiver.drain()

        async def back() -> None:
            while data := await receiver.read(1 << 16):
                to_sender.write(data)
            to_sender.close()

        async def ended(pump: Any) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await pump
            to_receiver.close()

        await asyncio.gather(ended(there()), ended(back()))
        to_sender.close()

    def _maybe_spoiled(self, frame: bytearray) -> bytearray:
        self.frames += 1
        if self.rng.random() < self.share:
            self.spoiled += 1
            # Headers are small: give them their part.
            places = HEADER_BYTES if self.rng.random() < 0.3 else len(frame)
            frame[self.rng.randrange(places)] ^= 1 << self.rng.randrange(8)
        return frame


@pytest.mark.parametrize("encrypt", [False, True])
async def test_a_link_that_spoils_three_frames_in_ten_brings_a_state_over_in_the_end(
    kit: Any, workers: Any, save: Any, tmp_path: Path, encrypt: bool
) -> None:
    path, data = save
    a, b = await workers("a"), await workers("b")
    spoiler = Spoiler(0.3, seed=3)
    failed: set[str] = set()
    for _ in range(300):
        near, far, relay = await spoiler.join(kit)
        job = kit.send_job(path, encrypt=encrypt, silence_s=1.0)
        ends = await outcome(a.send(near, job), b.receive(far, kit.grant_for(data, silence_s=1.0)))
        await relay
        if ends[1] == "done":
            break
        failed.add(ends[1])
    assert ends[1] == "done"
    assert failed <= {"corrupt", "protocol", "bad_offer", "timeout", "link_lost"}
    assert spoiler.spoiled and "corrupt" in failed
    out = tmp_path / "out.bin"
    stats = await b.store_stats()
    assert (stats.replicas, stats.unfinished, stats.incoming) == (1, 0, 0)
    (sent, received), name = await _sent_again(kit, a, b, path, data)
    assert sent.kept == 3000 and received.replica == name
    await b.render(name, kit.target_for(data, n_stream=2), out)
    assert out.read_bytes() == data


async def _sent_again(kit: Any, a: Any, b: Any, path: Path, data: bytes) -> tuple[Any, str]:
    """A later generation of what is held: only its facts travel."""
    near, far = kit.tcp_pair()
    known = (Mark(generation=1, source="a", keep=3000),)
    job = kit.send_job(path, generation=2, known=known)
    ends = await asyncio.gather(a.send(near, job), b.receive(far, kit.grant_for(data)))
    return ends, ends[1].replica


# -- receivers that die ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["hello", "offer", "tokens", "rows", "last rows", "commit"])
async def test_a_receiver_killed_at_any_step_costs_its_replicas_and_nothing_else(
    kit: Any, workers: Any, save: Any, tmp_path: Path, step: str
) -> None:
    path, data = save
    b, lost = await workers("b", on_lost=lambda: None), asyncio.Event()
    size = len(data)
    at = {
        "hello": 0,
        "offer": FRONT,
        "tokens": FRONT + 1500,
        "rows": size // 2,
        "last rows": size - 100_000,
        "commit": size - 36_000 + 1,  # the cells of the file do not travel
    }[step]

    def hook(offset: int, piece: bytearray) -> bytearray:
        if offset + len(piece) > at and not lost.is_set():
            lost.set()
            os.kill(b.pid, signal.SIGKILL)
        return piece

    a = await workers("a")
    near, far, relay = await relayed(kit, hook)
    ends = await outcome(a.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    assert lost.is_set() and ends[1] == "worker_died" and ends[0] in ("link_lost", "done")
    await relay
    async with asyncio.timeout(30):
        await b.wait_up()
    assert list((tmp_path / "store-b").iterdir()) == []
    near, far = kit.tcp_pair()
    sent, received = await asyncio.gather(
        a.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data))
    )
    out = tmp_path / "out.bin"
    await b.render(received.replica, kit.target_for(data, n_stream=2), out)
    assert sent.kept == 0 and out.read_bytes() == data


# -- peers that want memory ------------------------------------------------------------------------


def rss(worker: Any) -> int:
    return int(psutil.Process(worker.pid).memory_info().rss)


async def test_strangers_get_no_memory(kit: Any, workers: Any, save: Any, tmp_path: Path) -> None:
    b = await workers("b")
    grant = kit.grant_for(save[1], silence_s=2.0)

    async def stranger(noise: bytes) -> str:
        mine, far = kit.tcp_pair()
        mine.setblocking(False)
        job = asyncio.create_task(outcome(b.receive(far, grant)))
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(mine, noise)
        (end,) = await job
        mine.close()
        return end

    wrong = Initiator(b"x" * 32, "a", b"1" * 32, encrypt=True).hello()
    for noise in (wrong, os.urandom(HELLO_BYTES)):
        assert await stranger(noise) in ("wrong_key", "protocol")
    before = rss(b)
    noises = [wrong + os.urandom(MIB), os.urandom(MIB), bytes(MIB), b"GET / HTTP/1.1\r\n" * 4096]
    for _ in range(25):
        ends = await asyncio.gather(*(stranger(noise) for noise in noises))
        assert set(ends) <= {"wrong_key", "protocol", "version"}
    assert rss(b) - before < 4 * MIB
    stats = await b.store_stats()
    assert (stats.replica_bytes, stats.incoming, stats.transfers) == (0, 0, 0)


async def test_a_member_that_lies_gets_no_more_memory_than_a_ring(
    kit: Any, workers: Any, save: Any, tmp_path: Path
) -> None:
    path, data = save
    b = await workers("b")
    grant = kit.grant_for(data, silence_s=5.0)

    def lie(mine: socket.socket, which: int) -> None:
        link = Link(mine, kit.send_job(path, silence_s=5.0), Cancel())
        try:
            with contextlib.suppress(KvError), open_state(kit.state_file(path)) as state:
                session = link.initiate(kit.send_job(path))
                sealer, opener = Sealer(session.send, encrypt=False), Opener(session.receive, encrypt=False)
                offer = state.offer()
                if which == 0:  # a frame that is as large as a frame may be, and says it is larger
                    link.send(sealer.seal(FrameType.OFFER, bytes(2 * MIB)))
                    mine.sendall(Header(FrameType.OFFER, 1, (1 << 32) - 1).pack() + bytes(MIB))
                    return
                if which == 1:  # an offer of more than there can be
                    blobs = msgspec.msgpack.encode(
                        [{"kind": "recurrent", "n_tokens": 1, "size": 1 << 62}] * 8
                    )
                    packed = msgspec.msgpack.decode(pack_message(offer))
                    packed.update(n_tokens=1 << 60, blobs=msgspec.msgpack.decode(blobs))
                    link.send(sealer.seal(FrameType.OFFER, msgspec.msgpack.encode(packed)))
                    return
                link.send_message(sealer, FrameType.OFFER, pack_message(offer))
                link.recv_message(opener, FrameType.HAVE)
                link.send_message(sealer, FrameType.BEGIN, pack_message(Begin(keep=0)))
                tokens, rows = list(pieces_of(offer, Have(), 0, offer.needed))[:2]
                payload = bytes(state.read(tokens, memoryview(bytearray(tokens.size))))
                link.send(sealer.seal(FrameType.TOKENS, payload, rows=tokens.rows))
                if which == 2:  # a bomb: says it is one frame's rows, holds a GiB of zeros
                    bomb = zstandard_of_zeros(1 << 30)
                    place = {"rows": rows.rows, "raw_len": rows.size, "codec": Codec.PLANES2_ZSTD}
                    link.send(sealer.seal(FrameType.ROWS, bomb, **place))
                else:  # rows that were never asked for
                    link.send(sealer.seal(FrameType.ROWS, bytes(4 * MIB), rows=1 << 20))
        except OSError:
            pass  # the receiver had enough
        finally:
            link.close()

    async def liar(which: int) -> str:
        mine, far = kit.tcp_pair()
        job = asyncio.create_task(outcome(b.receive(far, grant)))
        await asyncio.to_thread(lie, mine, which)
        return (await job)[0]

    for which in range(4):
        assert await liar(which) in ("bad_offer", "protocol", "corrupt", "link_lost"), which
    before = rss(b)
    for _ in range(8):
        ends = [await liar(which) for which in range(4)]
        assert ends == ["bad_offer", "bad_offer", "corrupt", "protocol"]
    assert rss(b) - before < 16 * MIB
    near, far = kit.tcp_pair()
    ends = await outcome(b.send(near, kit.send_job(path)), b.receive(far, kit.grant_for(data)))
    assert ends == ["done", "done"]


def zstandard_of_zeros(size: int) -> bytes:
    """A frame that states a frame's size where it has to, and unpacks to much more."""
    packer = zstandard.ZstdCompressor(level=3).compressobj()
    block = bytes(MIB)
    return b"".join(packer.compress(block) for _ in range(size // MIB)) + packer.flush()
