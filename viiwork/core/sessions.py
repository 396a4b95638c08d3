"""Where sessions live: which slot of this node, or which other node, ran a session's last turn.

A binding is a preference, never a lock: a turn whose slot is taken runs elsewhere. A slot is believed to hold
at most one session; the belief is corrected by what the engine reports (`cache_n`) and dropped when the
engine restarts.

A session's state has a generation, a hybrid clock in milliseconds: every turn makes a larger one than any
seen before, so of two states of one session the larger generation is the newer, whichever nodes made them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from viiwork.core.slots import SlotRef
from viiwork.limits import SESSIONS_MAX

SessionKey = tuple[str, str]  # (hashed session, model): one conversation may talk to several models


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a session's last successful turn ran."""

    node: str
    ref: SlotRef | None = None  # None on another node
    n_tokens: int = 0  # tokens the slot holds, 0 when unknown
    generation: int = 0


class SessionTable:
    """Bindings of at most `limit` sessions, the least recently used forgotten first."""

    def __init__(self, limit: int = SESSIONS_MAX) -> None:
        self._limit = limit
        self._bindings: OrderedDict[SessionKey, Binding] = OrderedDict()
        self._occupant: dict[SlotRef, SessionKey] = {}

    def __len__(self) -> int:
        return len(self._bindings)

    def get(self, key: SessionKey) -> Binding | None:
        return self._bindings.get(key)

    def occupant(self, ref: SlotRef) -> SessionKey | None:
        return self._occupant.get(ref)

    def taken(self, ref: SlotRef, key: SessionKey | None) -> None:
        """A turn starts in the slot: whatever another session had there is gone."""
        before = self._occupant.get(ref)
        if before is not None and before != key:
            self._forget_slot(ref)

    def ran_here(self, key: SessionKey, binding: Binding) -> None:
        """A turn succeeded in a slot of this node, or a replica was restored into it."""
        if binding.ref is None:
            raise ValueError("a local binding names its slot")
        known = self._bindings.get(key)
        if known is not None and known.ref is not None and known.ref != binding.ref:
            self._occupant.pop(known.ref, None)
        self._occupant[binding.ref] = key
        self._store(key, binding)

    def ran_elsewhere(self, key: SessionKey, node: str, generation: int, n_tokens: int = 0) -> None:
        """A turn succeeded on another node; what a slot here still holds of the session stays usable."""
        known = self._bindings.get(key)
        if known is not None and known.ref is not None:
            self._store(key, replace(known, node=node))
        else:
            self._store(key, Binding(node, n_tokens=n_tokens, generation=generation))

    def engine_restarted(self, backend: str) -> None:
        """Nothing is held in the slots of this backend any more."""
        for ref in [r for r in self._occupant if r.backend == backend]:
            self._forget_slot(ref)

    def emptied(self, ref: SlotRef) -> None:
        """The slot holds nothing we know of any more (a failed restore empties it)."""
        if ref in self._occupant:
            self._forget_slot(ref)

    def node_gone(self, node: str) -> None:
        """A member left: sessions whose home it was have none now."""
        for key, binding in list(self._bindings.items()):
            if binding.node == node:
                if binding.ref is None:
                    del self._bindings[key]
                else:
                    self._bindings[key] = replace(binding, node="")

    def next_generation(self, key: SessionKey, wall_ms: int) -> int:
        """A generation newer than this session's last one, and never behind the wall clock."""
        known = self._bindings.get(key)
        return max(wall_ms, known.generation + 1 if known else 0)

    def _forget_slot(self, ref: SlotRef) -> None:
        key = self._occupant.pop(ref)
        binding = self._bindings.get(key)
        if binding is not None and binding.ref == ref:
            del self._bindings[key]

    def _store(self, key: SessionKey, binding: Binding) -> None:
        self._bindings[key] = binding
        self._bindings.move_to_end(key)
        while len(self._bindings) > self._limit:
            old_key, old = self._bindings.popitem(last=False)
            if old.ref is not None and self._occupant.get(old.ref) == old_key:
                del self._occupant[old.ref]
