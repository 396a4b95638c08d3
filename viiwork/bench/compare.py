"""Two results side by side: what differs by more than chance, phase by phase."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from viiwork.bench.figures import WARMTHS, Pooled, pooled, workload_of
from viiwork.bench.results import Phase, Results, Run
from viiwork.bench.stats import (
    Interval,
    count_interval,
    means_differ,
    percentile,
    percentile_interval,
    shares_differ,
)
from viiwork.errors import UsageError


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of one phase in both results."""

    phase: str
    figure: str
    before: str
    after: str
    change: float | None  # None = one of them has no such figure
    interval: Interval | None  # of the change; None = too few values to say
    is_share: bool = False

    @property
    def verdict(self) -> str:
        if self.change is None:
            return "not in both"
        if self.interval is None:
            return "too few runs to say"
        low, high = self.interval
        return "within the noise" if low <= 0 <= high else "differs"


def differences(a: Results, b: Results) -> list[Difference]:
    """Of every phase that both have, by name. Raises `UsageError` when there is none."""
    theirs = {phase.name: phase for phase in b.phases}
    both = [(phase, theirs[phase.name]) for phase in a.phases if phase.name in theirs]
    if not both:
        names = [", ".join(phase.name for phase in results.phases) or "none" for results in (a, b)]
        raise UsageError(f"no phase is in both files: {names[0]}; and {names[1]}")
    found: list[Difference] = []
    for before, after in both:
        found += _of_links(before, after)
        found += _of_workloads(before, after)
    return found


def comparison(a: Results, b: Results) -> RenderableType:
    """The differences as a table, and which phases stand in one file alone."""
    table = Table(title=f"viiwork {a.viiwork} and viiwork {b.viiwork}")
    for name in ("phase", "figure", "before", "after", "change", "95 % interval", ""):
        table.add_column(name, justify="left" if name in ("phase", "figure", "") else "right")
    shown = ""
    for found in differences(a, b):
        table.add_row(
            Text(found.phase if found.phase != shown else ""),
            Text(found.figure),
            found.before,
            found.after,
            _signed(found.change, found.is_share),
            _between(found.interval, found.is_share),
            Text(found.verdict, style="bold" if found.verdict == "differs" else "dim"),
        )
        shown = found.phase
    names = [{phase.name for phase in results.phases} for results in (a, b)]
    alone = [f"only before: {name}" for name in sorted(names[0] - names[1])]
    alone += [f"only after: {name}" for name in sorted(names[1] - names[0])]
    return Group(table, *(Text(line, style="dim") for line in alone))


def _of_links(before: Phase, after: Phase) -> list[Difference]:
    found = []
    if before.raw_bytes_per_s or after.raw_bytes_per_s:
        rates = [[rate * 8 / 1e9 for rate in phase.raw_bytes_per_s] for phase in (before, after)]
        found.append(_of_means(before.name, "raw TCP, Gb/s", *rates))
    ways = dict.fromkeys(_way(run) for phase in (before, after) for run in phase.runs)
    for way in ways:
        times = [[run.seconds for run in phase.runs if _way(run) == way] for phase in (before, after)]
        found.append(_of_means(before.name, f"send s, {way}", *times))
    return found


def _of_workloads(before: Phase, after: Phase) -> list[Difference]:
    if before.workload is None or after.workload is None:
        return []
    a, b = (pooled(workload_of(phase.workload)) for phase in (before, after) if phase.workload is not None)
    name = before.name
    found = [_of_counts(name, "turns", a.turns, b.turns), _of_counts(name, "moves", a.moves, b.moves)]
    found += [_of_shares(name, warmth, a, b) for warmth in WARMTHS]
    for share in (0.5, 0.9, 0.99):
        found.append(_of_percentiles(name, f"TTFT p{share * 100:g}, s", a.ttft_s, b.ttft_s, share))
    lists: dict[str, Callable[[Pooled], list[float]]] = {
        "TTFT after a move, s": lambda found: found.moved_ttft_s,
        "delta, MiB": lambda found: found.send_mib,
        "send, s": lambda found: found.send_s,
        "import, s": lambda found: found.import_s,
    }
    found += [_of_means(name, what, values(a), values(b)) for what, values in lists.items()]
    return found


def _of_counts(phase: str, what: str, a: int, b: int) -> Difference:
    low, high = count_interval(a)
    half = max(a - low, high - a)
    return Difference(phase, what, str(a), str(b), float(b - a), (b - a - half, b - a + half))


def _of_shares(phase: str, warmth: str, a: Pooled, b: Pooled) -> Difference:
    hits = a.by_warmth[warmth], b.by_warmth[warmth]
    if not a.moves or not b.moves:
        shown = [f"{n} of {found.moves}" for n, found in zip(hits, (a, b), strict=True)]
        return Difference(phase, warmth, shown[0], shown[1], None, None, True)
    shares = hits[0] / a.moves, hits[1] / b.moves
    interval = shares_differ(hits[0], a.moves, hits[1], b.moves)
    return Difference(
        phase, warmth, f"{shares[0]:.1%}", f"{shares[1]:.1%}", shares[1] - shares[0], interval, True
    )


def _of_means(phase: str, what: str, a: Sequence[float], b: Sequence[float]) -> Difference:
    shown = [f"{statistics.fmean(values):.3f}" if values else "-" for values in (a, b)]
    change = statistics.fmean(b) - statistics.fmean(a) if a and b else None
    return Difference(phase, what, shown[0], shown[1], change, means_differ(a, b))


def _of_percentiles(
    phase: str, what: str, a: Sequence[float], b: Sequence[float], share: float
) -> Difference:
    before, after = percentile(a, share), percentile(b, share)
    around = percentile_interval(a, share), percentile_interval(b, share)
    shown = [f"{value:.3f}" if value is not None else "-" for value in (before, after)]
    if before is None or after is None or around[0] is None or around[1] is None:
        return Difference(phase, what, shown[0], shown[1], None, None)
    change = after - before
    # As Newcombe does for shares: each side's own distance to its limit, added as squares.
    low = change - ((after - around[1][0]) ** 2 + (around[0][1] - before) ** 2) ** 0.5
    high = change + ((around[1][1] - after) ** 2 + (before - around[0][0]) ** 2) ** 0.5
    return Difference(phase, what, shown[0], shown[1], change, (low, high))


def _way(run: Run) -> str:
    return f"{run.cache} cache, compress {run.compress}, encrypt {run.encrypt}"


def _signed(value: float | None, is_share: bool) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} points" if is_share else f"{value:+.3f}"


def _between(interval: Interval | None, is_share: bool) -> str:
    if interval is None:
        return "-"
    scale, form = (100, "{:+.1f}") if is_share else (1, "{:+.3f}")
    return " to ".join(form.format(scale * end) for end in interval)
