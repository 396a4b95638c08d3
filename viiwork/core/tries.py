"""What earlier tries of a request have cost it: queue time, full nodes met, and when it came."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from viiwork.core.turn import Grant, Outcome
from viiwork.limits import RETRIED_REQUESTS_MAX


class Tried(NamedTuple):
    """What earlier tries of a request have cost."""

    waited_s: float = 0.0  # of its queue budget
    n_full: int = 0  # nodes that had room by their report and none when the request came
    arrived_at: float | None = None  # when it was first to be placed; None = it was not tried yet


_UNTRIED = Tried()


class Tries:
    """Of at most RETRIED_REQUESTS_MAX requests that may be tried again; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._tried: OrderedDict[str, Tried] = OrderedDict()

    def get(self, request_id: str) -> Tried:
        return self._tried.get(request_id, _UNTRIED)

    def failed(self, grant: Grant, outcome: Outcome, now: float) -> None:
        """A try ended; its queue time counts, here and at a peer that let it wait."""
        known = self.get(grant.ask.request_id)
        at_peer_s = outcome.duration_s if grant.wait_ms and outcome.result == "refused" else 0.0
        n_full = known.n_full + (outcome.result == "refused" and outcome.status == 429)
        arrived_at = known.arrived_at
        if arrived_at is None:
            arrived_at = now - outcome.duration_s - grant.queued_s
        self._tried[grant.ask.request_id] = Tried(grant.queued_s + at_peer_s, n_full, arrived_at)
        while len(self._tried) > RETRIED_REQUESTS_MAX:
            self._tried.popitem(last=False)

    def forget(self, request_id: str) -> None:
        self._tried.pop(request_id, None)
