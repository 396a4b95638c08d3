"""The other end of a measurement that a host asked this node for: one process, for that host alone."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import sys
from contextlib import suppress

from viiwork.errors import BenchError
from viiwork.limits import BENCH_PORT, BENCH_START_S
from viiwork.mesh.notices import one_line

log = logging.getLogger(__name__)

_SECRET = "VIIWORK_BENCH_SECRET"


class BenchEnd:
    """Implements `api.ports.BenchEnds`. The process ends by itself when the host is done or never comes."""

    def __init__(self, keys: tuple[bytes, ...], hidden_env: frozenset[str]) -> None:
        self._keys, self._hidden_env = keys, hidden_env
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def begin(self) -> int:
        """See `api.ports.BenchEnds.begin`."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
        return BENCH_PORT

    async def stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        env = {name: value for name, value in os.environ.items() if name not in self._hidden_env}
        command = [sys.executable, "-m", "viiwork", "bench", "kvshare", "--listen", "--once"]
        if self._keys:
            env[_SECRET] = base64.b64encode(self._keys[0]).decode()
            command += ["--secret-env", _SECRET]
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdin=asyncio.subprocess.PIPE,  # its end tells the process that the node is gone
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        first = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(BENCH_START_S):
                first = await process.stdout.readline()
        if not first.startswith(b"listening"):
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            said = one_line(first.decode(errors="replace").strip()) or "it did not start in time"
            raise BenchError(f"this node cannot take part in a measurement: {said}")
        log.info("bench.listening port=%d", BENCH_PORT)
        return process
