"""A file that names the running engines, for the next node process to kill what this one could not."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path

import msgspec
import psutil

log = logging.getLogger("viiwork.engine")

_MAX_BYTES = 1 << 20
_SAME_START_S = 1.0  # a process id together with its start second names one process


class _Entry(msgspec.Struct, frozen=True):
    group: int
    started_unix_s: float


class EngineRegister:
    """Keeps the file. It is a second safety net: a file that cannot be read or written is no error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[int, _Entry] = {}

    def kill_leftovers(self) -> list[int]:
        """SIGKILL the groups an earlier node left running; their ids. Blocks."""
        killed = []
        for entry in self._read():
            try:
                same = abs(psutil.Process(entry.group).create_time() - entry.started_unix_s) < _SAME_START_S
            except psutil.Error:
                continue
            if same and os.getpgid(entry.group) == entry.group and entry.group != os.getpgrp():
                log.warning("killing engine %d, left running by an earlier node process", entry.group)
                with contextlib.suppress(OSError):
                    os.killpg(entry.group, signal.SIGKILL)
                    killed.append(entry.group)
        self._write()
        return killed

    def add(self, group: int) -> None:
        with contextlib.suppress(psutil.Error):
            self._entries[group] = _Entry(group, psutil.Process(group).create_time())
            self._write()

    def remove(self, group: int) -> None:
        if self._entries.pop(group, None) is not None:
            self._write()

    def _read(self) -> list[_Entry]:
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=list[_Entry])
        except (OSError, msgspec.MsgspecError):
            return []

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(list(self._entries.values())))
            part.replace(self._path)
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error.strerror)
