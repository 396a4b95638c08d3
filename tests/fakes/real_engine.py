"""Starts a real engine with one cache layout and asks it for turns, saves and restores."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

HOST = Path(__file__).with_name("engine_host.py")
CTX = 1024  # tokens a slot


@dataclass(frozen=True)
class Build:
    """How an engine keeps its cache."""

    slots: int = 1
    unified: bool = False
    transposed: bool = False  # flash attention off
    quantised: bool = False  # q8_0


@dataclass
class Engine:
    url: str
    folder: Path
    http: aiohttp.ClientSession

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def turn(self, prompt: str | list[int], slot: int, n_predict: int = 8) -> dict[str, Any]:
        body = {"prompt": prompt, "id_slot": slot, "n_predict": n_predict, "temperature": 0, "seed": 1}
        return await self.post("/completion", {**body, "return_tokens": True, "n_probs": 3})

    async def save_as(self, slot: int, name: str) -> tuple[Path, dict[str, Any]]:
        """The file in the engine's folder, and what the engine said of it."""
        done = await self.post(f"/slots/{slot}?action=save", {"filename": name})
        return self.folder / name, done

    async def save(self, slot: int) -> bytes:
        path, done = await self.save_as(slot, "save.bin")
        data = path.read_bytes()
        assert len(data) == done["n_written"]
        return data

    async def restore(self, slot: int, data: bytes) -> dict[str, Any]:
        (self.folder / "restore.bin").write_bytes(data)
        return await self.post(f"/slots/{slot}?action=restore", {"filename": "restore.bin"})


@contextlib.asynccontextmanager
async def real_engine(model: Path, folder: Path, build: Build, ctx: int = CTX) -> AsyncIterator[Engine]:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"model": str(model), "folder": str(folder), "port": port, "ctx": ctx, **vars(build)}
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HOST),
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(120):
                while not await _healthy(http, port):
                    assert process.returncode is None, (folder / "log").read_text()[-2000:]
                    await asyncio.sleep(0.05)
            yield Engine(f"http://127.0.0.1:{port}", folder, http)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _healthy(http: aiohttp.ClientSession, port: int) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(f"http://127.0.0.1:{port}/health") as answer:
            return answer.status == 200
    return False
