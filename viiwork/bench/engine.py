"""A real engine of this host: it makes the state that is sent, and tells what importing it costs."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import aiohttp

from viiwork.bench.states import BenchState
from viiwork.config.model import LlamacppSection, ModelSection
from viiwork.engine.binary import FlagProbe, resolve_binary
from viiwork.engine.command import HostFacts, llamacpp_command
from viiwork.engine.groups import GroupGuard
from viiwork.engine.leftovers import EngineRegister
from viiwork.engine.ports import PortPicker
from viiwork.engine.process import EngineProcess
from viiwork.engine.slots import SlotsClient
from viiwork.errors import BenchError, EngineError, KvError
from viiwork.host.cpus import usable_cpus
from viiwork.limits import BENCH_ENGINE_START_S, BENCH_PREFILL_S, BENCH_PROMPT_TOKENS
from viiwork.mesh.notices import one_line

_LOOK_S = 0.1
_STOP_S = 5.0
_SAVE_S = 60.0
_TOKENS = range(300, 1000)  # words of every vocabulary
_SAVED = "state"


class BenchEngine:
    """One engine with one slot. An async context manager; raises `BenchError` where it does not start."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._ending = AsyncExitStack()

    async def __aenter__(self) -> BenchEngine:
        try:
            await self._start()
        except EngineError as error:
            await self._ending.aclose()
            raise BenchError(f"--model: {one_line(str(error))}") from None
        except BaseException:
            await self._ending.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._ending.aclose()

    async def make_state(self) -> BenchState:
        """Let it read a prompt and save the slot."""
        rng = random.Random(BENCH_PROMPT_TOKENS)
        prompt = [rng.choice(_TOKENS) for _ in range(BENCH_PROMPT_TOKENS)]
        body = {"prompt": prompt, "n_predict": 1, "id_slot": 0}
        timeout = aiohttp.ClientTimeout(total=BENCH_PREFILL_S)
        try:
            async with self._http.post(f"{self._url}/completion", json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    raise BenchError(f"--model: the engine refuses a prompt with {answer.status}")
                await answer.read()
            await self._slots.save(0, _SAVED, _SAVE_S)
        except (aiohttp.ClientError, OSError, TimeoutError, KvError) as error:
            raise BenchError(f"--model: the engine makes no state: {one_line(str(error))}") from None
        return BenchState(self._folder / _SAVED, None, 0)

    async def restore(self) -> float:
        """Seconds until the state is in the slot again. Raises `BenchError`."""
        begun = time.monotonic()
        try:
            await self._slots.erase(0)
            begun = time.monotonic()
            await self._slots.restore(0, _SAVED, _SAVE_S)
        except (EngineError, KvError) as error:
            raise BenchError(f"--model: the engine does not restore: {one_line(str(error))}") from None
        return time.monotonic() - begun

    async def _start(self) -> None:
        binary = resolve_binary("")
        port = PortPicker().pick()
        model = ModelSection(
            name="bench",
            engine="llamacpp",
            path=str(self._model),
            context=2 * BENCH_PROMPT_TOKENS,
            args=("--n-gpu-layers", "-1"),  # cards, where the engine knows any
            llamacpp=LlamacppSection(cache_ram_mib=0),
        )
        command = llamacpp_command(
            model,
            0,
            port,
            program=binary.program,
            flags=await FlagProbe().flags(binary),
            facts=HostFacts(cpus=usable_cpus()),
            node_env=os.environ,
            save_dir=self._folder,
        )
        guard = GroupGuard(EngineRegister(self._folder / "engines"))
        guard.start()
        self._ending.callback(guard.close)
        process = await EngineProcess.spawn(command, "bench", guard)
        self._ending.push_async_callback(process.stop, _STOP_S)
        self._http = await self._ending.enter_async_context(aiohttp.ClientSession(trust_env=False))
        self._url = f"http://127.0.0.1:{port}"
        self._slots = SlotsClient(self._url, self._http, 1)
        until = time.monotonic() + BENCH_ENGINE_START_S
        while (await self._slots.health(_STOP_S)).state != "ready":
            if not process.is_running or time.monotonic() > until:
                said = " ".join(process.newest_lines(3)) or "it says nothing"
                raise BenchError(f"--model: the engine does not start: {one_line(said)}")
            await asyncio.sleep(_LOOK_S)
