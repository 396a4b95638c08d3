"""How many requests a program may have under way in the mesh: decided from answers and failures, no I/O.

The number the program was configured with is the floor, and what counts when the mesh gives none. What the
mesh has beyond it is taken at once, and given back slowly, so that running requests can end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta

from viiwork.limits import (
    FLEET_BODY_MAX_BYTES,
    FLEET_DAMPING,
    FLEET_HOSTS_MAX,
    FLEET_POLL_S,
    FLEET_SHRINK,
    FLEET_SLOTS_MAX,
)

# No number came: the configured one counts.
Failure = Literal[
    "unreachable",  # no whole answer in time
    "server_error",  # 5xx
    "not_found",  # 404: a node too old to know, or something else at the address
    "refused",  # any other status but 200
    "bad_answer",  # not what a node answers
    "model_absent",  # no node serves it, or the alias stands for nothing served
    "all_stale",  # nodes serve it, and how many slots they have is unknown: not zero
]
Reason = Literal[
    "not_asked",  # yet: the configured number
    "fleet",  # what the mesh has
    "held",  # a change too small to follow
    "shrinking",  # on the way down to what the mesh has
    "below_configured",  # the mesh has less than the floor
    Failure,
]

_API = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}", re.ASCII)


class Host(msgspec.Struct, frozen=True):
    """One node that serves the model; no slots = stale, which means unknown."""

    api: str = ""  # "ip:port", "" for the node that was asked
    slots: Annotated[int, Meta(ge=0, le=FLEET_SLOTS_MAX)] | None = None


class _Model(msgspec.Struct, frozen=True):
    name: str
    hosts: Annotated[list[Host], Meta(max_length=FLEET_HOSTS_MAX)]


class _Answer(msgspec.Struct, frozen=True):
    models: list[_Model]
    resolved_from: str | None = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class View:
    """What a program may use, and why so many."""

    slots: int
    reason: Reason
    urls: Mapping[str, int]  # slots of each node's API
    asked_at: float | None = None

    def is_due(self, now: float) -> bool:
        return self.asked_at is None or now - self.asked_at >= FLEET_POLL_S


def base_url(url: str) -> str:
    """The URL of a node, without what follows its API's root. ValueError for what is none."""
    expected = f"expected the URL of a node such as http://192.168.1.20:8086, got {url!r}"
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ValueError(expected) from None
    if not whole or parts.query or parts.fragment:
        raise ValueError(expected)
    base = url.rstrip("/")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"expected the URL of a node without /v1, got {url!r}")
    return base


def question(model: str) -> str:
    """What to ask of a node, behind its URL."""
    return f"/v1/fleet/capacity?model={quote(model, safe='')}"


def first_view(url: str, configured: int) -> View:
    if configured < 1:
        raise ValueError(f"expected at least 1 configured slot, got {configured}")
    return View(configured, "not_asked", {url: configured})


def hosts_in(status: int, body: bytes, model: str) -> tuple[Host, ...] | Failure:
    """The nodes an answer names for a model or alias, or why it names none."""
    if status != 200:
        return "not_found" if status == 404 else "server_error" if status >= 500 else "refused"
    if len(body) > FLEET_BODY_MAX_BYTES:
        return "bad_answer"
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "bad_answer"
    is_alias = answer.resolved_from == model  # then the one model is what it stands for
    found = next((m for m in answer.models if is_alias or m.name == model), None)
    if found is None or not found.hosts:
        return "model_absent"
    if all(host.slots is None for host in found.hosts):
        return "all_stale"
    return tuple(found.hosts)


def after(view: View, heard: tuple[Host, ...] | Failure, *, configured: int, url: str) -> View:
    """The view after one question; `url` is the node that was asked."""
    if isinstance(heard, str):
        return View(_toward(view.slots, configured), heard, view.urls, view.asked_at)
    urls: dict[str, int] = {}
    total = 0
    for host in heard:
        address = f"http://{host.api}" if host.api else url
        # A stale host had slots a moment ago and will tell again, or leave: until then it has those.
        slots = view.urls.get(address, 0) if host.slots is None else host.slots
        total += slots
        if slots and (not host.api or _API.fullmatch(host.api)):
            urls[address] = slots
    wanted = max(total, configured)
    change = wanted - view.slots
    reason: Reason
    if change and abs(change) < max(FLEET_DAMPING * view.slots, 1):
        slots, reason = view.slots, "held"
    else:
        slots = _toward(view.slots, wanted)
        reason = "fleet" if slots == wanted else "shrinking"
    if total < configured and slots == configured:
        reason = "below_configured"
    return View(slots, reason, urls or {url: configured}, view.asked_at)


def _toward(now: int, wanted: int) -> int:
    """Up at once; down by a part of the present number each time."""
    return max(wanted, now - max(int(now * FLEET_SHRINK), 1))
