"""Runs the workload: agents at two nodes, for each setting of the link and each number of sessions."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from viiwork.bench.agents import Agent, Drive, Shape, Turn, drive
from viiwork.bench.figures import Tallies, Workload, WorkloadRun, run_of
from viiwork.bench.fleet import MODEL, Engines, NodeView, Place, fleet
from viiwork.bench.janitor import Janitor
from viiwork.bench.lab import SETTINGS, Setting
from viiwork.bench.net import CABLE, SWITCH, LabNet
from viiwork.bench.paced import Pace
from viiwork.bench.results import Phase
from viiwork.errors import BenchError
from viiwork.limits import WORKLOAD_SCALE, WORKLOAD_SPEED
from viiwork.mesh.notices import one_line

CONTEXT, SLOTS = 65_536, 4
PREFILL_PER_S, DECODE_PER_S, SAVE_BYTES_PER_S = 2500.0, 45.0, 4e9
SAMPLE_S = 1.0
# Before it counts: prompts are read for the first time then, and each state goes over the link as a whole.
WARM_UP_S = 240.0
_NAME_SHOWN_CHARS = 64
_SETTLE_S = 2.0  # after the last turn: its state is still on its way
# The study's warm shares, by the number of the lab's setting.
PUBLISHED_WARM = {SETTINGS[0].name: 0.938, SETTINGS[1].name: 0.968, SETTINGS[2].name: 0.962}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line says of a workload."""

    sessions: tuple[int, ...] = (16,)
    minutes: float = 3.0  # of each run, by the wall
    runs: int = 1
    seed: int = 1
    speed: float = WORKLOAD_SPEED
    scale: int = WORKLOAD_SCALE
    model: Path | None = None
    is_paced: bool = True  # simulated engines
    context: int = CONTEXT
    stall_share: float | None = None  # of the nodes, None = their default
    shape: Shape = field(default_factory=Shape)

    def engines(self) -> Engines:
        if not self.is_paced:
            return Engines(self.context, SLOTS, model=self.model, stall_share=self.stall_share)
        pace = Pace(PREFILL_PER_S, DECODE_PER_S, SAVE_BYTES_PER_S, self.speed, self.scale)
        return Engines(self.context, SLOTS, pace=pace, stall_share=self.stall_share)

    def scaled_to_life(self) -> Plan:
        """A real engine runs at its own speed, with its own states."""
        return self if self.is_paced else replace(self, speed=1.0, scale=1)


@dataclass(frozen=True, slots=True)
class Told:
    """How far a run is, for a progress bar."""

    phase: str
    turns: int
    moves: int
    seconds: float
    of_seconds: float


Tell = Callable[[Told], None]


def run_lab_workload(plan: Plan, settings: Sequence[Setting], folder: Path | None, tell: Tell) -> list[Phase]:
    """A phase of each setting and number of sessions. Raises `BenchError`; nothing is left in any case."""
    plan = plan.scaled_to_life()
    phases = []
    with _cleaned() as janitor, LabNet(janitor) as net:
        for setting in settings:
            mbps = max(1, round(setting.mbps * plan.speed / plan.scale))
            net.unplug(CABLE if setting.device == SWITCH else SWITCH)
            net.shape(setting.device, mbps)
            places = [
                Place("alpha", net.near.address(setting.device), net.near.namespace),
                Place("beta", net.far.address(setting.device), net.far.namespace),
            ]
            emulated = [*setting.emulated, *emulated_by(plan)]
            for n_sessions in plan.sessions:
                runs = []
                for number in range(plan.runs):
                    work = _folder(folder, janitor)
                    run = _run_fleet(places, plan, n_sessions, number, work, setting.name, tell)
                    runs.append(asyncio.run(run))
                phases.append(phase_of(setting.name, mbps, emulated, plan, n_sessions, runs))
    return phases


async def run_at(views: Sequence[NodeView], model: str, plan: Plan, name: str, tell: Tell) -> list[Phase]:
    """A phase for each number of sessions at two nodes that run already. Raises `BenchError`."""
    plan = replace(plan, is_paced=False).scaled_to_life()
    phases = []
    for n_sessions in plan.sessions:
        runs = [
            await run_once(views, model, plan, n_sessions, plan.seed + number, name, tell)
            for number in range(plan.runs)
        ]
        phases.append(phase_of(name, None, [], plan, n_sessions, runs))
    return phases


async def shared_model(views: Sequence[NodeView], wanted: str | None) -> tuple[str, list[str]]:
    """The model both nodes serve, and the nodes' names. Raises `BenchError` when it is not clear which."""
    found: list[set[str]] = []
    names: list[str] = []
    for view in views:
        status = await view.status()
        names.append(str(status.get("node") or view.name)[:_NAME_SHOWN_CHARS])
        models = status.get("models")
        listed = models if isinstance(models, list) else []
        found.append({str(model["name"]) for model in listed if isinstance(model, dict) and "name" in model})
    if names[0] == names[1]:
        raise BenchError(f"both addresses lead to the node {names[0]}; --to takes the other host")
    both = sorted(found[0] & found[1])
    if wanted is not None and wanted not in both:
        raise BenchError(f"--model: {one_line(wanted)} is not served by both nodes: {_listed(both)}")
    if wanted is None and len(both) != 1:
        raise BenchError(f"the nodes share {len(both)} models; say one with --model: {_listed(both)}")
    return wanted or both[0], [one_line(name) for name in names]


def _listed(names: Sequence[str]) -> str:
    return one_line(", ".join(names[:8])) or "they share none"


def run_s(plan: Plan) -> float:
    """How long one run takes, by the wall."""
    return plan.minutes * 60 + (WARM_UP_S / plan.speed if plan.is_paced else 0.0)


async def run_once(
    views: Sequence[NodeView], model: str, plan: Plan, n_sessions: int, seed: int, name: str, tell: Tell
) -> WorkloadRun:
    """One run of agents, half of them at each node. Raises `BenchError` when a node is gone at its begin."""
    shape = plan.shape.fitting(plan.context)
    tallies = Tallies(len(views))
    for number, view in enumerate(views):
        tallies.told(number, await view.status())
    began_at = time.monotonic()
    tallies.sample(0.0)
    moves = 0

    def turned(turn: Turn) -> None:
        nonlocal moves
        moves += turn.moved
        tell(Told(name, len(run.turns), moves, time.monotonic() - began_at, whole_s))

    seconds = plan.minutes * 60
    # Sessions of simulated engines do what they are planned to do in that time; a slow host gets longer.
    whole_s = run_s(plan)
    warm_s = (whole_s - seconds) * plan.speed
    planned_s, until = (whole_s * plan.speed, 2 * whole_s) if plan.is_paced else (math.inf, seconds)
    run = Drive(model, plan.speed, began_at, planned_s, warm_s, began_at + until, turned)
    watching = asyncio.create_task(_watch(views, tallies, began_at, warm_s / plan.speed))
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(n_sessions):
                view = views[number % len(views)]
                tasks.create_task(drive(number, Agent(number, seed, shape), view.api, view.http, run))
        took_s = time.monotonic() - began_at - warm_s / plan.speed
        await asyncio.sleep(_SETTLE_S)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    for number, view in enumerate(views):
        tallies.told(number, await view.status())
    return run_of(seed, took_s, run.turns, tallies)


async def _watch(views: Sequence[NodeView], tallies: Tallies, began_at: float, warm_s: float) -> None:
    """Look at the nodes; what they did within the first `warm_s` is forgotten."""
    has_begun = False
    while True:
        if not has_begun and time.monotonic() - began_at >= warm_s:
            has_begun = True
            tallies.begin()
        await asyncio.sleep(SAMPLE_S)
        for number, view in enumerate(views):
            with suppress(BenchError):  # a node that is too busy is asked again
                tallies.told(number, await view.status())
        tallies.sample(time.monotonic() - began_at)


async def _run_fleet(
    places: Sequence[Place], plan: Plan, n_sessions: int, number: int, work: Path, name: str, tell: Tell
) -> WorkloadRun:
    async with fleet(places, plan.engines(), work) as views:
        return await run_once(views, MODEL, plan, n_sessions, plan.seed + number, name, tell)


def phase_of(
    setting: str,
    mbps: int | None,
    emulated: list[str],
    plan: Plan,
    n_sessions: int,
    runs: list[WorkloadRun],
) -> Phase:
    workload = Workload(
        setting=setting,
        sessions=n_sessions,
        slots=SLOTS,
        context=plan.context,
        engine="paced" if plan.is_paced else str(plan.model or "as it runs there"),
        speed=plan.speed,
        scale=plan.scale,
        published_warm=PUBLISHED_WARM.get(setting),
        runs=runs,
    )
    name = f"{setting}, {n_sessions} sessions"
    return Phase(name=name, emulated=emulated, link_mbps=mbps, workload=msgspec.to_builtins(workload))


def emulated_by(plan: Plan) -> list[str]:
    """What of the run is not real, beside the link."""
    if not plan.is_paced:
        return []
    said = [
        f"the engines: simulated, {PREFILL_PER_S:g} prompt and {DECODE_PER_S:g} answer tokens/s, saves and "
        f"restores at {SAVE_BYTES_PER_S / 1e9:g} GB/s; files and transfers are real"
    ]
    said.append(f"the beginning: the first {WARM_UP_S / 60:g} modelled minutes are run and not counted")
    if plan.speed != 1 or plan.scale != 1:
        said.append(
            f"time and size: all runs {plan.speed:g} x as fast, states are 1/{plan.scale}, the link carries "
            f"{plan.speed / plan.scale:.3g} of its rate, so that a state takes its modelled time; "
            "viiwork's own waits are not scaled"
        )
    return said


def _folder(folder: Path | None, janitor: Janitor) -> Path:
    work = Path(tempfile.mkdtemp(prefix="viiwork-workload-", dir=folder))
    janitor.owes_folder(work)
    return work


@contextmanager
def _cleaned() -> Iterator[Janitor]:
    janitor = Janitor()
    try:
        yield janitor
    finally:
        janitor.close()
