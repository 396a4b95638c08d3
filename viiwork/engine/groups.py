"""The node's end of the reaper: which process groups must not outlive the node."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from viiwork.engine.leftovers import EngineRegister

log = logging.getLogger("viiwork.engine")

_SCRIPT = Path(__file__).with_name("reaper.py")
_END_TIMEOUT_S = 5.0


class GroupGuard:
    """Owns the reaper process. `add` and `remove` never block for longer than a pipe write of a few bytes."""

    def __init__(self, register: EngineRegister) -> None:
        self._register = register
        self._groups: set[int] = set()
        self._reaper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Kill what an earlier node process left, then start guarding. Blocks for some milliseconds."""
        self._register.kill_leftovers()
        self._start_reaper()

    @property
    def pid(self) -> int | None:
        return self._reaper.pid if self._reaper is not None else None

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._register.add(group)
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._groups.discard(group)
        self._register.remove(group)
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the reaper; groups that are still registered are killed by it."""
        if self._reaper is None:
            return
        reaper, self._reaper = self._reaper, None
        assert reaper.stdin is not None
        reaper.stdin.close()
        try:
            reaper.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            reaper.kill()
            reaper.wait()

    def _start_reaper(self) -> None:
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},
        )
        for group in self._groups:
            self._tell(f"+{group}\n")

    def _say(self, line: str) -> None:
        if self._reaper is None:
            return
        try:
            self._tell(line)
        except BrokenPipeError:
            log.warning("the process that guards the engines was killed; starting another")
            self._reaper.wait()
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._start_reaper()

    def _tell(self, line: str) -> None:
        assert self._reaper is not None and self._reaper.stdin is not None
        os.write(self._reaper.stdin.fileno(), line.encode())
