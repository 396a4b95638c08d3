"""Runs `viiwork bench kvshare --workload` and `viiwork bench compare`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from viiwork.bench.compare import comparison
from viiwork.bench.fleet import NodeView
from viiwork.bench.lab import SETTINGS
from viiwork.bench.listen import host_facts
from viiwork.bench.net import check_lab
from viiwork.bench.progress import BenchProgress
from viiwork.bench.results import Phase, Results, read_results
from viiwork.bench.workload import PUBLISHED_WARM, Plan, Told, run_at, run_lab_workload, run_s, shared_model
from viiwork.cli.bench_output import check_outputs, put_out, show
from viiwork.cli.control import own_address_of
from viiwork.config.model import ApiSection
from viiwork.errors import UsageError
from viiwork.mesh.values import host_port
from viiwork.version import VERSION


def lab(args: argparse.Namespace) -> int:
    """The workload over the published settings, on this machine."""
    check_lab()
    plan = _plan(args, None if args.model is None else _file(args.model))
    check_outputs(args)
    settings = [setting for setting in SETTINGS if setting.name in PUBLISHED_WARM]
    started = time.time()
    with BenchProgress() as progress:
        steps = _Steps(progress, plan, len(settings))
        phases = run_lab_workload(plan, settings, args.dir, steps.told)
    _report(args, started, {"lab": True}, phases)
    return 0


async def at_nodes(args: argparse.Namespace) -> int:
    """The workload at this machine's node and another one, which run already."""
    plan = _plan(args, None)
    check_outputs(args)
    host, port = args.to
    here = own_address_of(args)
    places = {"here": here, "there": (host, port or ApiSection().port)}
    views = [NodeView(name, f"http://{host_port(*address)}") for name, address in places.items()]
    started = time.time()
    try:
        model, names = await shared_model(views, args.model)
        with BenchProgress() as progress:
            steps = _Steps(progress, plan, 1)
            phases = await run_at(views, model, plan, " and ".join(names), steps.told)
    finally:
        for view in views:
            await view.close()
    _report(args, started, {"to": f"{host}:{places['there'][1]}", "model": model}, phases)
    return 0


def compare(args: argparse.Namespace) -> int:
    show(comparison(read_results(args.before), read_results(args.after)))
    return 0


class _Steps:
    """Seconds of all runs as steps of one bar."""

    def __init__(self, progress: BenchProgress, plan: Plan, n_settings: int) -> None:
        self._progress = progress
        self._done = 0
        self._before = 0.0  # seconds of this run, as told last
        progress.plan(n_settings * len(plan.sessions) * plan.runs * int(run_s(plan)))

    def told(self, told: Told) -> None:
        seconds = min(told.seconds, told.of_seconds)
        if seconds < self._before:
            self._before = 0.0
        for _ in range(int(seconds) - int(self._before)):
            self._progress.step(f"{told.phase}: {told.turns} turns, {told.moves} changes of host")
        self._before = seconds


def _plan(args: argparse.Namespace, model: Path | None) -> Plan:
    more = {} if args.context is None else {"context": args.context}
    return Plan(
        sessions=args.sessions,
        minutes=args.minutes,
        runs=args.runs or 1,
        seed=args.seed,
        speed=args.speed,
        scale=args.scale,
        stall_share=args.stall_share,
        model=model,
        is_paced=args.lab and model is None,
        **more,
    )


def _file(model: str) -> Path:
    path = Path(model)
    if not path.is_file():
        raise UsageError(f"--model: there is no file {model}")
    return path.absolute()


def _report(
    args: argparse.Namespace, started: float, settings: dict[str, Any], phases: Sequence[Phase]
) -> None:
    names = ("sessions", "minutes", "seed", "speed", "scale", "model", "stall_share")
    said = {name: getattr(args, name) for name in names}
    results = Results(
        viiwork=VERSION,
        kind="workload",
        started_unix_s=started,
        host=host_facts(),
        settings=said | settings,
        phases=list(phases),
    )
    put_out(args, results)
