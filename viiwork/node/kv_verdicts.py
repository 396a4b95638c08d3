"""Verdicts of the self-test in `state_dir/kv-verdicts.json`, so that a restart need not test again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from viiwork.limits import KV_VERDICT_FILE_MAX_BYTES, KV_VERDICTS_MAX
from viiwork.node.durable import replace_file

log = logging.getLogger(__name__)

FILE_NAME = "kv-verdicts.json"


# portable: also a prompt that diverges reuses it; append-only: only one that extends it exactly does
Word = Literal["portable", "append-only", "not portable"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a moved state of one model, engine build and cache layout is good for."""

    word: Word
    why: Annotated[str, Meta(max_length=500)] = ""
    n_tokens: int = 0  # of the test's state, and how many an append and a divergence reused
    n_appended: int = 0
    n_diverged: int = 0
    checkpoints: int = 0  # that go into a file for such an engine: 0 where it does not read them


class _File(msgspec.Struct, frozen=True):
    verdicts: Annotated[dict[str, Verdict], Meta(max_length=KV_VERDICTS_MAX)]
    v: int = 1


class Verdicts:
    """The newest verdicts, by a key of all they depend on; read at first use, written with each new one."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._known: dict[str, Verdict] | None = None
        self._lock = asyncio.Lock()

    async def get(self, key: str) -> Verdict | None:
        async with self._lock:
            return (await self._all()).get(key)

    async def put(self, key: str, verdict: Verdict) -> None:
        async with self._lock:
            known = await self._all()
            known.pop(key, None)
            known[key] = verdict
            while len(known) > KV_VERDICTS_MAX:
                del known[next(iter(known))]
            try:
                await asyncio.to_thread(replace_file, self._path, msgspec.json.encode(_File(known)))
            except OSError as error:
                log.warning("kv_share.verdicts_unsaved path=%s: %s", self._path, error.strerror)

    async def _all(self) -> dict[str, Verdict]:
        if self._known is None:
            self._known = await asyncio.to_thread(self._read)
        return self._known

    def _read(self) -> dict[str, Verdict]:
        """What an earlier run wrote; a file that cannot be used is as good as none."""
        try:
            with self._path.open("rb") as file:
                data = file.read(KV_VERDICT_FILE_MAX_BYTES + 1)
            if len(data) > KV_VERDICT_FILE_MAX_BYTES:
                raise ValueError(f"larger than {KV_VERDICT_FILE_MAX_BYTES} bytes")
            return msgspec.json.decode(data, type=_File).verdicts
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("kv_share.verdicts_unusable path=%s: %s", self._path, error)
            return {}
