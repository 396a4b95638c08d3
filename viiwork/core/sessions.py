"""Where sessions live: which slot or RAM cache of this node, or which other node, has a session's last turn.

A binding is a preference, never a lock: a turn whose slot is taken runs elsewhere. A slot is believed to hold
at most one session. A session whose slot another one takes is believed to lie in its engine's RAM cache, as
far as that reaches: a turn in any slot of the same backend finds it there. What the engine reports
(`cache_n`) corrects the belief, and a restart of the engine ends it.

A session's state has a generation, a hybrid clock in milliseconds: every turn makes a larger one than any
seen before, so of two states of one session the larger generation is the newer, whichever nodes made them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from viiwork.core.holdings import PeerHoldings
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.turn import Ask
from viiwork.limits import KV_CLOCK_SKEW_MS, RAM_MISSES_MAX, SESSION_HALF_LIFE_S, SESSIONS_MAX

SessionKey = tuple[str, str]  # (session, model): one conversation may talk to several models

REPLICATED_SHARE = 0.3  # of the loss when a peer or the engine's RAM has a copy: fetching it is not for free
OUTDATED_SHARE = 0.1  # when the session goes on elsewhere
MISSED_SHARE = 0.5  # of a session's tokens: a RAM cache that gave fewer has forgotten it


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a session's last successful turn ran."""

    node: str
    ref: SlotRef | None = None  # None on another node
    n_tokens: int = 0  # tokens the slot holds, 0 when unknown
    generation: int = 0
    tip: str = ""  # last link of the turn's chain
    scope: str = ""  # `holdings.scope_of` its client's key
    ram: str = ""  # backend in whose RAM cache it lies, when no slot holds it

    @property
    def backend(self) -> str:
        """The backend of this node that holds a state of it, "" when none does."""
        return self.ref.backend if self.ref is not None else self.ram

    @property
    def is_here(self) -> bool:
        """Does this node hold a state of it, whether or not it is the newest?"""
        return self.ref is not None or bool(self.ram)


@dataclass(slots=True)
class _RamCache:
    """What one engine's RAM cache is believed to hold, the oldest first; values: tokens, number of entry."""

    budget_tokens: int
    entries: OrderedDict[SessionKey, tuple[int, int]] = field(default_factory=OrderedDict)
    n_tokens: int = 0
    misses: int = 0  # in a row

    def take(self, key: SessionKey) -> tuple[int, int]:
        n_tokens, number = self.entries.pop(key)
        self.n_tokens -= n_tokens
        return n_tokens, number


class SessionTable:
    """Bindings of at most `limit` sessions, the least recently used forgotten first."""

    def __init__(self, limit: int = SESSIONS_MAX, peers: PeerHoldings | None = None) -> None:
        """`peers` tells which sessions live on elsewhere too; the table only reads it."""
        self._limit = limit
        self._peers = peers if peers is not None else PeerHoldings()
        self._bindings: OrderedDict[SessionKey, Binding] = OrderedDict()
        self._at_tip: dict[tuple[str, str], SessionKey] = {}  # (model, tip) of what is here
        self._occupant: dict[SlotRef, SessionKey] = {}
        self._used_at: dict[SlotRef, float] = {}
        self._ram: dict[str, _RamCache] = {}
        self._from_ram: dict[SlotRef, tuple[SessionKey, int, int]] = {}  # fetched there, not yet confirmed
        self._replaced: dict[SlotRef, SessionKey] = {}  # what the turn there now sends to RAM
        self._next = 0
        self.revision = 0  # grows with every change

    def __len__(self) -> int:
        return len(self._bindings)

    def __iter__(self) -> Iterator[tuple[SessionKey, Binding]]:
        """Sessions and their bindings, the one used last first."""
        return iter(reversed(self._bindings.items()))

    def get(self, key: SessionKey) -> Binding | None:
        return self._bindings.get(key)

    def longest(self, model: str, links: tuple[str, ...]) -> Binding | None:
        """What this node holds whose newest turn ended with the last of these links, whosever it is."""
        if self._at_tip:
            known = self._at_tip
            for link in reversed(links):
                if (model, link) in known:
                    return self._bindings.get(known[(model, link)])
        return None

    def occupant(self, ref: SlotRef) -> SessionKey | None:
        return self._occupant.get(ref)

    # -- which slot ----------------------------------------------------------------------------------
    def best_slot(self, slots: SlotTable, ask: Ask, now: float) -> SlotRef | None:
        """The free slot for a turn: where its state is, else an empty one, else the one missed least."""
        own = self._bindings.get((ask.session, ask.model)) if ask.session is not None else None
        if own is not None and own.ref is not None and slots.is_free(own.ref):
            return own.ref
        free = list(slots.free_slots(ask.model))
        backend = own.backend if own is not None else ""
        if not backend and ask.parent is not None and (parent := self._bindings.get((ask.parent, ask.model))):
            backend = parent.backend
        if backend:
            free = [ref for ref in free if ref.backend == backend] or free
        proven = self._proven(free, ask.chain.links) if ask.chain is not None else None
        if proven is not None:
            others = [ref for ref in free if ref.backend == proven.backend and ref != proven]
            if proven.backend not in self._ram or not others:
                return proven
            free = others  # the parent stays warm; on its slot the fork would leave it nowhere
        best: SlotRef | None = None
        least = 0.0
        for ref in free:
            if ref not in self._occupant:
                return ref
            missed = self._missed(ref, now)
            if best is None or missed < least:
                best, least = ref, missed
        return best

    def _proven(self, free: list[SlotRef], links: tuple[str, ...]) -> SlotRef | None:
        """The free slot that holds most of the conversation, whosever it was."""
        best: SlotRef | None = None
        most = 0
        for ref in free:
            key = self._occupant.get(ref)
            binding = self._bindings.get(key) if key is not None else None
            if binding is not None and binding.tip and binding.n_tokens > most and binding.tip in links:
                best, most = ref, binding.n_tokens
        return best

    def _missed(self, ref: SlotRef, now: float) -> float:
        """Tokens that would have to be read again if the slot were taken, times the odds that they are."""
        key = self._occupant[ref]
        binding = self._bindings[key]
        half_lives = (now - self._used_at.get(ref, now)) / SESSION_HALF_LIFE_S
        missed: float = max(binding.n_tokens, 1) * 0.5**half_lives
        newest = self._peers.newest(*key)
        if newest is not None and newest.generation > binding.generation:
            return missed * OUTDATED_SHARE
        if newest is not None or ref.backend in self._ram:
            return missed * REPLICATED_SHARE
        return missed

    # -- what happens to it --------------------------------------------------------------------------
    def taken(self, ref: SlotRef, key: SessionKey | None, links: tuple[str, ...] = ()) -> None:
        """A turn with this chain starts in the slot: what was there moves to the engine's RAM cache.

        A slot whose content the turn begins with is built upon, and nothing is moved.
        """
        before = self._occupant.get(ref)
        self._replaced.pop(ref, None)
        if before is not None and before != key:
            held = self._bindings[before]
            if held.tip in links:
                self._forget_slot(ref)
                if key is not None and key not in self._bindings:
                    self._occupant[ref] = key
                    self._store(key, held)
            else:
                self._evict(ref)
                self._replaced[ref] = before
        self._from_ram.pop(ref, None)
        cache = self._ram.get(ref.backend)
        if key is not None and cache is not None and key in cache.entries:
            self._from_ram[ref] = (key, *cache.take(key))
            self._occupant[ref] = key
            self._store(key, replace(self._bindings[key], ref=ref, ram=""))

    def is_from_ram(self, ref: SlotRef, key: SessionKey) -> bool:
        """Is the engine expected to fetch the session from its RAM cache for the turn that starts there?"""
        fetched = self._from_ram.get(ref)
        return fetched is not None and fetched[0] == key

    def replaces(self, ref: SlotRef) -> bool:
        """Is what the slot held before this turn expected in RAM? The engine copies it when a request for
        another prompt starts there, and not when a replica is restored.
        """
        key, cache = self._replaced.get(ref), self._ram.get(ref.backend)
        return key is not None and cache is not None and key in cache.entries

    def ran_here(
        self, key: SessionKey, binding: Binding, now: float = 0.0, cached: int | None = None
    ) -> None:
        """A turn succeeded in a slot of this node, or a replica was restored into it.

        `cached`: prompt tokens the engine had not to read.
        """
        if binding.ref is None:
            raise ValueError("a local binding names its slot")
        known = self._bindings.get(key)
        if known is not None and known.ref is not None and known.ref != binding.ref:
            self._occupant.pop(known.ref, None)
        if known is not None and known.ram and key in self._ram[known.ram].entries:
            self._ram[known.ram].take(key)
        before = self._occupant.get(binding.ref)
        if before is not None and before != key:
            self._evict(binding.ref)
        self._occupant[binding.ref] = key
        self._used_at[binding.ref] = now
        fetched = self._from_ram.pop(binding.ref, None)
        self._store(key, binding)
        if fetched is not None and fetched[0] == key and cached is not None:
            self._fetched(binding.ref.backend, cached >= fetched[1] * MISSED_SHARE, fetched[2])

    def ran_elsewhere(self, key: SessionKey, node: str, generation: int, n_tokens: int = 0) -> None:
        """A turn succeeded on another node; what this node still holds of the session stays usable."""
        known = self._bindings.get(key)
        if known is not None and known.is_here:
            self._store(key, replace(known, node=node))
        else:
            self._store(key, Binding(node, n_tokens=n_tokens, generation=generation))

    def ram_cache(self, backend: str, budget_tokens: int) -> None:
        """How many tokens the engine's RAM cache takes; 0 = it has none."""
        known = self._ram.get(backend)
        if budget_tokens <= 0:
            self._forget_ram(backend)
            self._ram.pop(backend, None)
        elif known is None:
            self._ram[backend] = _RamCache(budget_tokens)
        else:
            known.budget_tokens = budget_tokens
            self._trim(backend)

    def engine_restarted(self, backend: str) -> None:
        """Nothing is held by this backend any more."""
        self._forget_ram(backend)
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
                if binding.is_here:
                    self._bindings[key] = replace(binding, node="")
                else:
                    self._drop(key)

    def next_generation(self, key: SessionKey, wall_ms: int) -> int:
        """A generation newer than any known of this session, and never behind the wall clock."""
        known, newest = self._bindings.get(key), self._peers.newest(*key)
        return max(
            wall_ms,
            known.generation + 1 if known else 0,
            newest.generation + 1
            if newest is not None and newest.generation < wall_ms + KV_CLOCK_SKEW_MS
            else 0,
        )

    # -- inside --------------------------------------------------------------------------------------
    def _evict(self, ref: SlotRef) -> None:
        """Another session takes the slot; the engine keeps a copy of what it replaces, if it has room."""
        key = self._occupant[ref]
        cache, binding = self._ram.get(ref.backend), self._bindings.get(key)
        if cache is None or binding is None or binding.ref != ref or not binding.n_tokens:
            self._forget_slot(ref)
            return
        del self._occupant[ref]
        self._bindings[key] = replace(binding, ref=None, ram=ref.backend)
        self._next += 1
        cache.entries[key] = binding.n_tokens, self._next
        cache.n_tokens += binding.n_tokens
        self.revision += 1
        self._trim(ref.backend)

    def _trim(self, backend: str) -> None:
        cache = self._ram[backend]
        while cache.n_tokens > cache.budget_tokens and cache.entries:
            self._forget_entry(backend, next(iter(cache.entries)))

    def _fetched(self, backend: str, was_there: bool, number: int) -> None:
        """What a turn told of the RAM cache: where one entry was dropped, all older ones are gone too."""
        cache = self._ram.get(backend)
        if cache is None:
            return
        if was_there:
            cache.misses = 0
            return
        cache.misses += 1
        all_of_it = cache.misses >= RAM_MISSES_MAX
        for key in [key for key, (_, other) in cache.entries.items() if all_of_it or other < number]:
            self._forget_entry(backend, key)
        if all_of_it:
            del self._ram[backend]  # it has none, or does not use it for pinned requests

    def _forget_ram(self, backend: str) -> None:
        cache = self._ram.get(backend)
        for key in list(cache.entries) if cache is not None else ():
            self._forget_entry(backend, key)

    def _forget_entry(self, backend: str, key: SessionKey) -> None:
        self._ram[backend].take(key)
        binding = self._bindings.get(key)
        if binding is not None and binding.ram == backend:
            self._drop(key)

    def _forget_slot(self, ref: SlotRef) -> None:
        key = self._occupant.pop(ref)
        binding = self._bindings.get(key)
        if binding is not None and binding.ref == ref:
            self._drop(key)

    def _store(self, key: SessionKey, binding: Binding) -> None:
        known = self._bindings.get(key)
        if known is not None:
            self._unlist(key, known)
        self._bindings[key] = binding
        self._bindings.move_to_end(key)
        if binding.tip and binding.is_here:
            self._at_tip[(key[1], binding.tip)] = key
        self.revision += 1
        while len(self._bindings) > self._limit:
            old_key, old = next(iter(self._bindings.items()))
            self._drop(old_key)
            if old.ref is not None and self._occupant.get(old.ref) == old_key:
                del self._occupant[old.ref]
            if old.ram and old_key in self._ram[old.ram].entries:
                self._ram[old.ram].take(old_key)

    def _drop(self, key: SessionKey) -> None:
        self._unlist(key, self._bindings.pop(key))
        self.revision += 1

    def _unlist(self, key: SessionKey, binding: Binding) -> None:
        if binding.tip and self._at_tip.get((key[1], binding.tip)) == key:
            del self._at_tip[(key[1], binding.tip)]
