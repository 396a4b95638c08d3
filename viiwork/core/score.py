"""How fast this node reads a prompt: overhead and prefill rate of each model, from its own turns.

TTFT is taken for `overhead + rate * tokens read anew`. Short prompts tell the overhead, long ones the rate;
each is the median of what the other leaves over, so one slow turn changes nothing. Turns of the last ten
minutes count; a baseline from before them steadies the figure while they are few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median

from viiwork.core.capacity import Perf
from viiwork.limits import (
    CAPACITY_MILLIS_MAX,
    CAPACITY_MODELS_MAX,
    SCORE_BASELINE_SAMPLES,
    SCORE_BIG_TOKENS,
    SCORE_BUCKET_S,
    SCORE_BUCKET_SAMPLES_MAX,
    SCORE_BUCKETS,
    SCORE_FIRST_SAMPLES,
    SCORE_RATE_MIN_MS,
    SCORE_REFRESH_S,
    SCORE_ROUNDS,
    SCORE_SMALL_SAMPLES_MIN,
)

Sample = tuple[float, float]  # (ttft in ms, thousands of tokens read anew)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was measured before the present ten minutes."""

    overhead_ms: float
    prefill_ms_per_1k: float


@dataclass(frozen=True, slots=True)
class _Fit:
    overhead_ms: float
    prefill_ms_per_1k: float
    n_small: int
    n_big: int


@dataclass(slots=True)
class _Bucket:
    minute: int
    samples: list[Sample] = field(default_factory=list)
    n: int = 0

    def add(self, sample: Sample) -> None:
        if self.n < SCORE_BUCKET_SAMPLES_MAX:
            self.samples.append(sample)
        else:
            self.samples[self.n % SCORE_BUCKET_SAMPLES_MAX] = sample  # the oldest of them
        self.n += 1


@dataclass(slots=True)
class _Model:
    buckets: list[_Bucket] = field(default_factory=list)  # oldest first
    baseline: Baseline | None = None
    perf: Perf | None = None
    looked_at: float = -math.inf
    is_new: bool = True  # samples came since
    import_ms_per_1k: float | None = None


class Speeds:
    """Measured speed of each local model."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def restore(self, model: str, baseline: Baseline | None) -> None:
        """Begin with what an earlier run measured, or forget everything measured of a model."""
        self._models[model] = _Model(baseline=baseline)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def sample(self, model: str, ttft_s: float, n_prefilled: int, now: float) -> None:
        """A turn ended well: from its grant to the first token, and the prompt tokens it read anew."""
        if not 0.0 < ttft_s * 1000 <= CAPACITY_MILLIS_MAX or n_prefilled < 0:
            return
        known = self._models.get(model)
        if known is None:
            if len(self._models) >= CAPACITY_MODELS_MAX:
                return
            known = self._models[model] = _Model()
        minute = int(now // SCORE_BUCKET_S)
        if not known.buckets or known.buckets[-1].minute != minute:
            known.buckets.append(_Bucket(minute))
            del known.buckets[:-SCORE_BUCKETS]
        known.buckets[-1].add((ttft_s * 1000, n_prefilled / 1000))
        known.is_new = True

    def imports(self, model: str, ms_per_1k: float) -> None:
        """What restoring a thousand tokens of a replica takes here."""
        known = self._models.get(model)
        if known is not None and (rounded := _rounded(ms_per_1k)) != known.import_ms_per_1k:
            known.import_ms_per_1k, known.is_new = rounded, True

    def perf(self, model: str, now: float) -> Perf | None:
        """The score as it is published; worked out anew at most once in `SCORE_REFRESH_S`."""
        known = self._models.get(model)
        if known is None:
            return None
        oldest = int(now // SCORE_BUCKET_S) - SCORE_BUCKETS + 1
        expired = bool(known.buckets) and known.buckets[0].minute < oldest
        if (known.is_new or expired) and now - known.looked_at >= SCORE_REFRESH_S:
            known.buckets = [b for b in known.buckets if b.minute >= oldest]
            samples = [s for b in known.buckets for s in b.samples]
            perf, known.baseline = _score(samples, known.baseline)
            known.perf = replace(perf, import_ms_per_1k=known.import_ms_per_1k) if perf is not None else None
            known.looked_at, known.is_new = now, False
        return known.perf

    def baseline(self, model: str) -> Baseline | None:
        known = self._models.get(model)
        return known.baseline if known is not None else None

    def models(self) -> list[str]:
        return list(self._models)


def _score(samples: list[Sample], baseline: Baseline | None) -> tuple[Perf | None, Baseline | None]:
    """The score to publish, and the baseline from now on."""
    fit = _fit(samples, baseline)
    if fit is None:
        return (_published(baseline, 0) if baseline is not None else None), baseline
    window = Baseline(fit.overhead_ms, fit.prefill_ms_per_1k)
    if fit.n_big >= SCORE_BASELINE_SAMPLES or baseline is None:
        mixed = window
        baseline = window if fit.n_big >= SCORE_BASELINE_SAMPLES else None
    else:
        mixed = Baseline(
            _mix(window.overhead_ms, baseline.overhead_ms, fit.n_small),
            _mix(window.prefill_ms_per_1k, baseline.prefill_ms_per_1k, fit.n_big),
        )
    return _published(mixed, fit.n_small + fit.n_big), baseline


def _fit(samples: list[Sample], baseline: Baseline | None) -> _Fit | None:
    """Overhead and rate of the window by alternating medians; None when it tells no rate."""
    big_k = SCORE_BIG_TOKENS / 1000
    small = [s for s in samples if s[1] < big_k]
    big = [s for s in samples if s[1] >= big_k]
    overhead = baseline.overhead_ms if baseline is not None else 0.0
    rate = baseline.prefill_ms_per_1k if baseline is not None else 0.0
    if baseline is None and len(big) < SCORE_FIRST_SAMPLES:
        return None  # or the one turn that met a busy card would be the score
    fits_overhead = bool(small) and (len(small) >= SCORE_SMALL_SAMPLES_MIN or baseline is None)
    for _ in range(SCORE_ROUNDS):
        if fits_overhead:
            overhead = max(median([ttft - rate * k for ttft, k in small]), 0.0)
        if big:
            rate = max(median([(ttft - overhead) / k for ttft, k in big]), 0.0)
    if rate < SCORE_RATE_MIN_MS:
        return None
    return _Fit(overhead, rate, len(small) if fits_overhead else 0, len(big))


def _mix(window: float, baseline: float, n: int) -> float:
    weight = n / (n + SCORE_BASELINE_SAMPLES)
    return weight * window + (1 - weight) * baseline


def _published(score: Baseline, n_samples: int) -> Perf:
    return Perf(_rounded(score.overhead_ms), _rounded(score.prefill_ms_per_1k), n_samples)


def _rounded(ms: float) -> float:
    """Two significant figures, at least 1: what differs by less is the same speed."""
    if ms <= 1.0:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(ms)) - 1)
    return max(round(round(ms / unit) * unit, 3), 1.0)
