"""The form of log lines: `noun.verb key=value ...`, in which no value can pass for another field."""

from __future__ import annotations

import json
import re

from viiwork.limits import LOG_VALUE_MAX_CHARS

_PLAIN = re.compile(r'[^\s"=\x00-\x1f\x7f]+')
_LINE = re.compile(r"([a-z_]+\.[a-z_]+)(?: |$)")
_FIELD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"=]*)(?: |$)')

Value = str | int | float | None


def line(event: str, **fields: Value) -> str:
    """One log line; fields that are None are not known and left out."""
    return " ".join((event, *(f"{key}={_text(value)}" for key, value in fields.items() if value is not None)))


def parse(text: str) -> tuple[str, dict[str, str], str]:
    """Event, fields and the free text behind them; a line of another form is all free text."""
    found = _LINE.match(text)
    if found is None:
        return "", {}, text
    at, fields = found.end(), {}
    while (field := _FIELD.match(text, at)) is not None:
        value = field[2]
        fields[field[1]] = _unquoted(value) if value.startswith('"') else value
        at = field.end()
    return found[1], fields, text[at:]


def _text(value: Value) -> str:
    if type(value) is not str:
        return str(value)
    if len(value) > LOG_VALUE_MAX_CHARS:
        value = value[: LOG_VALUE_MAX_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return value if _PLAIN.fullmatch(value) and value.isprintable() else json.dumps(value)


def _unquoted(value: str) -> str:
    try:
        return str(json.loads(value))
    except ValueError:
        return value
