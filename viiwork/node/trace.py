"""Writes the arrival trace: a file that is added to, and moved aside when it is full."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from viiwork.core.choice import Choice, Policy, Question
from viiwork.limits import TRACE_FILE_MAX_BYTES, TRACE_FLUSH_S, TRACE_LINES_MAX
from viiwork.wire.trace import VERSION, Arrival, Head, encode_line

log = logging.getLogger(__name__)


class TraceFile:
    """The trace of one node's decisions; FILE is the newest, FILE.1 the one before."""

    def __init__(
        self,
        path: Path,
        node: str,
        policy: Policy,
        *,
        wall_ms: Callable[[], int],
        max_bytes: int = TRACE_FILE_MAX_BYTES,
    ) -> None:
        self._path = path
        self._head = encode_line(Head(VERSION, node, policy))
        self._wall_ms = wall_ms
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._begun = False
        self._dropped = 0
        self._failed = ""

    def add(self, request_id: str, question: Question, choice: Choice) -> None:
        """Put a decision on record; it is written a little later."""
        if len(self._lines) >= TRACE_LINES_MAX:
            self._dropped += 1
            return
        self._lines.append(encode_line(Arrival(self._wall_ms(), request_id, question, choice)))

    async def run(self) -> None:
        """Write for the node's life."""
        while True:
            await asyncio.sleep(TRACE_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is on record. A disk that refuses costs lines, never a request."""
        lines, self._lines = self._lines, []
        if self._dropped:
            log.warning("trace.dropped lines=%d path=%s", self._dropped, self._path)
            self._dropped = 0
        if not lines:
            return
        try:
            await asyncio.to_thread(self._write, b"".join(lines))
            self._failed = ""
        except OSError as error:
            if str(error) != self._failed:
                self._failed = str(error)
                log.warning("trace.unwritten path=%s: %s", self._path, error.strerror)

    def _write(self, data: bytes) -> None:
        if self._begun and self._path.exists() and self._path.stat().st_size + len(data) > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
            if not self._begun or file.tell() == 0:
                file.write(self._head)
                self._begun = True
            file.write(data)
