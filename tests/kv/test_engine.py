"""A real engine's state, moved by real workers, restored into another engine with other slots."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from viiwork.errors import KvError
from viiwork.wire.whole_file import Layout

pytestmark = pytest.mark.engine

PROMPT = "The river town kept a ledger of every flood. " * 15
HOST = Path(__file__).with_name("engine_host.py")
CTX = 1024


@dataclass
class Engine:
    url: str
    folder: Path
    http: aiohttp.ClientSession

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def turn(self, prompt: str, slot: int, n_predict: int = 8) -> dict[str, Any]:
        body = {"prompt": prompt, "id_slot": slot, "n_predict": n_predict, "temperature": 0, "seed": 1}
        return await self.post("/completion", {**body, "return_tokens": True})

    async def save(self, slot: int, name: str) -> tuple[Path, dict[str, Any]]:
        done = await self.post(f"/slots/{slot}?action=save", {"filename": name})
        return self.folder / name, done


@contextlib.asynccontextmanager
async def engine(model: Path, folder: Path, slots: int, cache: str = "f16") -> AsyncIterator[Engine]:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(HOST), str(model), str(slots), str(CTX), str(folder), str(port), cache]
    with (folder / "log").open("wb") as log:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(f"http://127.0.0.1:{port}/health") as answer:
                            if answer.status == 200:
                                break
                    assert process.returncode is None, (folder / "log").read_text()[-2000:]
                    await asyncio.sleep(0.05)
            yield Engine(f"http://127.0.0.1:{port}", folder, http)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def layout_of(target: Engine, worker: Any, slot: int) -> Layout:
    """What a node learns from one probe save."""
    await target.turn("probe", 0, 1)
    path, _ = await target.save(0, "probe.bin")
    info = await worker.inspect(path)
    return Layout(shape=info.shape, n_stream=info.n_stream, slot=slot, max_tokens=CTX)


async def test_a_session_moved_to_an_engine_with_other_slots_goes_on_with_the_same_tokens(
    smollm2: Path, tmp_path: Path, workers: Any, kit: Any
) -> None:
    a, b = await workers("a"), await workers("b")
    async with (
        engine(smollm2, tmp_path / "ea", slots=2) as source,
        engine(smollm2, tmp_path / "eb", slots=4) as target,
    ):
        first = await source.turn(PROMPT, 1)
        path, saved = await source.save(1, "turn1.bin")
        layout = await layout_of(target, b, slot=3)
        near, far = kit.tcp_pair()
        sent, received = await asyncio.gather(
            a.send(near, kit.send_job(path, n_written=saved["n_written"], n_saved=saved["n_saved"])),
            b.receive(far, kit.grant_for(path.read_bytes())),
        )
        out = target.folder / "import.bin"
        rendered = await b.render(received.replica, layout, out)
        restored = await target.post("/slots/3?action=restore", {"filename": out.name})
        assert restored["n_restored"] == sent.info.n_tokens == saved["n_saved"]
        assert restored["n_read"] == rendered.total_bytes
        second = PROMPT + first["content"] + " And then the mayor said:"
        warm = await target.turn(second, 3)
        here = await source.turn(second, 1)
        assert warm["timings"]["cache_n"] == saved["n_saved"]
        assert warm["tokens"] == here["tokens"]


@pytest.mark.parametrize("cache", ["transposed", "q8_0"])
async def test_other_cache_layouts_restore_into_another_slot(
    smollm2: Path, tmp_path: Path, workers: Any, kit: Any, cache: str
) -> None:
    worker = await workers("a")
    async with engine(smollm2, tmp_path / "e", slots=2, cache=cache) as one:
        text = PROMPT[:200]
        await one.turn(text, 0, 2)
        path, saved = await one.save(0, "turn.bin")
        info = await worker.inspect(path)
        near, far = kit.tcp_pair()
        _, received = await asyncio.gather(
            worker.send(near, kit.send_job(path)), worker.receive(far, kit.grant_for(path.read_bytes()))
        )
        layout = Layout(shape=info.shape, n_stream=info.n_stream, slot=1, max_tokens=CTX)
        await worker.render(received.replica, layout, one.folder / "import.bin")
        restored = await one.post("/slots/1?action=restore", {"filename": "import.bin"})
        assert restored["n_restored"] == saved["n_saved"] == info.n_tokens
        again = await one.turn(text + " More.", 1, 1)
        assert again["timings"]["cache_n"] >= info.n_tokens - 2  # what was generated is not in this prompt


async def test_an_engine_without_flash_attention_is_told_apart_before_it_sees_a_file(
    smollm2: Path, tmp_path: Path, workers: Any, kit: Any
) -> None:
    a = b = await workers("b")
    async with (
        engine(smollm2, tmp_path / "ea", slots=1) as source,
        engine(smollm2, tmp_path / "eb", slots=1, cache="transposed") as target,
    ):
        await source.turn("A short text.", 0, 2)
        path, _ = await source.save(0, "turn1.bin")
        layout = await layout_of(target, b, slot=0)
        assert layout.shape.v_trans and not (await a.inspect(path)).shape.v_trans
        near, far = kit.tcp_pair()
        grant = kit.grant_for((target.folder / "probe.bin").read_bytes())
        results = await asyncio.gather(
            a.send(near, kit.send_job(path)), b.receive(far, grant), return_exceptions=True
        )
        assert [error.reason for error in results if isinstance(error, KvError)] == ["layout", "layout"]
