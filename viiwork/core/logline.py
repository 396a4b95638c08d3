"""The form of log lines: `noun.verb key=value ...`, in which no value can pass for another field."""

from __future__ import annotations

import errno
import json
import os
import re

from viiwork.limits import LOG_VALUE_MAX_CHARS

_NO_WAY = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH))
_PLAIN = re.compile(r'[^\s"=\x00-\x1f\x7f]+')
_LINE = re.compile(r"([a-z_]+\.[a-z_]+)(?: |$)")
_FIELD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"=]*)(?: |$)')

Value = str | int | float | None


def line(event: str, **fields: Value) -> str:
    """One log line; fields that are None are not known and left out."""
    return " ".join((event, *(f"{key}={_text(value)}" for key, value in fields.items() if value is not None)))


def fault(error: BaseException) -> str:
    """What went wrong; of a failed connection where to and the system's words, not a library's."""
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    if not number or not (isinstance(cause, ConnectionError) or number in _NO_WAY):
        return str(error) or type(error).__name__
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    return (f"{host}:{port}: " if host and port else "") + os.strerror(number)


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
