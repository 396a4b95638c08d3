"""Rendezvous order: which of several places a key prefers, the same on every node."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from viiwork.limits import MEMBERS_MAX

_M64 = (1 << 64) - 1


@lru_cache(maxsize=2 * MEMBERS_MAX)
def session_number(session: str) -> int:
    """FNV-1a 64 of a session key."""
    return _fnv1a(session)


def score(number: int, name: str) -> int:
    """Weight of `name` for a session number; the highest wins.

    FNV-1a 64 of the name, XORed with the number, through the splitmix64 finaliser.
    """
    x = _name_number(name) ^ number
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def rendezvous(session: str, names: Iterable[str]) -> list[str]:
    """Names by falling weight for this session: a name that leaves moves only its own sessions."""
    number = session_number(session)
    return sorted(names, key=lambda name: (score(number, name), name), reverse=True)


@lru_cache(maxsize=2 * MEMBERS_MAX)  # the same few names for every session
def _name_number(name: str) -> int:
    return _fnv1a(name)


def _fnv1a(text: str) -> int:
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = ((h ^ byte) * 0x100000001B3) & _M64
    return h
