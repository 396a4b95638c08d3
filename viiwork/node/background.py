"""Work that nobody waits for: held until it ends, and heard of when it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Background:
    """Owner of one part's tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Cancel everything and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background.failed", exc_info=error)


async def remove_file(path: Path) -> None:
    """Delete a save-file, if it is there; in a thread, because tmpfs takes 0.2 s to free a gigabyte."""
    with suppress(OSError):
        await asyncio.to_thread(path.unlink, missing_ok=True)
