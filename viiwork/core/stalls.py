"""Which running requests an engine has lost: it is idle and has not answered them, or it answers nobody.

An engine whose compute thread died still takes connections and answers `/health` and `/slots`. Silence
towards the request alone proves nothing: a long prompt is read in silence. But an engine that works says so
in `/slots`, or, while it still tokenizes a prompt or decodes an image before it takes a slot, shows it by its
CPU time. An engine that does not even answer `/slots` (stopped, or its main loop hangs) has lost every
request it has not begun to answer.
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
    """Remembers since when each backend has been idle, and since when silent."""

    def __init__(self, stall_s: float, silent_s: float) -> None:
        self._stall_s = stall_s
        self._silent_s = silent_s
        self._idle_since: dict[str, float] = {}
        self._silent_since: dict[str, float] = {}
        self._cpu: dict[str, tuple[float, float]] = {}  # backend -> CPU seconds of its process, and when

    def looked(self, backend: str, busy: int | None, cpu_s: float | None, silent: bool, now: float) -> None:
        """A backend's count of busy slots, the CPU time its process has used up to now, and whether it has
        been found not to answer.

        None = not known, which is no sign of anything.
        """
        before = self._cpu.pop(backend, None)
        works = cpu_s is None or before is None or cpu_s - before[0] > IDLE_CPU_SHARE * (now - before[1])
        if cpu_s is not None:
            self._cpu[backend] = cpu_s, now
        if busy == 0 and not works and not silent:
            self._idle_since.setdefault(backend, now)
        else:
            self._idle_since.pop(backend, None)
        if silent:
            self._silent_since.setdefault(backend, now)
        else:
            self._silent_since.pop(backend, None)

    def forget(self, backend: str) -> None:
        """The backend is gone."""
        for known in (self._idle_since, self._silent_since, self._cpu):
            known.pop(backend, None)

    def lost(self, running: Iterable[Running], now: float) -> list[str]:
        """Ids of unanswered requests older than a limit, on backends idle or silent for as long."""
        return [r.request_id for r in running if not r.answered and self._is_lost(r, now)]

    def _is_lost(self, request: Running, now: float) -> bool:
        for limit_s, since in (
            (self._stall_s, self._idle_since.get(request.backend)),
            (self._silent_s, self._silent_since.get(request.backend)),
        ):
            if since is not None and now - max(since, request.since) >= limit_s:
                return True
        return False
