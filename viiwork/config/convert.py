"""The tree of a config file to the typed structs, each scalar read by the type its key has."""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from viiwork.config import scalars
from viiwork.config.document import Mapping, Node, Scalar, Sequence, kind_of
from viiwork.config.fault import Fault, joined, shown
from viiwork.config.model import Bytes, Config, Seconds, Section, Tri

V1_SECTIONS = ("server", "model", "gpus", "backend", "balancer", "peers")

_S = TypeVar("_S", bound=Section)


@dataclass(slots=True)
class Converted:
    config: Config
    lines: dict[str, int] = field(default_factory=dict)  # key path -> line

    def line_of(self, path: str) -> int:
        """The line of the key at `path`, or of the nearest key around it."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.lines.get(path, 1)


def convert(document: Mapping) -> Converted:
    """The config in `document` with the defaults filled in; raises `Fault` at the first wrong key."""
    _refuse_v1(document)
    lines = {"": document.line}
    return Converted(_section(document, Config, "", lines), lines)


def _refuse_v1(document: Mapping) -> None:
    keys = {entry.key: entry.line for entry in document.entries}
    for name in V1_SECTIONS:
        if name in keys:
            got = "a viiwork 1.x file, whose keys mean other things; write it anew"
            raise Fault(name, "a config of this version", got, line=keys[name])


def _section(node: Mapping, cls: type[_S], path: str, lines: dict[str, int]) -> _S:
    fields = {f.encode_name: f for f in msgspec.structs.fields(cls)}
    values: dict[str, Any] = {}
    for entry in node.entries:
        here = joined(path, entry.key)
        if entry.key not in fields:
            raise Fault(here, "a known key", _unknown(entry.key, list(fields)), line=entry.line)
        lines[here] = entry.line
        values[entry.key] = _value(entry.value, fields[entry.key].type, here, entry.line, lines)
    for name, known in fields.items():
        if known.required and name not in values:
            raise Fault(joined(path, name), f"{_in_words(known.type)} (required)", "nothing", line=node.line)
    return cls(**values)


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1) if len(key) <= 64 else []
    if close:
        return f"{shown(key)} (did you mean {close[0]}?)"
    return f"{shown(key)} (known: {', '.join(known)})"


def _value(node: Node, kind: Any, path: str, line: int, lines: dict[str, int]) -> Any:
    """`node` as a value of `kind`; `line` is the key's."""
    origin, args = get_origin(kind), get_args(kind)
    nothing = isinstance(node, Scalar) and node.is_nothing
    if origin in (types.UnionType, typing.Union):
        if nothing and types.NoneType in args:
            return None
        return _either(node, [arm for arm in args if arm is not types.NoneType], path, line, lines)
    if isinstance(kind, type) and issubclass(kind, Section):
        if nothing:  # a section whose keys are all commented out
            node = Mapping((), node.line)
        if not isinstance(node, Mapping):
            raise Fault(path, "a mapping", kind_of(node), line=node.line)
        return _section(node, kind, path, lines)
    if origin is tuple:
        if nothing:
            return ()
        if not isinstance(node, Sequence):
            raise Fault(path, "a list", kind_of(node), line=node.line)
        return tuple(_item(item, args[0], f"{path}[{i}]", lines) for i, item in enumerate(node.items))
    if origin is dict:
        return _text_map(node, path, lines)
    if not isinstance(node, Scalar):
        raise Fault(path, _in_words(kind), kind_of(node), line=node.line)
    return _scalar(node, kind, path, line)


def _either(node: Node, arms: list[Any], path: str, line: int, lines: dict[str, int]) -> Any:
    """`node` as the list or the single value that a key takes either of."""
    listed = not isinstance(node, Scalar)
    arm = next((arm for arm in arms if (get_origin(arm) is tuple) == listed), arms[0])
    try:
        return _value(node, arm, path, line, lines)
    except Fault as fault:
        if len(arms) == 1 or fault.path != path:
            raise
        raise Fault(path, " or ".join(map(_in_words, arms)), fault.got, line=fault.line) from None


def _item(node: Node, kind: Any, path: str, lines: dict[str, int]) -> Any:
    lines[path] = node.line
    if isinstance(node, Scalar) and node.is_nothing:
        raise Fault(path, _in_words(kind), kind_of(node) + _null_hint(kind), line=node.line)
    return _value(node, kind, path, node.line, lines)


def _text_map(node: Node, path: str, lines: dict[str, int]) -> dict[str, str]:
    if isinstance(node, Scalar) and node.is_nothing:
        return {}
    if not isinstance(node, Mapping):
        raise Fault(path, "a mapping", kind_of(node), line=node.line)
    values = {}
    for entry in node.entries:
        here = joined(path, entry.key)
        lines[here] = entry.line
        values[entry.key] = _value(entry.value, str, here, entry.line, lines)
    return values


def _scalar(node: Scalar, kind: Any, path: str, line: int) -> Any:
    if node.is_nothing:
        raise Fault(path, _in_words(kind), kind_of(node) + _null_hint(kind), line=line)
    try:
        if kind is str:
            return node.text
        if get_origin(kind) is Literal:
            if node.text not in get_args(kind):
                raise scalars.NotThat
            return node.text
        if kind is Tri:
            return scalars.parse_tri(node.text)
        if kind is Seconds:
            return scalars.parse_duration(node.text)
        if kind is Bytes:
            return scalars.parse_size(node.text)
        if not node.plain:  # numbers and booleans lose their meaning in quotes
            raise scalars.NotThat
        if kind is bool:
            return _boolean(node.text)
        return scalars.parse_integer(node.text) if kind is int else scalars.parse_decimal(node.text)
    except scalars.NotThat as error:
        hint = f" ({error})" if str(error) else ""
        raise Fault(path, _in_words(kind), kind_of(node) + hint, line=line) from None


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise scalars.NotThat
    return text == "true"


def _null_hint(kind: Any) -> str:
    return ' (quote it to mean the text, "" for an empty one)' if kind is str else " (leave it out)"


def _in_words(kind: Any) -> str:
    """What a value of `kind` is, for `expected ...`."""
    if get_origin(kind) is Literal:
        *first, last = get_args(kind)
        return f"{', '.join(first)} or {last}" if first else str(last)
    if get_origin(kind) in (types.UnionType, typing.Union):
        return _in_words(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, Section):
        return "a mapping"
    words = {
        str: "text",
        bool: "true or false",
        int: "a whole number in plain digits",
        float: "a decimal number",
        Tri: "auto, on or off",
        Seconds: "a duration such as 250ms, 60s or 1m30s",
        Bytes: "a size such as 512MiB or 8GiB",
    }
    return words.get(kind, "a list")
