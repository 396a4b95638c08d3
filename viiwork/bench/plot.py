"""What a benchmark found, as a picture: send time, its stages, warmth of moves, goodput over time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viiwork.bench.figures import WARMTHS, Workload, pooled, workload_of
from viiwork.bench.lab import SETTINGS
from viiwork.bench.results import Phase, Results
from viiwork.bench.stats import percentile, wilson
from viiwork.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_STAGES = (
    "handshake", "queued", "save", "wait", "read", "hash", "compress", "send", "receive", "verify", "write",
    "render", "import",
)  # fmt: skip
_COLOURS = {"warm": "#4c9f70", "partly": "#e3b23c", "cold": "#c8553d"}
_PUBLISHED = {setting.name: setting.published_s for setting in SETTINGS if setting.published_s}

Panel = tuple[str, Callable[["Axes"], None]]


def check_plot(path: Path) -> None:
    """Raises `UsageError` where no such picture could be made: told before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot: expected a name that ends in {' or '.join(SUFFIXES)}, got {path.name!r}")
    _matplotlib()


def plot(results: Results, path: Path) -> None:
    """Write the picture. Raises `UsageError`."""
    check_plot(path)
    panels = _panels(results)
    if not panels:
        raise UsageError("--plot: the results hold nothing to draw")
    figure = _matplotlib()(figsize=(8, 3.4 * len(panels)), layout="constrained")
    figure.suptitle(f"viiwork {results.viiwork}: bench kvshare, {results.kind}")
    for number, (title, draw) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, number)
        axes.set_title(title, fontsize="medium")
        draw(axes)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"--plot: {path} cannot be written: {error.strerror or error}") from None


def _matplotlib() -> Any:
    """The class of figures. It draws to files alone, whatever display there is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'viiwork[bench]'") from None
    return Figure


def _panels(results: Results) -> list[Panel]:
    links = [phase for phase in results.phases if phase.runs]
    works = [
        (phase.name, workload_of(phase.workload)) for phase in results.phases if phase.workload is not None
    ]
    works = [(name, work) for name, work in works if work.runs]
    found: list[Panel] = []
    if links:
        found.append(("send time by link, s", lambda axes: _send_times(axes, links)))
        found.append(("where the time goes, s (stages of two threads overlap)", lambda a: _stages(a, links)))
    if works:
        found.append(("send time of deltas, s (median, 90th percentile)", lambda a: _deltas(a, works)))
        found.append(("all transfers by stage, s (stages overlap)", lambda a: _work_stages(a, works)))
        found.append(("changes of host, shares", lambda axes: _shares(axes, works)))
        found.append(("goodput over time, Mb/s", lambda axes: _goodput(axes, works)))
    return found


def _send_times(axes: Axes, links: Sequence[Phase]) -> None:
    for at, phase in enumerate(links):
        times = [run.seconds for run in phase.runs if (run.compress, run.encrypt) == ("off", "off")]
        times = times or [run.seconds for run in phase.runs]
        middle = statistics.median(times)
        ends = [[middle - min(times)], [max(times) - middle]]
        axes.barh(at, middle, 0.6, xerr=ends, color="#4c72b0", label="viiwork" if at == 0 else None)
    marks = [(at, _PUBLISHED[phase.name]) for at, phase in enumerate(links) if phase.name in _PUBLISHED]
    if marks:
        axes.scatter([s for _, s in marks], [at for at, _ in marks], marker="D", color="black", zorder=3,
                     label="published, 247 MiB")  # fmt: skip
    _rows(axes, [phase.name for phase in links])
    _legend(axes)


def _stages(axes: Axes, links: Sequence[Phase]) -> None:
    named = [
        {
            stage: statistics.fmean(run.stages.get(f"{stage}_s", 0.0) for run in phase.runs)
            for stage in _STAGES
        }
        for phase in links
    ]
    _stacked(axes, [phase.name for phase in links], named)


def _deltas(axes: Axes, works: Sequence[tuple[str, Workload]]) -> None:
    for at, (_, work) in enumerate(works):
        times = pooled(work).send_s
        middle, high = percentile(times, 0.5), percentile(times, 0.9)
        if middle is not None and high is not None:
            axes.barh(at, middle, 0.6, xerr=[[0.0], [high - middle]], color="#4c72b0")
    _rows(axes, [name for name, _ in works])


def _work_stages(axes: Axes, works: Sequence[tuple[str, Workload]]) -> None:
    named = []
    for _, work in works:
        sums = dict.fromkeys(_STAGES, 0.0)
        for run in work.runs:
            for stage, s in run.send_stages_s.items():
                if stage in sums:
                    sums[stage] += s * work.speed
        named.append(sums)
    _stacked(axes, [name for name, _ in works], named)


def _shares(axes: Axes, works: Sequence[tuple[str, Workload]]) -> None:
    for at, (_, work) in enumerate(works):
        found, left = pooled(work), 0.0
        if not found.moves:
            continue
        for warmth in WARMTHS:
            share = found.by_warmth[warmth] / found.moves
            axes.barh(at, share, 0.6, left=left, color=_COLOURS[warmth], label=warmth if at == 0 else None)
            left += share
        low, high = wilson(found.by_warmth["warm"], found.moves)
        axes.plot([low, high], [at, at], color="black", linewidth=1.5)
        if work.published_warm is not None:
            label = "published warm" if at == 0 else None
            axes.scatter([work.published_warm], [at], marker="D", color="black", zorder=3, label=label)
    _rows(axes, [name for name, _ in works])
    axes.set_xlim(0, 1)
    _legend(axes, ncols=4, loc="lower left")


def _goodput(axes: Axes, works: Sequence[tuple[str, Workload]]) -> None:
    for name, work in works:
        samples = work.runs[0].goodput
        rate = 8 / 1e6 * work.scale / work.speed
        axes.plot(
            [sample.at_s * work.speed for sample in samples],
            [
                (sample.a_bytes + sample.b_bytes) * rate / sample.seconds if sample.seconds else 0.0
                for sample in samples
            ],
            linewidth=1,
            label=name,
        )
    axes.set_xlabel("seconds of the modelled system, first run of each phase", fontsize="small")
    _legend(axes)


def _stacked(axes: Axes, names: Sequence[str], values: Sequence[dict[str, float]]) -> None:
    left = [0.0] * len(names)
    for stage in _STAGES:
        widths = [found.get(stage, 0.0) for found in values]
        if any(widths):
            axes.barh(range(len(names)), widths, 0.6, left=left, label=stage)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    _rows(axes, names)
    _legend(axes, ncols=6)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()


def _legend(axes: Axes, **how: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", **how)
