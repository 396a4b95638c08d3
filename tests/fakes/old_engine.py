"""A real engine that knows no checkpoints in save-files, made of one that does."""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp

from tests.fakes.statestore import info_of
from viiwork.engine.slots import RestoreDone, SlotsClient


class OldSlots(SlotsClient):
    """Restores a file without its appendix, as an engine does that reads no further than the states."""

    def __init__(self, url: str, session: aiohttp.ClientSession, n_slots: int, folder: Path) -> None:
        super().__init__(url, session, n_slots)
        self._folder = folder

    async def restore(self, slot: int, filename: str, timeout_s: float) -> RestoreDone:
        path = self._folder / filename
        os.truncate(path, info_of(path.read_bytes()).payload_bytes)
        return await super().restore(slot, filename, timeout_s)
