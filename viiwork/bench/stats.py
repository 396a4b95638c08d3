"""How far a figure may be trusted: intervals of shares, counts and percentiles, and of differences.

All intervals are two-sided, 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Interval = tuple[float, float]

Z = 1.959964  # of the normal distribution
# Student's t by degrees of freedom; from there on the next lower entry is used, which is wider.
_T = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


def wilson(hits: int, n: int) -> Interval:
    """Where a share of `hits` in `n` lies; all of [0, 1] without any."""
    if n == 0:
        return 0.0, 1.0
    share = hits / n
    centre = share + Z * Z / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    below, above = (centre - half) / (1 + Z * Z / n), (centre + half) / (1 + Z * Z / n)
    # Exact at the ends, where rounding would leave a share outside its own interval.
    return 0.0 if hits == 0 else below, 1.0 if hits == n else above


def shares_differ(hits_a: int, n_a: int, hits_b: int, n_b: int) -> Interval:
    """Share of b less that of a (Newcombe: from both Wilson intervals)."""
    if not n_a or not n_b:
        return -1.0, 1.0
    a, b = hits_a / n_a, hits_b / n_b
    (a_low, a_high), (b_low, b_high) = wilson(hits_a, n_a), wilson(hits_b, n_b)
    diff = b - a
    return diff - math.hypot(b - b_low, a_high - a), diff + math.hypot(b_high - b, a - a_low)


def count_interval(n: int) -> Interval:
    """Where the count of another such run lies, events being independent.

    That of a second run scatters as the first one does, so the difference of both does by twice the variance.
    """
    half = Z * math.sqrt(2 * max(n, 1))
    return max(0.0, n - half), n + half


def means_differ(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Mean of b less that of a (Welch); None with fewer than two values on a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    diff = statistics.fmean(b) - statistics.fmean(a)
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    total = sum(parts)
    if total == 0:
        return diff, diff
    freedom = total**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    half = _t(int(freedom)) * math.sqrt(total)
    return diff - half, diff + half


def percentile(values: Sequence[float], share: float) -> float | None:
    """Between the two nearest values; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def percentile_interval(values: Sequence[float], share: float) -> Interval | None:
    """By the ranks between which it lies, whatever the distribution; None of nothing."""
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    half = Z * math.sqrt(n * share * (1 - share))
    low = max(0, math.floor(n * share - half))
    high = min(n - 1, math.ceil(n * share + half))
    return ordered[min(low, n - 1)], ordered[high]


def _t(freedom: int) -> float:
    return _T[max(known for known in _T if known <= max(freedom, 1))]
