"""Lets an engine save a slot into a file, when that is in nobody's way."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from viiwork.core.manners import Manners
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slot_states import SlotStates
from viiwork.core.slots import SlotRef
from viiwork.errors import KvError
from viiwork.limits import KV_SAVE_S, KV_SETTLE_POLL_S, KV_SLOT_SETTLE_S
from viiwork.node.background import remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayout
from viiwork.node.kv_stats import KvStats
from viiwork.wire.replica import Mark

SPACE_ROOM = 1.1  # the file's other parts and its last block

# Reason words: nothing was begun, and it is worth another try.
PUT_OFF = frozenset({"queue", "gate", "budget"})


class EngineGates:
    """One save or restore at a time per engine: each of them stops all its slots."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def of(self, backend: str) -> asyncio.Lock:
        return self._locks[backend]

    def is_closed(self, backend: str) -> bool:
        """Whether a save or restore runs there now."""
        return backend in self._locks and self._locks[backend].locked()

    def forget(self, backend: str) -> None:
        """The backend is gone for good."""
        self._locks.pop(backend, None)


@dataclass(frozen=True, slots=True)
class Saved:
    """A session's state in a file, which is its holder's to remove."""

    key: SessionKey
    binding: Binding
    layout: EngineLayout
    path: Path
    known: tuple[Mark, ...]  # earlier saves of the same rows
    n_tokens: int
    n_bytes: int
    stages_s: dict[str, float]  # how long it queued and saved


class Saver:
    """Saves slots; what that costs the engine is on record in `Manners`."""

    def __init__(
        self,
        me: str,
        dispatcher: Dispatcher,
        gates: EngineGates,
        manners: Manners,
        states: SlotStates,
        stats: KvStats,
    ) -> None:
        self._me = me
        self._stats = stats
        self._dispatcher = dispatcher
        self._gates = gates
        self._manners = manners
        self._states = states

    async def save(self, key: SessionKey, binding: Binding, layout: EngineLayout, *, urgent: bool) -> Saved:
        """Save the session's slot while nobody else may use it.

        Raises `KvError`: one of `PUT_OFF` when requests wait, another save or a restore runs there or, unless
        it is urgent, the engine was stopped enough of late; `slot_busy` when the session has moved on, and
        its next turn will see to it.
        """
        ref = binding.ref
        if ref is None:
            raise KvError("not_here", "no slot holds the session")
        _check_space(layout, binding)
        wanted_at = time.monotonic()
        if self._gates.is_closed(ref.backend):
            raise KvError("gate", "another save or a restore runs")  # saves in line would hold up a restore
        async with self._gates.of(ref.backend):
            if self._dispatcher.is_wanted(ref, key[1]):
                raise KvError("queue", "requests wait for a slot")
            if not urgent and self._manners.wait_s(ref.backend, binding.n_tokens, time.monotonic()) > 0:
                raise KvError("budget", "the engine was stopped enough of late")
            lease = self._dispatcher.take_idle_slot(ref)
            if lease is None:
                raise KvError("slot_busy", "a turn runs in the slot")
            try:
                if self._dispatcher.sessions.get(key) != binding:
                    raise KvError("slot_busy", "the session has moved on")
                await self._until_settled(layout, ref, key[1])
                return await self._save(key, binding, ref, layout, wanted_at)
            finally:
                self._dispatcher.give_back(lease)

    async def save_leased(self, key: SessionKey, binding: Binding, layout: EngineLayout) -> Saved:
        """Save what a slot held before the turn that has just been granted it."""
        ref = binding.ref
        if ref is None:
            raise KvError("not_here", "no slot holds the session")
        _check_space(layout, binding)
        wanted_at = time.monotonic()
        async with self._gates.of(ref.backend):
            await self._until_settled(layout, ref, "")
            return await self._save(key, binding, ref, layout, wanted_at)

    async def _save(
        self, key: SessionKey, binding: Binding, ref: SlotRef, layout: EngineLayout, wanted_at: float
    ) -> Saved:
        state = self._states.get(ref)
        kept = state.kept if state is not None and state.key == key else []
        known = tuple(Mark(generation=m.generation, source=m.source, keep=m.keep) for m in kept)
        path = layout.save_dir / f"out-{uuid.uuid4().hex}"
        began = time.monotonic()
        try:
            done = await layout.client.save(ref.slot, path.name, KV_SAVE_S)
            size = path.stat().st_size
            if size != done.n_written:
                raise KvError("bad_file", f"the engine wrote {size} of {done.n_written} bytes")
        except BaseException:
            now = time.monotonic()
            self._manners.saved(
                ref.backend, binding.n_tokens, now - began, now
            )  # it may have stood all the time
            await remove_file(path)
            raise
        now, save_s = time.monotonic(), done.ms / 1000
        self._stats.stalled(ref.backend, save_s)
        self._manners.saved(ref.backend, done.n_saved, save_s, now)
        if state is not None and state.key == key:
            self._states.saved(ref, binding.generation, self._me, done.n_saved, now)
        stages_s = {"queued": began - wanted_at, "save": save_s}
        return Saved(key, binding, layout, path, known, done.n_saved, done.n_written, stages_s)

    async def _until_settled(self, layout: EngineLayout, ref: SlotRef, model: str) -> None:
        """The engine frees a slot a moment after its last byte; a save before that would be put off there.

        `model`: whose requests are not kept waiting for it.
        """
        until = time.monotonic() + KV_SLOT_SETTLE_S
        while True:
            busy = {slot.id for slot in await layout.client.slots() if slot.is_processing}
            if model and self._dispatcher.is_wanted(ref, model):
                raise KvError("queue", "requests wait for the slot")
            if ref.slot not in busy:
                return
            if time.monotonic() > until:
                raise KvError("slot_busy", f"slot {ref.slot} of {ref.backend} does not come to rest")
            await asyncio.sleep(KV_SETTLE_POLL_S)


def _check_space(layout: EngineLayout, binding: Binding) -> None:
    need = layout.shape.token_bytes * binding.n_tokens
    there = os.statvfs(layout.save_dir)
    free = there.f_bavail * there.f_frsize
    if free < need * SPACE_ROOM:
        raise KvError("no_space", f"a save of about {need} bytes, {free} are free in {layout.save_dir}")
