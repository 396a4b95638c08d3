"""One engine process: own process group, output drained and bounded, ended with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

from viiwork.engine.command import Command
from viiwork.engine.groups import GroupGuard
from viiwork.engine.loglines import LineAssembler, LogTail
from viiwork.limits import ENGINE_READ_BYTES

log = logging.getLogger("viiwork.engine")

_LAST_READS = 64  # after the end; bounded because an escaped grandchild may go on writing
_LAUNCHER = Path(__file__).with_name("launch.py")


class EngineProcess:
    """A running engine, leader of its own session and group; `wait` and `stop` clean the whole group up."""

    def __init__(
        self, process: asyncio.subprocess.Process, output: int, label: str, guard: GroupGuard
    ) -> None:
        self._process = process
        self._output = output
        self._label = label
        self._guard = guard
        self._assembler = LineAssembler()
        self._tail = LogTail()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(output, self._drain)
        self._ended = asyncio.ensure_future(self._watch())

    @classmethod
    async def spawn(cls, command: Command, label: str, guard: GroupGuard) -> EngineProcess:
        """Start `command`; lines of its output go to the log behind `[label] `. Raises `OSError`."""
        output, child_end = os.pipe()
        try:
            os.set_blocking(output, False)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(_LAUNCHER),
                str(os.getpid()),
                *command.argv,
                env=dict(command.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=child_end,
                stderr=child_end,
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(child_end)
        guard.add(process.pid)
        return cls(process, output, label, guard)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self._ended.done()

    def newest_lines(self, count: int) -> tuple[str, ...]:
        return self._tail.newest(count)

    async def wait(self) -> int:
        """The exit code, negative for a signal, once the process and the rest of its group are gone."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM to the group, SIGKILL after `grace_s` (0 = at once); the exit code."""
        if self.is_running and grace_s > 0:
            self._signal(signal.SIGTERM)
            await asyncio.wait([self._ended], timeout=grace_s)
            if self.is_running:
                log.warning("[%s] still there %g s after SIGTERM; killing it", self._label, grace_s)
        if self.is_running:
            self._signal(signal.SIGKILL)
        return await self.wait()

    async def _watch(self) -> int:
        code = await self._process.wait()
        # Whatever the leader left behind holds memory on the cards and perhaps the port.
        self._signal(signal.SIGKILL)
        self._guard.remove(self.pid)
        self._drain(to_the_end=True)
        self._close_output()
        return code

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _drain(self, to_the_end: bool = False) -> None:
        """Read what is there. An error must not stop the reading: a full pipe would freeze the engine."""
        for _ in range(_LAST_READS if to_the_end else 1):
            if self._output < 0:
                return
            try:
                data = os.read(self._output, ENGINE_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("[%s] its output cannot be read: %s", self._label, error)
                self._close_output()
                return
            self._take(self._assembler.feed(data) if data else self._assembler.flush())
            if not data:
                self._close_output()

    def _take(self, lines: list[str]) -> None:
        now = time.monotonic()
        for line in lines:
            for said in self._tail.add(line, now):
                log.info("[%s] %s", self._label, said)

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1
