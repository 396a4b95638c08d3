"""Who fails: a node whose requests for a model end badly stands behind all others for a while.

A host that fails fast always has room and would draw every request. One failure may be an accident; from the
second in a row on the node waits out a back-off that doubles. Then one request tries it, and its success
clears the node.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from viiwork.limits import FAILING_BACKOFF_MAX_S, FAILING_BACKOFF_S, FAILURES_BEFORE_BACKOFF, FAILURES_MAX


@dataclass(slots=True)
class _Failing:
    n: int = 0  # failures in a row, those that were under way when the back-off began left out
    until: float = 0.0
    on_trial: bool = False

    def back_off(self, now: float) -> None:
        doublings = min(max(self.n - FAILURES_BEFORE_BACKOFF, 0), 30)
        self.until = now + min(FAILING_BACKOFF_S * 2**doublings, FAILING_BACKOFF_MAX_S)


class FailureMarks:
    """Failures in a row of each (node, model)."""

    def __init__(self) -> None:
        self._failing: OrderedDict[tuple[str, str], _Failing] = OrderedDict()
        self.is_any = False  # nearly always, and then nothing else need be asked

    def is_failing(self, node: str, model: str, now: float) -> bool:
        """Does the node stand behind the others now?"""
        mark = self._failing.get((node, model))
        return mark is not None and mark.n >= FAILURES_BEFORE_BACKOFF and now < mark.until

    def granted(self, node: str, model: str, now: float) -> None:
        """A request goes there. The first one after a back-off is the trial; others wait for how it ends."""
        mark = self._failing.get((node, model))
        if mark is not None and mark.n >= FAILURES_BEFORE_BACKOFF and now >= mark.until:
            mark.on_trial = True
            mark.back_off(now)

    def failed(self, node: str, model: str, now: float) -> bool:
        """A request failed there; True when that sets the node back."""
        mark = self._failing.setdefault((node, model), _Failing())
        self.is_any = True
        self._failing.move_to_end((node, model))
        while len(self._failing) > FAILURES_MAX:
            self._failing.popitem(last=False)
        if mark.n >= FAILURES_BEFORE_BACKOFF and now < mark.until and not mark.on_trial:
            return False
        mark.n += 1
        mark.on_trial = False
        mark.back_off(now)
        return mark.n >= FAILURES_BEFORE_BACKOFF

    def succeeded(self, node: str, model: str) -> bool:
        """A request was answered there; True when that ends a row of failures that set the node back."""
        mark = self._failing.pop((node, model), None)
        self.is_any = bool(self._failing)
        return mark is not None and mark.n >= FAILURES_BEFORE_BACKOFF
