"""The slot table: which slots this node's backends have, and who holds each of them.

Single owner of all leases. A lease is the right of one request (or one save of kv_share) to one slot;
`release` gives it back and may be called on every exit of a request, because only the first call counts.
Nothing here knows what a slot contains; that is `core.sessions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class SlotRef(NamedTuple):
    """One slot of one backend."""

    backend: str
    slot: int


@dataclass(slots=True, eq=False)
class _Backend:
    model: str
    url: str
    n_slots: int
    routable: bool
    leases: dict[int, int] = field(default_factory=dict)  # slot -> lease number
    extra: set[int] = field(default_factory=set)  # leases on slots that no longer exist
    idle: dict[int, SlotRef] = field(
        default_factory=dict
    )  # slots without a lease, the one idle longest first

    @property
    def room(self) -> int:
        """How many more leases fit. One on a vanished slot still occupies the engine."""
        return self.n_slots - len(self.leases) - len(self.extra)


class SlotTable:
    """Slots and leases of all local backends."""

    def __init__(self) -> None:
        self._backends: dict[str, _Backend] = {}
        self._of_model: dict[str, list[_Backend]] = {}
        self._where: dict[int, tuple[SlotRef, _Backend]] = {}
        self._next = 0

    # -- what the engine side tells ------------------------------------------------------------------
    def add_model(self, model: str) -> None:
        """The model is configured here, whether or not it has a backend now."""
        self._of_model.setdefault(model, [])

    def remove_model(self, model: str) -> None:
        """The model is configured no more; its backends are removed one by one, as they end."""
        self._of_model.pop(model, None)

    def remove_backend(self, backend: str) -> None:
        """A backend is gone for good. Its open leases stay valid until they are given back, and neither keep
        the name from a new backend nor take room from it.
        """
        known = self._backends.pop(backend, None)
        if known is not None and known in (others := self._of_model.get(known.model, [])):
            others.remove(known)

    def put_backend(self, backend: str, *, model: str, url: str, n_slots: int, routable: bool) -> None:
        """Add a backend or take over its new facts; leases survive a restart of the engine until they are
        released.
        """
        known = self._backends.get(backend)
        if known is None:
            known = self._backends[backend] = _Backend(model, url, 0, routable)
            self._of_model.setdefault(model, []).append(known)
        known.url, known.routable = url, routable
        for slot in range(n_slots, known.n_slots):
            if slot in known.leases:
                known.extra.add(known.leases.pop(slot))
            known.idle.pop(slot, None)
        for slot in range(known.n_slots, n_slots):
            known.idle[slot] = SlotRef(backend, slot)
        known.n_slots = n_slots

    # -- questions -----------------------------------------------------------------------------------
    def serves(self, model: str) -> bool:
        """Is the model configured here, healthy or not?"""
        return model in self._of_model

    def free_slots(self, model: str) -> Iterator[SlotRef]:
        """Slots nobody holds: of the backend with most room first, and of each the one idle longest first."""
        having = [b for b in self._of_model.get(model, ()) if b.routable and b.room > 0]
        if len(having) > 1:
            having.sort(key=lambda backend: -backend.room)
        for backend in having:
            yield from islice(backend.idle.values(), backend.room)

    def n_free(self, model: str) -> int | None:
        """How many slots `free_slots` would list; None when no backend of the model is routable."""
        n_free: int | None = None
        for backend in self._of_model.get(model, ()):
            if backend.routable:
                n_free = (n_free or 0) + max(backend.room, 0)
        return n_free

    def is_routable(self, ref: SlotRef) -> bool:
        """Does the slot exist and take requests, now or when its holder is done?"""
        backend = self._backends.get(ref.backend)
        return backend is not None and backend.routable and ref.slot < backend.n_slots

    def is_free(self, ref: SlotRef) -> bool:
        return self.is_routable(ref) and self.is_idle(ref)

    def is_idle(self, ref: SlotRef) -> bool:
        """Does nobody hold it, whether or not its backend takes requests?"""
        backend = self._backends.get(ref.backend)
        return backend is not None and ref.slot in backend.idle and backend.room > 0

    def in_flight(self, backend: str) -> int:
        """Leases open on a backend."""
        known = self._backends.get(backend)
        return len(known.leases) + len(known.extra) if known else 0

    def url(self, backend: str) -> str:
        """Base URL of a backend that is in the table."""
        return self._backends[backend].url

    def any_routable(self, model: str) -> str | None:
        """The routable backend of the model with the fewest leases, for requests that need no slot."""
        found = [n for n, b in self._backends.items() if b.model == model and b.routable]
        return min(found, key=self.in_flight, default=None)

    @property
    def open_leases(self) -> int:
        return len(self._where)

    # -- leases --------------------------------------------------------------------------------------
    def lease(self, ref: SlotRef) -> int:
        """Take an idle slot; the returned number, never 0, gives it back. ValueError when it is not idle."""
        if not self.is_idle(ref):
            raise ValueError(f"slot {ref.slot} of {ref.backend} is not idle")
        self._next += 1
        backend = self._backends[ref.backend]
        backend.leases[ref.slot] = self._next
        del backend.idle[ref.slot]
        self._where[self._next] = ref, backend
        return self._next

    def release(self, lease: int) -> SlotRef | None:
        """Give a lease back; None when it was given back before."""
        found = self._where.pop(lease, None)
        if found is None:
            return None
        ref, backend = found
        if backend.leases.get(ref.slot) == lease:
            del backend.leases[ref.slot]
            backend.idle[ref.slot] = ref
        backend.extra.discard(lease)
        return ref
