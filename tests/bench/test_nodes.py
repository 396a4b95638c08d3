"""Between hosts with running nodes, as a user starts them: two commands, or one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.bench_ends import OTHER_SECRET, SECRET, Far, near
from tests.node.lan import fake_model
from tests.node.nodes import NodeProcess
from viiwork.bench.janitor import Janitor
from viiwork.bench.net import CABLE, SWITCH, LabNet
from viiwork.bench.results import read_results
from viiwork.node.paths import SHM

SMALL = ("--size", "1MiB", "--runs", "1")


@pytest.fixture
def net() -> Iterator[LabNet]:
    janitor = Janitor()
    try:
        with LabNet(janitor) as made:
            made.shape(SWITCH, 1000)
            made.shape(CABLE, 1000)
            yield made
    finally:
        janitor.close()


def node_on(net: LabNet, name: str, folder: Path, secret: str = SECRET) -> NodeProcess:
    """A node with the ports of a user, on the host of that name."""
    folder.mkdir()
    host = net.near if name == "near" else net.far
    return NodeProcess(
        name,
        host.address(SWITCH),
        folder,
        fake_model(folder),
        netns=host.namespace,
        api_port=8086,
        mesh_port=7946,
        mesh="network: lan, ",
        env={"VIIWORK_MESH_SECRET": secret} if secret else {},
    )


def of_benchmarks() -> set[str]:
    return {path.name for path in SHM.iterdir() if path.name.startswith("viiwork-bench-")}


@pytest.mark.netns
async def test_two_commands_measure_every_path_between_hosts_whose_nodes_run(tmp_path, net):
    found = tmp_path / "found.json"
    near_node, far_node = (node_on(net, name, tmp_path / name) for name in ("near", "far"))
    try:
        for node in (near_node, far_node):
            node.start()
        for node in (near_node, far_node):
            await node.until_logged("mesh.joined")
        with Far(tmp_path / "kept", netns=net.far.namespace, secret=SECRET, port=8088):
            words = ("--to", net.far.address(SWITCH), *SMALL, "--json", str(found))
            done = near(*words, netns=net.near.namespace, secret=SECRET)
    finally:
        for node in (near_node, far_node):
            node.end()
    assert done.code == 0, done.err
    assert [phase.path.split()[1] for phase in read_results(found).phases] == [SWITCH, CABLE]


@pytest.mark.netns
async def test_a_running_node_is_the_other_end_for_who_holds_the_secret(tmp_path, net):
    before = of_benchmarks()
    found = tmp_path / "found.json"
    node = node_on(net, "far", tmp_path / "far")
    to = ("--to", net.far.address(SWITCH), *SMALL)
    try:
        node.start()
        await node.until_logged("mesh.joined")
        stranger = near(*to, netns=net.near.namespace, secret=OTHER_SECRET)
        done = near(*to, "--json", str(found), netns=net.near.namespace, secret=SECRET)
        again = near(*to, netns=net.near.namespace, secret=SECRET)
    finally:
        node.end()
    assert (stranger.code, "refused (HTTP 401)" in stranger.line) == (1, True)
    assert done.code == 0, done.err
    assert all(phase.runs for phase in read_results(found).phases)
    assert again.code == 0, again.err
    assert of_benchmarks() <= before


@pytest.mark.netns
async def test_the_node_of_an_open_mesh_tells_to_start_the_other_end_by_hand(tmp_path, net):
    node = node_on(net, "far", tmp_path / "far", secret="")
    try:
        node.start()
        await node.until_logged("mesh.joined")
        done = near("--to", net.far.address(SWITCH), *SMALL, netns=net.near.namespace)
    finally:
        node.end()
    assert done.code == 1
    assert "an open mesh takes changes only from the node's own machine" in done.line
    assert "start `viiwork bench kvshare --listen` on that host" in done.line


@pytest.mark.engine
def test_an_engine_of_this_host_makes_the_state_and_tells_what_an_import_costs(tmp_path, tiny_models):
    found, work = tmp_path / "found.json", tmp_path / "near"
    work.mkdir()
    with Far(tmp_path / "far") as far:
        words = ("--to", f"127.0.0.1:{far.port}", "--runs", "1", "--dir", str(work), "--json", str(found))
        done = near(*words, "--model", str(tiny_models["llama"]))
    assert done.code == 0, done.err
    plain = read_results(found).phases[0].runs[0]
    assert plain.stages["import_s"] > 0
    assert list(work.iterdir()) == []
