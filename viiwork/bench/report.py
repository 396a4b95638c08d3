"""What a benchmark found, as tables for the terminal, the published figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from viiwork.bench.figures import WARMTHS, Pooled, Workload, pooled, workload_of
from viiwork.bench.results import Phase, Results
from viiwork.bench.stats import count_interval, percentile, wilson
from viiwork.bench.table import table_of


def report_of(results: Results) -> RenderableType:
    """Tables of links where there are any, then those of workloads, and what was emulated."""
    links = [phase for phase in results.phases if phase.workload is None]
    works = [(phase, workload_of(phase.workload)) for phase in results.phases if phase.workload is not None]
    parts: list[RenderableType] = []
    if links or not works:
        parts.append(table_of(msgspec.structs.replace(results, phases=links)))
    if works:
        parts += [_moves_table(results.viiwork, works), _bytes_table(works), *_notes(works)]
    return Group(*parts)


def _moves_table(version: str, works: Sequence[tuple[Phase, Workload]]) -> Table:
    """Turns and changes of host."""
    table = Table(title=f"viiwork {version}: changes of host, and the first token of all turns")
    for name in ("phase", "turns", "moves", *WARMTHS, "published", "reused", "TTFT p50 / p90 / p99"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase, work in works:
        if phase.failed:
            table.add_row(Text(phase.name), Text(phase.failed))
            continue
        all_runs = pooled(work)
        table.add_row(*_moves_row(phase.name, all_runs), *_moves_end(work, all_runs))
        if len(work.runs) > 1:
            table.add_row(*_spread_row(work), style="dim")
    return table


def _moves_row(name: str, found: Pooled) -> list[RenderableType]:
    shares: list[RenderableType] = [
        share_with_interval(found.by_warmth[warmth], found.moves) for warmth in WARMTHS
    ]
    low, high = count_interval(found.moves)
    return [Text(name), str(found.turns), f"{found.moves} ({low:.0f}-{high:.0f})", *shares]


def _moves_end(work: Workload, found: Pooled) -> list[str]:
    published = f"warm {work.published_warm:.1%}" if work.published_warm is not None else ""
    reused = f"{found.reused_share:.1%}" if found.reused_share is not None else ""
    return [published, reused, " / ".join(seconds(percentile(found.ttft_s, at)) for at in (0.5, 0.9, 0.99))]


def _spread_row(work: Workload) -> list[str]:
    """The least and the most of single runs."""
    shares = [[getattr(run, warmth) / run.moves for run in work.runs if run.moves] for warmth in WARMTHS]
    return [
        f"  {len(work.runs)} runs, from - to",
        _from_to([run.turns for run in work.runs]),
        _from_to([run.moves for run in work.runs]),
        *(f"{min(found):.1%} - {max(found):.1%}" if found else "" for found in shares),
    ]


def _bytes_table(works: Iterable[tuple[Phase, Workload]]) -> Table:
    """What was sent and imported."""
    table = Table(title="States that were moved")
    names = ("phase", "sent", "delta MiB", "send s", "Mb/s each way", "imported", "import s", "stall")
    for name in names:
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase, work in works:
        if phase.failed:
            continue
        found = pooled(work)
        there, back = found.mbps
        table.add_row(
            Text(phase.name),
            str(sum(run.sends for run in work.runs)),
            _median_of(found.send_mib, "{:.0f}"),
            _median_of(found.send_s, "{:.2f}"),
            f"{there:.0f} / {back:.0f}",
            str(sum(run.imports for run in work.runs)),
            _median_of(found.import_s, "{:.2f}"),
            f"{found.stall_share:.1%}",
        )
    return table


def _notes(works: Iterable[tuple[Phase, Workload]]) -> list[Text]:
    """Whatever a reader of the tables must know, each said once."""
    said = [
        "in brackets of shares: 95 % Wilson intervals; of moves: where another run of the seed ends up, with "
        "95 %; of seconds and MiB: the 90th percentile",
        "published: one run of 90 minutes a phase, so without an interval",
    ]
    for phase, work in works:
        said += [f"emulated: {what}" for what in phase.emulated]
        if work.speed != 1 or work.scale != 1:
            said.append("seconds, MiB and Mb/s are those of the modelled system, not of the scaled run")
        if n_failed := pooled(work).n_failed:
            said.append(f"{phase.name}: {n_failed} tries failed and were asked again")
        untold = sum(run.untold for run in work.runs)
        if untold:
            said.append(f"{phase.name}: of {untold} turns the engine did not say what it reused")
        if moved := sum(run.moved_compactions for run in work.runs):
            said.append(f"{phase.name}: {moved} compacted turns changed the host; nothing could be reused")
    return [Text(line, style="dim") for line in dict.fromkeys(said)]


def share_with_interval(hits: int, n: int) -> str:
    if not n:
        return "none"
    low, high = wilson(hits, n)
    return f"{hits / n:.1%} ({low:.1%}-{high:.1%})"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _median_of(values: Sequence[float], form: str) -> str:
    middle, high = percentile(values, 0.5), percentile(values, 0.9)
    if middle is None or high is None:
        return "-"
    return f"{form.format(middle)} ({form.format(high)})"


def _from_to(values: Sequence[int]) -> str:
    return f"{min(values)} - {max(values)}"
