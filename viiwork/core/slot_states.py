"""What kv_share knows of each slot: whose state it holds, and which rows are still those of earlier saves.

The watermark costs nothing: the engine tells of each turn how many leading rows it kept (`cache_n`), and rows
below the smallest of these since a save are those that were saved. On any doubt marks are dropped; a peer
then compares digests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slots import SlotRef
from viiwork.limits import KV_MARKS_MAX


class Kept(NamedTuple):
    """Rows below `keep` are the same in the slot and in the state of this generation."""

    generation: int
    source: str
    keep: int


@dataclass(slots=True)
class SlotState:
    """A session's newest turn in a slot."""

    key: SessionKey
    binding: Binding
    shared: bool  # it may leave the node, or be kept as a replica
    lasting: bool = True  # another turn is expected
    kept: list[Kept] = field(default_factory=list)  # oldest first
    saved_at: float = -math.inf

    @property
    def is_owed(self) -> bool:
        """Is it worth keeping before the slot or the node goes?"""
        return self.shared and self.lasting

    @property
    def new_tokens(self) -> int:
        """Rows that the newest save does not hold."""
        return self.binding.n_tokens - (self.kept[-1].keep if self.kept else 0)


class SlotStates:
    """One entry a slot at most; told of every turn in a slot, every save and every restore."""

    def __init__(self) -> None:
        self._states: dict[SlotRef, SlotState] = {}

    def get(self, ref: SlotRef) -> SlotState | None:
        return self._states.get(ref)

    def newest_first(self) -> Iterator[SlotState]:
        return iter(sorted(self._states.values(), key=lambda state: -state.binding.generation))

    def ran(
        self, key: SessionKey, binding: Binding, cached: int | None, *, shared: bool, lasting: bool = True
    ) -> None:
        """A turn of the session succeeded in the slot of its binding and kept `cached` rows of it."""
        if binding.ref is None:
            raise ValueError("a turn in a slot names it")
        for ref in [ref for ref, state in self._states.items() if state.key == key and ref != binding.ref]:
            del self._states[ref]
        known = self._states.get(binding.ref)
        state = self._states[binding.ref] = SlotState(key, binding, shared, lasting)
        if known is not None and known.key == key:
            state.saved_at = known.saved_at
            state.kept = _lowered(known.kept, cached or 0)

    def saved(self, ref: SlotRef, generation: int, source: str, n_tokens: int, now: float) -> None:
        """The slot's content was saved as this generation of its session."""
        if (state := self._states.get(ref)) is not None:
            state.kept = [*state.kept, Kept(generation, source, n_tokens)][-(KV_MARKS_MAX - 1) :]
            state.saved_at = now

    def restored(self, key: SessionKey, binding: Binding, kept: Sequence[Kept]) -> None:
        """A replica was restored: the slot holds its leading rows, and with them what it kept of others."""
        if binding.ref is None:
            raise ValueError("a restored state lies in a slot")
        state = self._states[binding.ref] = SlotState(key, binding, shared=True)
        state.kept = _lowered(kept[-(KV_MARKS_MAX - 1) :], binding.n_tokens)

    def unknown(self, ref: SlotRef) -> None:
        """Something else ran there, or ended badly."""
        self._states.pop(ref, None)

    def backend_unknown(self, backend: str) -> None:
        """Its engine started anew, or ran something in a slot of its own choice."""
        for ref in [ref for ref in self._states if ref.backend == backend]:
            del self._states[ref]


def _lowered(kept: Sequence[Kept], cached: int) -> list[Kept]:
    """The marks after a turn that kept so many rows; those that say nothing any more go."""
    return [Kept(mark.generation, mark.source, min(mark.keep, cached)) for mark in kept if cached > 0]
