"""YAML bytes to a bounded tree of nodes that keep their line; no scalar is given a type here.

YAML 1.1 would read `no`, `010`, `12:30:00` or `3.10` as something else than what is written, so every scalar
stays the text it is and `convert` reads it by the type its key has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from viiwork.config.fault import Fault, joined, printable, shown
from viiwork.limits import CONFIG_FILE_MAX_BYTES, CONFIG_MAX_DEPTH, CONFIG_MAX_NODES

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_UNICODE_MARKS = (b"\xff\xfe", b"\xfe\xff")
# What YAML calls printable, as far as it can follow from UTF-8.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Scalar:
    text: str
    line: int
    plain: bool  # written without quotes

    @property
    def is_nothing(self) -> bool:
        """True for an empty value, `~` and `null`."""
        return self.plain and self.text in _NULLS


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping with its value."""

    key: str
    line: int
    value: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    entries: tuple[Entry, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    line: int


Node = Scalar | Mapping | Sequence


def parse_document(data: bytes) -> Mapping:
    """The one mapping a config file holds; raises `Fault`, whatever the bytes are."""
    if len(data) > CONFIG_FILE_MAX_BYTES:
        raise Fault("", f"at most {CONFIG_FILE_MAX_BYTES} bytes", "a larger file", line=1)
    text = _decode(data)
    try:
        return _Builder(yaml.parse(text, Loader=yaml.CSafeLoader)).document()
    except yaml.MarkedYAMLError as error:
        raise _syntax_fault(error, text) from None
    except yaml.YAMLError as error:
        raise Fault("", "valid YAML", f"an error: {printable(str(error).splitlines()[0])}", line=1) from None


def _decode(data: bytes) -> str:
    if data.startswith(_UNICODE_MARKS):
        raise Fault("", "UTF-8 text", "UTF-16 text", line=1)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"the byte 0x{data[error.start]:02x}"
        raise Fault("", "UTF-8 text", f"{byte} (Latin-1 or a binary file?)", line=line) from None
    if bad := _UNPRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise Fault("", "printable text", f"the character U+{ord(bad.group()):04X}", line=line)
    return text


def _syntax_fault(error: yaml.MarkedYAMLError, text: str) -> Fault:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.split("\n")
    written = lines[line - 1] if line <= len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return Fault("", "spaces for indentation", "a tab", line=line)
    problem = " ".join(filter(None, (error.problem, error.context)))
    return Fault("", "valid YAML", f"an error: {printable(problem)}", line=line)


class _Builder:
    """Builds the tree from parser events and counts what it would be with every alias written out."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._anchors: dict[str, tuple[Node, int, int] | None] = {}  # node, size, levels; None = being read
        self._n_nodes = 0

    def document(self) -> Mapping:
        next(self._events)  # stream start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise Fault("", "a mapping of sections", "an empty file", line=1)
        root, _ = self._node(next(self._events), "", 0)
        next(self._events)  # document end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise Fault("", "one document", "a second one", line=_line(after))
        if isinstance(root, Scalar) and root.is_nothing:
            raise Fault("", "a mapping of sections", "an empty document", line=root.line)
        if not isinstance(root, Mapping):
            raise Fault("", "a mapping of sections", kind_of(root), line=root.line)
        return root

    def _node(self, event: Any, path: str, depth: int) -> tuple[Node, int]:
        """The node that starts with `event`, and the levels below it."""
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), path, line, depth)
        if event.tag is not None:
            raise Fault(path, "plain YAML without tags", f"the tag {shown(event.tag)}", line=line)
        if depth >= CONFIG_MAX_DEPTH:
            raise self._too_deep(line)
        before, anchor = self._n_nodes, event.anchor
        self._count(1, line)
        if anchor is not None:
            self._anchors[anchor] = None
        node: Node
        levels = 0
        if isinstance(event, yaml.ScalarEvent):
            node = Scalar(event.value, line, plain=event.style in (None, ""))
        elif isinstance(event, yaml.SequenceStartEvent):
            node, levels = self._sequence(path, line, depth)
        else:
            node, levels = self._mapping(path, line, depth)
        if anchor is not None:
            self._anchors[anchor] = (node, self._n_nodes - before, levels)
        return node, levels

    def _sequence(self, path: str, line: int, depth: int) -> tuple[Sequence, int]:
        items: list[Node] = []
        levels = 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            item, below = self._node(event, f"{path}[{len(items)}]", depth + 1)
            items.append(item)
            levels = max(levels, below + 1)
        return Sequence(tuple(items), line), levels

    def _mapping(self, path: str, line: int, depth: int) -> tuple[Mapping, int]:
        entries: dict[str, Entry] = {}
        levels = 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key, _ = self._node(event, path, depth + 1)
            if not isinstance(key, Scalar):
                raise Fault(path, "a word as key", kind_of(key), line=key.line)
            if key.is_nothing:
                raise Fault(
                    path, "a word as key", f"{kind_of(key)} (quote it if it is a name)", line=key.line
                )
            here = joined(path, key.text)
            if key.plain and key.text == "<<":
                raise Fault(here, "plain keys", "a merge key, which is not supported", line=key.line)
            if first := entries.get(key.text):
                raise Fault(here, "each key once", f"it again (first on line {first.line})", line=key.line)
            value, below = self._node(next(self._events), here, depth + 1)
            entries[key.text] = Entry(key.text, key.line, value)
            levels = max(levels, below + 1)
        return Mapping(tuple(entries.values()), line), levels

    def _alias(self, anchor: str, path: str, line: int, depth: int) -> tuple[Node, int]:
        target = self._anchors.get(anchor)
        if target is None:  # unknown, or an alias inside the node that defines it
            raise Fault(path, "an anchor defined above", f"the alias *{shown(anchor)}", line=line)
        node, n_nodes, levels = target
        if depth + levels >= CONFIG_MAX_DEPTH:
            raise self._too_deep(line)
        self._count(n_nodes, line)
        return node, levels

    def _too_deep(self, line: int) -> Fault:
        return Fault("", f"at most {CONFIG_MAX_DEPTH} levels", "deeper nesting", line=line)

    def _count(self, n: int, line: int) -> None:
        self._n_nodes += n
        if self._n_nodes > CONFIG_MAX_NODES:
            raise Fault("", f"at most {CONFIG_MAX_NODES} values, aliases written out", "more", line=line)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def kind_of(node: Node) -> str:
    """A node in words, for `got ...`."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    if node.is_nothing:
        return "nothing" if node.text == "" else node.text
    return shown(node.text) if node.plain else f"the quoted text {shown(node.text)}"
