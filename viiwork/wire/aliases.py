"""The alias table as JSON: the state file, the messages between members, the bodies of the API.

A message is a table too, with some of the entries. Whatever a member sends is checked here: what decodes can
be merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from blake3 import blake3
from msgspec import Meta

from viiwork.core.aliases import (
    Entries,
    Entry,
    Write,
    alias_name_problem,
    entry_of,
    model_name_problem,
    setting_bytes,
)
from viiwork.core.names import node_name_problem
from viiwork.errors import BadAliases, RequestError
from viiwork.limits import (
    ALIAS_MESSAGE_MAX_BYTES,
    ALIAS_NAMES_MAX,
    ALIAS_SETTING_MAX_BYTES,
    ALIAS_SETTINGS_MAX,
    ALIAS_VER_MAX,
)

MESSAGE_KIND = b"\x02"  # first byte of a message between members
_VERSION = 1

_Whole = Annotated[int, Meta(ge=0, le=ALIAS_VER_MAX)]


class _Setting(msgspec.Struct, frozen=True):
    target: str
    fallbacks: list[str]
    ts: _Whole  # ms
    by: str
    ver: _Whole = 0


class _Entry(msgspec.Struct, frozen=True):
    target: str
    fallbacks: list[str]
    ver: _Whole
    ts: _Whole  # ms
    by: str
    deleted: bool = False
    history: Annotated[list[_Setting], Meta(max_length=ALIAS_SETTINGS_MAX)] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class _Table(msgspec.Struct, frozen=True):
    v: int
    aliases: Annotated[dict[str, _Entry], Meta(max_length=ALIAS_NAMES_MAX)]


class _Versioned(msgspec.Struct, frozen=True):
    v: int


class Put(msgspec.Struct, frozen=True):
    """Body of a PUT."""

    target: str = ""
    fallbacks: list[str] = []
    force: bool = False


_TABLE = msgspec.json.Decoder(_Table, strict=True)
_PUT = msgspec.json.Decoder(Put, strict=True)


# -- tables ----------------------------------------------------------------------------------------
def encode_table(table: Entries) -> bytes:
    """The whole table, names in order: equal tables are equal bytes."""
    return msgspec.json.encode(_Table(_VERSION, {name: _wire(table[name]) for name in sorted(table)}))


def decode_table(data: bytes) -> Entries:
    """A table from a file or a member. Raises `BadAliases` with what is wrong, in one line."""
    try:
        version = msgspec.json.decode(data, type=_Versioned, strict=True).v
        if version != _VERSION:
            raise BadAliases(f"it is of version {version}, and this viiwork knows version {_VERSION}")
        raw = _TABLE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAliases(f"it is no alias table: {error}") from error
    return {name: _entry(name, entry) for name, entry in raw.aliases.items()}


def digest(table: Entries) -> str:
    """Short name of a table's content: nodes with the same one agree."""
    return blake3(encode_table(table)).hexdigest(length=16)


def written(name: str, entry: Entry) -> dict[str, Any]:
    """What a write answers and tells the members: the alias without its history."""
    return {"name": name, "entry": msgspec.to_builtins(_wire(Entry(entry.current)))}


# -- messages --------------------------------------------------------------------------------------
def encode_write(name: str, entry: Entry) -> bytes:
    """The message that tells members of one write."""
    return MESSAGE_KIND + encode_table({name: Entry(entry.current)})


def encode_pieces(table: Entries) -> Iterator[bytes]:
    """The whole table as messages of at most ALIAS_MESSAGE_MAX_BYTES."""
    piece: dict[str, Entry] = {}
    n_bytes = 0
    for name in sorted(table):
        entry = table[name]
        # More than its part of the piece: each write is counted with an envelope of its own.
        more = sum(len(encode_table({name: Entry(write)})) for write in entry.writes)
        if piece and n_bytes + more > ALIAS_MESSAGE_MAX_BYTES:
            yield MESSAGE_KIND + encode_table(piece)
            piece, n_bytes = {}, 0
        piece[name] = entry
        n_bytes += more
    if piece:
        yield MESSAGE_KIND + encode_table(piece)


def decode_message(data: bytes) -> Entries:
    """What a member tells. Raises `BadAliases`."""
    return decode_table(data[len(MESSAGE_KIND) :])


# -- the API ---------------------------------------------------------------------------------------
def decode_put(body: bytes) -> Put:
    """Body of a PUT. Raises `RequestError`."""
    try:
        return _PUT.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f'expected {{"target": "<model>", "fallbacks": ["<model>"], "force": false}}: {error}'
        ) from None


def rfc3339(ts_ms: int) -> str:
    """The moment in UTC to the millisecond; the last one that can be written for what lies beyond it."""
    try:
        moment = datetime.fromtimestamp(ts_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return "9999-12-31T23:59:59.999Z"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- values ----------------------------------------------------------------------------------------
def _wire(entry: Entry) -> _Entry:
    current = entry.current
    history = [_Setting(w.target, list(w.fallbacks), w.ts_ms, w.by, w.ver) for w in entry.history]
    return _Entry(
        current.target,
        list(current.fallbacks),
        current.ver,
        current.ts_ms,
        current.by,
        current.deleted,
        history or msgspec.UNSET,
    )


def _entry(name: str, raw: _Entry) -> Entry:
    if alias_name_problem(name):
        raise BadAliases(f"it holds the alias name {name[:64]!r}")
    if raw.deleted:
        writes = [Write(raw.ver, raw.ts, raw.by)]
    else:
        writes = [Write(raw.ver, raw.ts, raw.by, raw.target, tuple(raw.fallbacks))]
        if not raw.target:
            raise BadAliases(f"the alias {name!r} has no target")
    for old in raw.history or ():
        if not old.target:
            raise BadAliases(f"the history of {name!r} holds a setting without a target")
        writes.append(Write(old.ver, old.ts, old.by, old.target, tuple(old.fallbacks)))
    for write in writes:
        _check(name, write)
    return entry_of(writes)


def _check(name: str, write: Write) -> None:
    if node_name_problem(write.by):
        raise BadAliases(f"the alias {name!r} was written by {write.by[:64]!r}, which is no node's name")
    models = () if write.deleted else (write.target, *write.fallbacks)
    for model in models:
        if problem := model_name_problem(model):
            raise BadAliases(f"the alias {name!r} names a model whose name {problem}")
    if len(set(models)) != len(models):
        raise BadAliases(f"the alias {name!r} names a model twice")
    if models and setting_bytes(models[0], models[1:]) > ALIAS_SETTING_MAX_BYTES:
        raise BadAliases(f"the models of the alias {name!r} take more than {ALIAS_SETTING_MAX_BYTES} bytes")
