"""docs/replication.md is enough to write a receiver from: one that was takes the real sender's states."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from viiwork.wire.replica import Mark

_spec = importlib.util.spec_from_file_location(
    "plain_receiver", Path(__file__).with_name("plain_receiver.py")
)
assert _spec is not None and _spec.loader is not None
plain_receiver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain_receiver)

SHAPE = {"n_layer": 3, "row": 64}


def rows_of(kit: Any, data: bytes) -> dict[int, list[bytes]]:
    info = kit.info_of(data)
    starts = info.caches[0].data
    return {pos: [data[at + 64 * pos : at + 64 * (pos + 1)] for at in starts] for pos in range(info.n_tokens)}


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("compress", ["on", "off"])
async def test_a_receiver_written_from_the_document_takes_states_and_deltas(
    kit: Any, workers: Any, tmp_path: Path, encrypt: bool, compress: str
) -> None:
    worker = await workers("a")
    receiver = plain_receiver.PlainReceiver("a secret", "b")
    path = tmp_path / "state.bin"
    turns = [(300, ((0, 1),), 0), (700, ((0, 1),), 300), (600, ((0, 1), (411, 2)), 411)]
    for generation, (n, branches, keep) in enumerate(turns, start=1):
        data = bytearray(kit.make_turn(n, branches, **SHAPE))
        for offset in kit.info_of(bytes(data)).caches[0].data[:2]:
            data[offset : offset + 64 * n] = bytes(range(64)) * n  # something that can be compressed
        path.write_bytes(data)
        near, far = kit.tcp_pair()
        known = (Mark(generation=generation - 1, source="a", keep=keep),)
        job = kit.send_job(path, generation=generation, known=known, encrypt=encrypt, compress=compress)
        far.settimeout(30)
        with far:
            sent, offer = await asyncio.gather(worker.send(near, job), asyncio.to_thread(receiver.serve, far))
        assert sent.kept == offer["kept"] == keep
        assert receiver.rows == [rows_of(kit, bytes(data))]
