"""Mesh-wide names for models: the table, how two tables become one, what may be written, what a name means.

An alias is remembered as the set of its settings. Two sets are merged by union, so it does not matter in
which order, how often or by which way nodes hear of each other's writes: they end up with the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from viiwork.errors import AliasConflict, UnknownAlias
from viiwork.limits import (
    ALIAS_CLOCK_SKEW_MS,
    ALIAS_NAME_MAX_CHARS,
    ALIAS_NAMES_MAX,
    ALIAS_SETTING_MAX_BYTES,
    ALIAS_SETTINGS_MAX,
    ALIAS_TOMBSTONE_KEPT_MS,
    ALIAS_VER_MAX,
    ALIASES_MAX,
    MODEL_NAME_MAX_BYTES,
)

State = Literal["ok", "fallback", "unavailable", "shadowed"]
Asks = Callable[[str], bool]

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{ALIAS_NAME_MAX_CHARS}}}", re.ASCII)


class Write(NamedTuple):
    """One setting of an alias, or its removal. The larger of two writes is the one that counts."""

    ver: int
    ts_ms: int  # wall clock of the node that took it
    by: str  # its name
    target: str = ""  # "" = the alias was removed
    fallbacks: tuple[str, ...] = ()

    @property
    def deleted(self) -> bool:
        return not self.target


@dataclass(frozen=True, slots=True)
class Entry:
    """One alias: the write that counts, and the settings before it, newest first."""

    current: Write
    history: tuple[Write, ...] = ()

    @property
    def deleted(self) -> bool:
        return self.current.deleted

    @property
    def writes(self) -> tuple[Write, ...]:
        return (self.current, *self.history)


Entries = Mapping[str, Entry]  # by name; never changed in place
NOTHING: Entries = {}


class Resolution(NamedTuple):
    """What an alias stands for now: `model` is None when nobody serves it, or when a model has its name."""

    model: str | None
    state: State


# -- merging ---------------------------------------------------------------------------------------
def entry_of(writes: Iterable[Write]) -> Entry:
    """The alias that at least one write makes, in whatever order they come.

    Of equal settings the newest is kept, of different ones the newest ALIAS_SETTINGS_MAX, and of removals
    the newest while nothing newer was set. What is dropped could never come back by hearing more.
    """
    newest: dict[tuple[str, tuple[str, ...]], Write] = {}
    for write in writes:
        what = (write.target, write.fallbacks)
        newest[what] = max(write, newest.get(what, write))
    settings = sorted((w for w in newest.values() if not w.deleted), reverse=True)[:ALIAS_SETTINGS_MAX]
    removals = [w for w in newest.values() if w.deleted and (not settings or w > settings[0])]
    current, *history = [*removals, *settings]
    return Entry(current, tuple(history))


def merged(ours: Entries, theirs: Entries) -> Entries:
    """Both tables as one: commutative, associative and idempotent. `ours` itself when that holds all."""
    changed: dict[str, Entry] = {}
    for name, entry in theirs.items():
        known = ours.get(name)
        if known is None:
            changed[name] = entry
        elif known != entry and (both := entry_of((*known.writes, *entry.writes))) != known:
            changed[name] = both
    return {**ours, **changed} if changed else ours


def conflicts(ours: Entries, theirs: Entries) -> Iterator[tuple[str, Write, Write]]:
    """Aliases that two nodes wrote without knowing of each other: name, the write that counts, the other.

    Only those that `ours` has not seen, so a conflict that is settled is not told again.
    """
    for name, entry in theirs.items():
        known = ours.get(name)
        if known is None or known.current.ver != entry.current.ver or known.current == entry.current:
            continue
        if entry.current not in known.history:
            yield name, max(known.current, entry.current), min(known.current, entry.current)


def believable(theirs: Entries, ours: Entries, now_ms: int) -> Entries:
    """What may be merged of a member's table.

    Left out are removals too old to be kept, writes from a future that would keep every later one out, and
    new names beyond what a table may hold.
    """
    room = ALIAS_NAMES_MAX - len(ours)
    taken: dict[str, Entry] = {}
    for name, entry in theirs.items():
        writes = [w for w in entry.writes if w.ts_ms <= now_ms + ALIAS_CLOCK_SKEW_MS]
        if not writes or is_expired(entry := entry_of(writes), now_ms):
            continue
        if name not in ours:
            if room <= 0:
                continue
            room -= 1
        taken[name] = entry
    return taken


def is_expired(entry: Entry, now_ms: int) -> bool:
    """A removal that every node has heard of by now."""
    return entry.deleted and now_ms - entry.current.ts_ms > ALIAS_TOMBSTONE_KEPT_MS


def purged(table: Entries, now_ms: int) -> Entries:
    """The table without expired removals; `table` itself when there are none."""
    kept = {name: entry for name, entry in table.items() if not is_expired(entry, now_ms)}
    return kept if len(kept) < len(table) else table


# -- writing ---------------------------------------------------------------------------------------
def with_set(
    table: Entries,
    name: str,
    target: str,
    fallbacks: Sequence[str],
    *,
    known: Asks,
    force: bool,
    now_ms: int,
    by: str,
) -> Entries:
    """The table with an alias made or changed; `known` says which names are models of the mesh.

    Raises `AliasConflict` for a write that makes no sense. `force` allows models nobody serves yet.
    """
    if problem := alias_name_problem(name):
        raise AliasConflict(f"an alias name {problem}")
    if known(name):
        raise AliasConflict(f"{name!r} is a model of the mesh; an alias needs another name")
    if not target:
        raise AliasConflict(f"the alias {name!r} needs a target: the name of a model")
    for i, model in enumerate((target, *fallbacks)):
        role = f"the fallback {model[:64]!r}" if i else f"the target {model[:64]!r}"
        if problem := model_name_problem(model):
            raise AliasConflict(f"{role} cannot be a model: the name {problem}")
        if known(model):
            continue
        if is_live(table, model) or model == name:
            raise AliasConflict(f"{role} is itself an alias; name the model")
        if not force:
            raise AliasConflict(f"no node serves {role}; with force it is written all the same")
    repeated = next((m for i, m in enumerate(fallbacks) if m == target or m in fallbacks[:i]), None)
    if repeated is not None:
        raise AliasConflict(f"the fallback {repeated[:64]!r} is named twice")
    if setting_bytes(target, fallbacks) > ALIAS_SETTING_MAX_BYTES:
        raise AliasConflict(f"the models of {name!r} take more than {ALIAS_SETTING_MAX_BYTES} bytes together")
    return _written(table, name, target, tuple(fallbacks), now_ms, by)


def with_removed(table: Entries, name: str, *, now_ms: int, by: str) -> Entries:
    """The table with an alias removed. Raises `UnknownAlias`."""
    if not is_live(table, name):
        raise UnknownAlias(f"there is no alias {name[:64]!r}")
    return _written(table, name, "", (), now_ms, by)


def with_reverted(table: Entries, name: str, *, now_ms: int, by: str) -> Entries:
    """The table with an alias set to what it was before; a second time undoes the first.

    Raises `UnknownAlias`, or `AliasConflict` when nothing was before.
    """
    entry = table.get(name)
    if entry is None:
        raise UnknownAlias(f"there is no alias {name[:64]!r}")
    if not entry.history:
        raise AliasConflict(f"the alias {name!r} was never set to anything else")
    before = entry.history[0]
    return _written(table, name, before.target, before.fallbacks, now_ms, by)


def _written(
    table: Entries, name: str, target: str, fallbacks: tuple[str, ...], now_ms: int, by: str
) -> Entries:
    if target and not is_live(table, name):
        if sum(not entry.deleted for entry in table.values()) >= ALIASES_MAX:
            raise AliasConflict(f"the mesh has {ALIASES_MAX} aliases already; remove one first")
        if name not in table and len(table) >= ALIAS_NAMES_MAX:
            raise AliasConflict(
                f"{ALIAS_NAMES_MAX} names are in use or were removed within the last 30 days; "
                "take one of the removed ones"
            )
    entry = table.get(name)
    if entry is None:
        write = Write(1, now_ms, by, target, fallbacks)
        return {**table, name: Entry(write)}
    last = entry.current
    # At the highest version, which a member may claim, the time decides: no alias can be frozen.
    ver = min(last.ver + 1, ALIAS_VER_MAX)
    ts_ms = now_ms if ver > last.ver else max(now_ms, last.ts_ms + 1)
    write = Write(ver, ts_ms, by, target, fallbacks)
    return {**table, name: entry_of((write, *entry.writes))}


# -- reading ---------------------------------------------------------------------------------------
def is_live(table: Entries, name: str) -> bool:
    entry = table.get(name)
    return entry is not None and not entry.deleted


def live(table: Entries) -> Iterator[tuple[str, Entry]]:
    """The aliases that are not removed, by name."""
    return ((name, entry) for name, entry in sorted(table.items()) if not entry.deleted)


def resolve(entry: Entry, name: str, *, known: Asks, served: Asks) -> Resolution:
    """What the live alias `name` stands for now.

    A model of that name wins. Then the target while anybody serves it, however full, then the first fallback
    that is served. What it stands for is a model, never another alias.
    """
    if known(name):
        return Resolution(None, "shadowed")
    setting = entry.current
    if served(setting.target):
        return Resolution(setting.target, "ok")
    for model in setting.fallbacks:
        if served(model):
            return Resolution(model, "fallback")
    return Resolution(None, "unavailable")


# -- names -----------------------------------------------------------------------------------------
def alias_name_problem(name: str) -> str | None:
    """Why `name` cannot be an alias, None if it can."""
    if _NAME.fullmatch(name):
        return None
    return f"has 1 to {ALIAS_NAME_MAX_CHARS} of the characters a-z, A-Z, 0-9 and . _ -"


def model_name_problem(name: str) -> str | None:
    """Why no model can have this name, None if one can."""
    if not name:
        return "is empty"
    if any(c.isspace() for c in name) or not name.isprintable():
        return "has characters that are not visible"
    if len(name.encode()) > MODEL_NAME_MAX_BYTES:
        return f"is longer than {MODEL_NAME_MAX_BYTES} bytes"
    return None


def setting_bytes(target: str, fallbacks: Sequence[str]) -> int:
    """What the models of one setting take as JSON strings."""
    return sum(len(m.encode()) + m.count('"') + m.count("\\") + len('"",') for m in (target, *fallbacks))
