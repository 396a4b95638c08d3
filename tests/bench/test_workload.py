"""The workload as a whole: real nodes, simulated engines, agents; in a lab and at nodes that run."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.node.nodes import free_port
from viiwork.bench.agents import Shape
from viiwork.bench.figures import Workload, workload_of
from viiwork.bench.fleet import MODEL, Engines, NodeView, Place, config_of, fleet
from viiwork.bench.lab import SETTINGS
from viiwork.bench.net import PREFIX
from viiwork.bench.results import Phase
from viiwork.bench.stats import count_interval
from viiwork.bench.workload import (
    PUBLISHED_WARM,
    Plan,
    Told,
    emulated_by,
    run_at,
    run_lab_workload,
    shared_model,
)
from viiwork.errors import BenchError

# Sessions of some 2,000 tokens at fifty times the speed: some seconds a run.
SMALL = Shape().fitting(4096)
QUICK = Plan(sessions=(6,), minutes=0.1, seed=3, speed=50.0, scale=256, context=4096, shape=SMALL)


def work_of(phase: Phase) -> Workload:
    assert phase.workload is not None
    return workload_of(phase.workload)


def left_behind() -> set[str]:
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in spaces.splitlines() if line.startswith(f"{PREFIX}{os.getpid()}-")}


@pytest.mark.netns
def test_two_runs_of_a_seed_do_the_same_work_and_nothing_is_left(tmp_path: Path):
    told = list[Told]()
    found = [run_lab_workload(QUICK, SETTINGS[:1], tmp_path, told.append) for _ in range(2)]
    assert left_behind() == set() and list(tmp_path.iterdir()) == []
    (a,), (b,) = ([work_of(phase).runs[0] for phase in phases] for phases in found)
    assert a.turns > 30 and (a.turns, a.compactions) == (b.turns, b.compactions)
    assert not a.failed and not b.failed and a.untold == b.untold == 0
    assert a.sends and b.sends and sum(a.wire_bytes) > 0 and a.send_s
    low, high = count_interval(a.moves)
    assert low <= b.moves <= high
    (phase,) = found[0]
    assert phase.name == "switched 1 GbE, 6 sessions" and phase.link_mbps == round(1000 * 50 / 256)
    assert work_of(phase).published_warm == 0.938
    assert any("simulated" in what for what in phase.emulated) and any("1/256" in w for w in phase.emulated)
    assert told[-1].turns > b.turns  # with those of the beginning


async def test_agents_run_at_nodes_that_are_there_already(tmp_path: Path):
    places = [Place(f"n{i}", f"127.0.0.{i + 1}", "", *_ports(f"127.0.0.{i + 1}")) for i in range(2)]
    async with fleet(places, QUICK.engines(), tmp_path) as views:
        model, names = await shared_model(views, None)
        assert (model, names) == (MODEL, ["n0", "n1"])
        with pytest.raises(BenchError, match="--model: other is not served by both nodes: bench"):
            await shared_model(views, "other")
        with pytest.raises(BenchError, match="lead to the node n0"):
            await shared_model([views[0], views[0]], None)
        plan = Plan(sessions=(2,), minutes=0.2, context=4096, shape=Shape(think_s=0.3, begin_s=0.1))
        (phase,) = await run_at(views, model, plan, "n0 and n1", lambda told: None)
    work = work_of(phase)
    assert work.runs[0].turns >= 2 and not work.runs[0].failed
    assert (work.speed, work.scale, work.engine) == (1.0, 1, "as it runs there")
    assert phase.emulated == []


async def test_a_node_that_does_not_come_up_is_told_in_one_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = taken.getsockname()[1], free_port("127.0.0.1")
        await _not_up(Place("n0", "127.0.0.1", "", *ports), tmp_path)


async def _not_up(place: Place, folder: Path) -> None:
    with pytest.raises(BenchError, match="node n0 does not come up") as caught:
        async with fleet([place], QUICK.engines(), folder):
            pass
    assert "\n" not in str(caught.value) and str(place.api_port) in str(caught.value)


async def test_a_node_that_is_not_there_is_told_in_one_line():
    view = NodeView("there", f"http://127.0.0.1:{free_port('127.0.0.1')}")
    try:
        with pytest.raises(BenchError, match=r"there \(http://127.0.0.1:\d+\) does not answer: "):
            await shared_model([view, view], None)
    finally:
        await view.close()


def test_what_is_emulated_is_said_of_simulated_engines_alone():
    assert len(emulated_by(Plan())) == 3
    assert len(emulated_by(Plan(speed=1.0, scale=1))) == 2
    assert emulated_by(Plan(is_paced=False)) == []
    assert set(PUBLISHED_WARM) <= {setting.name for setting in SETTINGS}


def _ports(host: str) -> tuple[int, int]:
    return free_port(host), free_port(host)


@pytest.mark.parametrize("share", [None, 0.3])
def test_nodes_of_the_lab_run_as_they_do_by_default_but_for_what_was_asked(tmp_path: Path, share):
    place = Place("alpha", "10.0.0.1")
    text = config_of(place, [place], Engines(4096, 4, model=tmp_path, stall_share=share), tmp_path, tmp_path)
    loaded = yaml.safe_load(text)
    assert loaded.get("kv_share") == (None if share is None else {"stall_share": share})
