"""The figures of links as tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from viiwork.bench.lab import SETTINGS
from viiwork.bench.results import Phase, Results, Run
from viiwork.limits import BENCH_BUSY_SHARE, BENCH_SIZE_BYTES, MIB

_PUBLISHED_S = {setting.name: setting.published_s for setting in SETTINGS}
_STAGES = (
    *("read_s", "hash_s", "compress_s", "send_s", "receive_s"),
    *("verify_s", "write_s", "render_s", "import_s"),
)
_SAID = {
    ("warm", "off", "off"): "plain",
    ("cold", "off", "off"): "plain, cold file",
    ("warm", "on", "off"): "compressed",
    ("warm", "off", "on"): "encrypted",
    ("warm", "on", "on"): "both",
    ("warm", "auto", "auto"): "as a node does",
}
Way = tuple[str, str, str]


def table_of(results: Results) -> RenderableType:
    """Times and rates of each way to send over each path, where the time went, and what is to be known."""
    parts: list[RenderableType] = [_rates(results), _stages(results.phases)]
    parts += [Text(line) for phase in results.phases for line in _notes(phase)]
    busy = results.settings.get("busy_share", 0.0)
    if busy > BENCH_BUSY_SHARE:
        parts.append(
            Text(f"other work kept {busy:.0%} of the CPUs busy before the run: rates may be too low")
        )
    return Group(*parts)


def _rates(results: Results) -> Table:
    size = results.settings["size_bytes"]
    table = Table(title=f"a state of {size / MIB:.0f} MiB, medians of {results.settings['runs']} rounds")
    for name in ("path", "sent"):
        table.add_column(name, no_wrap=True)
    for name in ("seconds", "from-to", "published", "Gb/s", "of raw TCP"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in results.phases:
        if phase.failed:
            continue
        raw = statistics.median(phase.raw_bytes_per_s)
        table.add_row(Text(phase.name), "raw TCP", "", "", "", f"{raw * 8 / 1e9:.2f}", "100.0%")
        for way, runs in _by_way(phase.runs).items():
            seconds = [run.seconds for run in runs]
            published = _PUBLISHED_S.get(phase.name) if size == BENCH_SIZE_BYTES else None
            table.add_row(
                "",
                _SAID[way],
                f"{statistics.median(seconds):.3f}",
                f"{min(seconds):.3f}-{max(seconds):.3f}",
                f"{published:.2f}" if published and way == ("warm", "off", "off") else "",
                f"{statistics.median(run.bytes / run.seconds for run in runs) * 8 / 1e9:.2f}",
                f"{statistics.median(run.bytes / run.seconds / run.raw_bytes_per_s for run in runs):.1%}",
            )
        table.add_section()
    return table


def _stages(phases: list[Phase]) -> Table:
    """Stages run beside one another, so they add up to more than the whole."""
    measured = {stage for phase in phases for run in phase.runs for stage in run.stages}
    shown = [stage for stage in _STAGES if stage in measured]
    table = Table(title="milliseconds in each stage, medians; stages of one run overlap")
    for name in ("path", "sent"):
        table.add_column(name, no_wrap=True)
    for stage in shown:
        table.add_column(stage.removesuffix("_s"), justify="right", no_wrap=True)
    for phase in phases:
        name = phase.name
        for way, runs in _by_way(phase.runs).items():
            cells = []
            for stage in shown:
                found = [run.stages[stage] for run in runs if stage in run.stages]
                cells.append(f"{statistics.median(found) * 1000:.0f}" if found else "")
            table.add_row(Text(name), _SAID[way], *cells)
            name = ""
        table.add_section()
    return table


def _notes(phase: Phase) -> list[str]:
    found = [f"{phase.name}: {phase.failed}"] if phase.failed else []
    return found + [f"{phase.name}: emulated: {what}" for what in phase.emulated]


def _by_way(runs: Iterable[Run]) -> dict[Way, list[Run]]:
    found: dict[Way, list[Run]] = {}
    for run in runs:
        found.setdefault((run.cache, run.compress, run.encrypt), []).append(run)
    return found
