"""Checks that several sections share; each raises `Fault` with the key's path."""

from __future__ import annotations

import re

from viiwork.config.fault import Fault, shown
from viiwork.config.scalars import format_duration
from viiwork.limits import INTERVAL_MIN_S

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def between(path: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise Fault(path, f"a whole number from {least} to {most}", str(value))


def at_most(path: str, n: int, most: int, of: str) -> None:
    if n > most:
        raise Fault(path, f"at most {most} {of}", str(n))


def port(path: str, value: int) -> None:
    between(path, value, 1, 65535)


def longer_than_zero(path: str, duration: float) -> None:
    if duration <= 0:
        raise Fault(path, "a duration longer than 0", format_duration(duration))


def interval(path: str, duration: float) -> None:
    """A duration for work that repeats; far too short a one would spin."""
    if duration < INTERVAL_MIN_S:
        raise Fault(path, f"at least {format_duration(INTERVAL_MIN_S)}", format_duration(duration))


def name(path: str, text: str, most_bytes: int) -> None:
    """No whitespace and nothing invisible: the name stands in tables, headers and logs."""
    if any(c.isspace() for c in text):
        raise Fault(path, "a name without whitespace", shown(text))
    if not text.isprintable():
        raise Fault(path, "a name of visible characters", shown(text))
    at_most(path, len(text.encode()), most_bytes, "bytes")


def absolute_path(path: str, text: str) -> None:
    if not text.strip():
        raise Fault(path, "an absolute path", "an empty text")
    if not text.startswith("/"):
        hint = " (~ is not expanded)" if text.startswith("~") else ""
        raise Fault(path, "an absolute path", shown(text) + hint)
    if not text.isprintable():
        raise Fault(path, "a path of visible characters", shown(text))


def is_env_name(text: str) -> bool:
    return _ENV_NAME.fullmatch(text) is not None
