"""The figures of links as a table for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from viiwork.bench.lab import SETTINGS
from viiwork.bench.results import Results, Run

_PUBLISHED = {setting.name: setting.published_s for setting in SETTINGS}


def table_of(results: Results) -> RenderableType:
    """A line for each way to send over each path; medians, and in brackets the fastest and the slowest."""
    table = Table(title=f"viiwork {results.viiwork}: a state of {results.settings['size_bytes'] >> 20} MiB")
    for name in ("path", "cache", "compress", "encrypt", "seconds", "published", "Gb/s", "of raw"):
        table.add_column(name, justify="left" if name in ("path", "cache") else "right")
    notes: list[Text] = []
    for phase in results.phases:
        if phase.failed:
            table.add_row(Text(phase.name), Text(phase.failed))
            continue
        raw = statistics.median(phase.raw_bytes_per_s)
        table.add_row(Text(phase.name), "raw TCP", "", "", "", "", f"{raw * 8 / 1e9:.2f}", "100 %")
        for (cache, compress, encrypt), runs in _by_way(phase.runs).items():
            published = (
                _PUBLISHED.get(phase.name) if (cache, compress, encrypt) == ("warm", "off", "off") else None
            )
            seconds = [run.seconds for run in runs]
            rate = statistics.median(run.bytes / run.seconds for run in runs)
            share = statistics.median(run.bytes / run.seconds / run.raw_bytes_per_s for run in runs)
            table.add_row(
                "",
                cache,
                compress,
                encrypt,
                f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})",
                f"{published:.2f}" if published else "",
                f"{rate * 8 / 1e9:.2f}",
                f"{share:.1%}",
            )
        table.add_section()
        notes += [Text(f"{phase.name}: emulated is {what}", style="dim") for what in phase.emulated]
    return Group(table, *notes)


def _by_way(runs: Iterable[Run]) -> dict[tuple[str, str, str], list[Run]]:
    found: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.cache, run.compress, run.encrypt), []).append(run)
    return found
