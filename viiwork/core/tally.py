"""Counts over the requests of a node, by model and place: plain numbers, cheap to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from viiwork.core.turn import Grant, Outcome
from viiwork.limits import METRIC_MODELS_MAX

BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
OTHER = "other"  # stands for the models beyond the limit


class Histogram:
    """Values counted by their upper bounds, times in seconds unless others are given."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class ModelTally:
    """What became of one model's requests at one place (`local`, or `forward`)."""

    __slots__ = ("queued", "results", "tokens", "took", "ttft")

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.ttft = Histogram()
        self.took = Histogram()
        self.queued = Histogram()
        self.tokens = {"cached": 0, "prefilled": 0, "generated": 0}


class RequestTally:
    """All of it. Tokens are counted where they were made, so that a fleet's sum counts none twice."""

    def __init__(self) -> None:
        self.by_model: dict[tuple[str, str], ModelTally] = {}
        self.refused: Counter[str] = Counter()  # by error code
        self.n_left = 0
        self._models: set[str] = set()

    def ended(self, grant: Grant, outcome: Outcome, took_s: float) -> None:
        tally = self._of(grant.ask.model, "forward" if grant.is_forward else "local")
        tally.results[outcome.result] += 1
        tally.took.add(took_s)
        tally.queued.add(grant.queued_s)
        if outcome.ttft_s is not None:
            tally.ttft.add(outcome.ttft_s)
        usage = outcome.usage
        if usage is not None and not grant.is_forward:
            tally.tokens["cached"] += usage.cached or 0
            tally.tokens["prefilled"] += usage.prefilled or 0
            tally.tokens["generated"] += usage.generated or 0

    def _of(self, model: str, where: str) -> ModelTally:
        tally = self.by_model.get((model, where))
        if tally is None:
            if model not in self._models and len(self._models) >= METRIC_MODELS_MAX:
                model = OTHER
            self._models.add(model)
            tally = self.by_model.setdefault((model, where), ModelTally())
        return tally
