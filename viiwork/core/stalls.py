"""Which running requests an engine has lost: it is idle, and has not answered them.

An engine whose compute thread died still takes connections and answers `/health` and `/slots`. Silence alone
proves nothing: a long prompt is read in silence. But an engine that works says so in `/slots`, or, while it
still tokenizes a prompt or decodes an image before it takes a slot, shows it by its CPU time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

IDLE_CPU_SHARE = 0.2  # of one core; answering probes takes a hundredth, any work on a prompt a whole core


@dataclass(frozen=True, slots=True)
class Running:
    """A request in a slot of this node."""

    request_id: str
    backend: str
    since: float
    answered: bool  # more than comments of the answer has come


class StallWatch:
    """Remembers since when each backend has been idle."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._idle_since: dict[str, float] = {}
        self._cpu: dict[str, tuple[float, float]] = {}  # backend -> CPU seconds of its process, and when

    def looked(self, backend: str, busy: int | None, cpu_s: float | None, now: float) -> None:
        """A backend's count of busy slots, and the CPU time its process has used up to now.

        None = not known, which is no sign of anything.
        """
        before = self._cpu.pop(backend, None)
        works = cpu_s is None or before is None or cpu_s - before[0] > IDLE_CPU_SHARE * (now - before[1])
        if cpu_s is not None:
            self._cpu[backend] = cpu_s, now
        if busy == 0 and not works:
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
