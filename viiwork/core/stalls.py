"""Which running requests an engine has lost: it says all its slots are idle, and has not answered them.

An engine whose compute thread died still takes connections and answers `/health` and `/slots`. Silence alone
proves nothing (a long prompt is read in silence), but an engine that works on a request says so in `/slots`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Running:
    """A request in a slot of this node."""

    request_id: str
    backend: str
    since: float
    answered: bool  # the head of the answer has come


class StallWatch:
    """Remembers since when each backend has reported itself idle."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._idle_since: dict[str, float] = {}

    def reported(self, backend: str, busy: int | None, now: float) -> None:
        """A backend's newest count of busy slots; None = not known, which is no sign of anything."""
        if busy == 0:
            self._idle_since.setdefault(backend, now)
        else:
            self._idle_since.pop(backend, None)

    def lost(self, running: Iterable[Running], now: float) -> list[str]:
        """Ids of unanswered requests older than the limit, on backends idle for as long."""
        return [
            r.request_id
            for r in running
            if not r.answered
            and now - r.since >= self._stall_s
            and now - self._idle_since.get(r.backend, now) >= self._stall_s
        ]
