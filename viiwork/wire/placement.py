"""What a client or an entry node asks about the place of a request: `?host=`, `?prefer=`, headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl

from viiwork.errors import RequestError
from viiwork.limits import PLACE_NAME_MAX_CHARS, PREFER_MAX, WAIT_MAX_MS

PREFER_HEADER = "X-Viiwork-Prefer"
WAIT_HEADER = "X-Viiwork-Wait-Ms"  # on forwards: how long the request may wait for a slot there
QUEUED_HEADER = "X-Viiwork-Queued-Ms"  # on answers: how long it has waited

_NAME = re.compile(r"[A-Za-z0-9.:_\-\[\]]+", re.ASCII)
_ANY = ("", "mesh")  # "any node"


class Placement(NamedTuple):
    """Where a client wants its request to run."""

    pin: str | None = None  # the only node
    prefer: tuple[str, ...] = ()  # nodes to take first while they have room


ANYWHERE = Placement()


def placement(query: str, prefer_headers: Sequence[str]) -> Placement:
    """Read a raw query (without its `?`) and the values of `X-Viiwork-Prefer`. Raises `RequestError`.

    The parameter `prefer` beats the header, `host` beats both; what is malformed is refused all the same.
    """
    if not query and not prefer_headers:
        return ANYWHERE
    # latin-1: a byte that is no ASCII stays one character, and is then refused by name.
    pairs = parse_qsl(query, keep_blank_values=True, encoding="latin-1", max_num_fields=None)
    hosts = [value.strip() for name, value in pairs if name == "host"]
    preferred = [value for name, value in pairs if name == "prefer"]
    prefer = _names("?prefer=", preferred) if preferred else _names(PREFER_HEADER, prefer_headers)
    if len(hosts) > 1:
        raise RequestError("?host= is given more than once")
    if not hosts or hosts[0] in _ANY:
        return Placement(None, prefer)
    return Placement(_name("?host=", hosts[0]))


def wait_ms(value: str) -> int:
    """How long a forward may wait, from its header; 0 for anything that is no plain number."""
    value = value.strip()
    return min(int(value), WAIT_MAX_MS) if value.isascii() and value.isdigit() and len(value) < 16 else 0


def _names(where: str, lists: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for one in lists for name in one.split(",")]
    wanted = tuple(dict.fromkeys(_name(where, name) for name in names if name not in _ANY))
    if len(wanted) > PREFER_MAX:
        raise RequestError(f"{where} names {len(wanted)} hosts; {PREFER_MAX} are the most")
    return wanted


def _name(where: str, name: str) -> str:
    if len(name) > PLACE_NAME_MAX_CHARS:
        raise RequestError(f"{where} holds a name longer than {PLACE_NAME_MAX_CHARS} characters")
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"{where} expects names of nodes (letters, digits and . : _ - [ ]), got {name[:40]!r}"
        )
    return name
