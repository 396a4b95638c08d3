"""Keeps what was measured of the models' speed in `state_dir/perf.json`, for the next start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from viiwork.config.model import ModelSection
from viiwork.core.score import Baseline, Speeds
from viiwork.limits import (
    CAPACITY_MILLIS_MAX,
    MODELS_MAX,
    PERF_FILE_MAX_BYTES,
    PERF_LOOK_S,
    PERF_SAVE_S,
)
from viiwork.node.durable import replace_file

log = logging.getLogger(__name__)

FILE_NAME = "perf.json"
_Millis = Annotated[float, Meta(ge=0, le=CAPACITY_MILLIS_MAX)]


class _Entry(msgspec.Struct, frozen=True):
    overhead_ms: _Millis
    prefill_ms_per_1k: Annotated[float, Meta(gt=0, le=CAPACITY_MILLIS_MAX)]
    key: str
    at_unix_s: float = 0.0


class _File(msgspec.Struct, frozen=True):
    models: Annotated[dict[str, _Entry], Meta(max_length=MODELS_MAX)]
    v: int = 1


class PerfFile:
    """The baselines of the configured models, on disk."""

    def __init__(self, folder: Path, speeds: Speeds, *, wall_s: Callable[[], float]) -> None:
        self._path = folder / FILE_NAME
        self._speeds = speeds
        self._wall_s = wall_s
        self._keys: dict[str, str] = {}
        self._written: dict[str, _Entry] = {}
        self._written_at = 0.0

    async def configured(self, models: Sequence[ModelSection]) -> None:
        """These models are served now: take over what is known of them; a changed one starts anew."""
        known = await asyncio.to_thread(self._read) if not self._keys else dict(self._written)
        keys = await asyncio.to_thread(lambda: {model.name: key_of(model) for model in models})
        for gone in self._keys.keys() - keys.keys():
            self._speeds.forget(gone)
        for name, key in keys.items():
            if self._keys.get(name) != key:
                entry = known.get(name)
                fits = entry is not None and entry.key == key
                self._speeds.restore(name, _baseline(entry) if entry is not None and fits else None)
        self._keys = keys
        self._written = {name: entry for name, entry in known.items() if keys.get(name) == entry.key}

    async def run(self) -> None:
        """Write what changes, for the node's life."""
        while True:
            await asyncio.sleep(PERF_LOOK_S)
            await self.save()

    async def save(self, *, now: bool = False) -> None:
        """Write the file when a rounded value changed, else at most each `PERF_SAVE_S`, or `now`."""
        wall_s = self._wall_s()
        entries: dict[str, _Entry] = {}
        for name, key in self._keys.items():
            baseline = self._speeds.baseline(name)
            if baseline is not None:
                entries[name] = _Entry(
                    round(baseline.overhead_ms, 3), round(baseline.prefill_ms_per_1k, 3), key, round(wall_s)
                )
        changed = _rounded(entries) != _rounded(self._written)
        is_due = now or not 0 <= wall_s - self._written_at < PERF_SAVE_S
        if not changed and (not is_due or _values(entries) == _values(self._written)):
            return
        self._written, self._written_at = entries, wall_s
        try:
            await asyncio.to_thread(replace_file, self._path, msgspec.json.encode(_File(entries)))
        except OSError as error:
            log.warning("perf.unsaved path=%s: %s", self._path, error.strerror)

    def _read(self) -> dict[str, _Entry]:
        """What an earlier run wrote; a file that cannot be used is as good as none."""
        try:
            with self._path.open("rb") as file:
                data = file.read(PERF_FILE_MAX_BYTES + 1)
            if len(data) > PERF_FILE_MAX_BYTES:
                raise ValueError(f"larger than {PERF_FILE_MAX_BYTES} bytes")
            return msgspec.json.decode(data, type=_File).models
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("perf.unusable path=%s: %s", self._path, error)
            return {}


def key_of(model: ModelSection) -> str:
    """Changes with whatever may change a model's speed: engine, weights, cards, args. Reads the disk."""
    facts = msgspec.structs.asdict(model) | {"startup_timeout": None}
    if model.path:
        with contextlib.suppress(OSError):
            weights = Path(model.path).stat()
            facts |= {"weights": (weights.st_size, weights.st_mtime_ns)}
    return blake3(msgspec.json.encode(facts, enc_hook=str, order="sorted")).hexdigest(length=16)


def _baseline(entry: _Entry) -> Baseline:
    return Baseline(entry.overhead_ms, entry.prefill_ms_per_1k)


def _values(entries: dict[str, _Entry]) -> dict[str, tuple[float, float, str]]:
    return {name: (e.overhead_ms, e.prefill_ms_per_1k, e.key) for name, e in entries.items()}


def _rounded(entries: dict[str, _Entry]) -> dict[str, tuple[str, str, str]]:
    return {n: (f"{e.overhead_ms:.1e}", f"{e.prefill_ms_per_1k:.1e}", e.key) for n, e in entries.items()}
