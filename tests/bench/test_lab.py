from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.bench_ends import ENDS_WITHIN_S, Far, command, env, near
from viiwork.bench.janitor import Janitor
from viiwork.bench.lab import SETTINGS
from viiwork.bench.net import CABLE, PREFIX, SWITCH, LabNet, run, sweep
from viiwork.bench.results import read_results
from viiwork.errors import BenchError

pytestmark = pytest.mark.netns

FAKE_TUNNEL = Path(__file__).parent.parent / "fakes" / "wireguard_go.py"


def namespaces() -> set[str]:
    return {line.split()[0] for line in run("ip", "netns", "list").splitlines() if line}


def of_lab(pid: int) -> set[str]:
    return {name for name in namespaces() if name.startswith(f"{PREFIX}{pid}-")}


@pytest.fixture
def net() -> Iterator[LabNet]:
    janitor = Janitor()
    try:
        with LabNet(janitor) as made:
            yield made
    finally:
        janitor.close()


def lab_env(tmp_path: Path) -> dict[str, str]:
    return env(TMPDIR=str(tmp_path))


def test_the_lab_measures_the_published_settings_and_says_what_is_emulated(tmp_path):
    found = tmp_path / "found.json"
    work = tmp_path / "work"
    work.mkdir()
    words = command("--lab", "--size", "2MiB", "--runs", "1", "--dir", str(work), "--json", str(found))
    lab = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env(), text=True)
    out, err = lab.communicate(timeout=ENDS_WITHIN_S)
    assert lab.returncode == 0, err
    results = read_results(found)
    assert results.kind == "lab"
    assert [phase.name for phase in results.phases] == [setting.name for setting in SETTINGS]
    for phase, setting in zip(results.phases, SETTINGS, strict=True):
        assert phase.emulated == list(setting.emulated)
        assert phase.link_mbps == setting.mbps
        assert {(run.cache, run.compress, run.encrypt) for run in phase.runs} >= {
            tuple(way) for way in setting.ways if way.cache == "warm"
        }
    assert "emulated" in out
    assert of_lab(lab.pid) == set()
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_stopped_is_cleaned_up(tmp_path, how):
    words = command("--lab", "--size", "2MiB", "--runs", "1000", "--dir", str(tmp_path))
    lab = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=lab_env(tmp_path))
    assert lab.stderr is not None
    assert b"of" in lab.stderr.readline()  # it is measuring
    assert of_lab(lab.pid) == {f"{PREFIX}{lab.pid}-near", f"{PREFIX}{lab.pid}-far"}
    lab.send_signal(how)
    lab.communicate(timeout=ENDS_WITHIN_S)
    assert lab.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(how, -how)
    for _ in range(600):
        if not of_lab(lab.pid) and not list(tmp_path.iterdir()):
            break
        threading.Event().wait(0.1)
    assert of_lab(lab.pid) == set()
    assert list(tmp_path.iterdir()) == []


def test_hosts_of_a_lab_that_nobody_cleaned_up_are_removed_by_the_next_one():
    dead = subprocess.Popen(["true"])
    dead.wait()
    mine, theirs = f"{PREFIX}{os.getpid()}-near", f"{PREFIX}{dead.pid}-near"
    try:
        for name in (mine, theirs):
            run("ip", "netns", "add", name)
        sweep()
        assert mine in namespaces()  # its lab runs
        assert theirs not in namespaces()
    finally:
        for name in {mine, theirs} & namespaces():
            run("ip", "netns", "del", name)


def test_without_root_the_lab_says_so():
    # The interpreter itself may lie where only root reads, so what is imported is imported before.
    program = (
        "import os, sys, viiwork.cli.bench_kvshare as _; from viiwork.cli.main import main; os.setuid(65534)"
    )
    program += "; sys.exit(main(['bench', 'kvshare', '--lab']))"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, env=env(), check=False)
    assert (done.returncode, "--lab needs root" in done.stderr) == (1, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_iproute2_the_lab_says_what_to_install(tmp_path):
    done = near("--lab", PATH=str(tmp_path))
    assert (done.code, "install iproute2" in done.line) == (1, True)


def test_an_overlay_that_is_not_installed_is_told_before_anything_is_made(tmp_path):
    for tool in ("ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    done = near("--lab", "--overlay", "wireguard-go", PATH=str(tmp_path))
    assert (done.code, "wireguard-go, which is not on PATH" in done.line) == (1, True)


def test_an_overlay_carries_the_states_of_the_tunneled_setting(tmp_path):
    script = tmp_path / "wireguard-go"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE_TUNNEL} "$@"\n')
    script.chmod(0o755)
    found = tmp_path / "found.json"
    words = ("--lab", "--overlay", "wireguard-go", "--size", "1MiB", "--runs", "1", "--json", str(found))
    done = near(*words, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.code == 0, done.err
    tunneled = read_results(found).phases[1]
    assert tunneled.path == "10.214.9.2"
    assert not [what for what in tunneled.emulated if "tunnel" in what]
    assert tunneled.runs


def test_what_the_tools_of_the_lab_say_is_told(tmp_path, monkeypatch):
    with pytest.raises(BenchError, match=r"ip netns add .*Invalid|ip netns add .*File name too long"):
        run("ip", "netns", "add", "x" * 300)


# -- two hosts in namespaces -----------------------------------------------------------------------
def test_every_path_between_two_hosts_is_found_and_measured(tmp_path, net):
    net.shape(SWITCH, 1000)
    net.shape(CABLE, 10_000)
    found = tmp_path / "found.json"
    with Far(tmp_path / "far", netns=net.far.namespace) as far:
        where = f"{net.far.address(SWITCH)}:{far.port}"
        words = ("--to", where, "--size", "1MiB", "--runs", "1", "--json", str(found))
        done = near(*words, netns=net.near.namespace)
    assert done.code == 0, done.err
    phases = read_results(found).phases
    assert [phase.path for phase in phases] == [
        f"{net.far.address(SWITCH)} {SWITCH}",
        f"{net.far.address(CABLE)} {CABLE}",
    ]
    assert all(phase.runs for phase in phases)
    automatic = next(run for run in phases[0].runs if run.encrypt == "auto")
    assert automatic.encrypted  # no tailnet


def test_a_path_that_does_not_answer_is_shown_as_such_beside_the_others(tmp_path, net):
    net.shape(SWITCH, 1000)
    net.shape(CABLE, 1000)
    found = tmp_path / "found.json"
    with Far(tmp_path / "far", netns=net.far.namespace) as far:
        where = ("ip", "-n", net.far.namespace, "route", "add", "blackhole", f"{net.near.address(CABLE)}/32")
        run(*where)  # the cable's interface is up and nothing comes back over it
        words = ("--to", f"{net.far.address(SWITCH)}:{far.port}", "--size", "1MiB", "--runs", "1")
        done = near(*words, "--json", str(found), netns=net.near.namespace)
    assert done.code == 0, done.err
    mesh, cable = read_results(found).phases
    assert (bool(mesh.runs), mesh.failed) == (True, "")
    assert not cable.runs
    assert f"{net.far.address(CABLE)}:{far.port} cannot be reached" in cable.failed
    assert "cannot be reached" in " ".join(done.out.split())


def test_a_link_that_dies_midway_is_one_line_and_leaves_nothing_on_either_host(tmp_path, net):
    net.shape(SWITCH, 100)
    work = tmp_path / "near"
    work.mkdir()
    with Far(tmp_path / "far", netns=net.far.namespace) as far:
        where = f"{net.far.address(SWITCH)}:{far.port}"
        words = command(
            "--to", where, "--dir", str(work), "--size", "4MiB", "--runs", "1000", netns=net.near.namespace
        )
        asking = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env(TMPDIR=str(work)))
        assert asking.stderr is not None
        assert "of" in asking.stderr.readline()  # raw streams and states have come through
        net.unplug(SWITCH)
        _, err = asking.communicate(timeout=ENDS_WITHIN_S)
        assert net.near.address(SWITCH) in far.until_says("lost")
        for _ in range(600):
            if not list(far.folder.iterdir()):
                break
            threading.Event().wait(0.1)
        assert list(far.folder.iterdir()) == []
    said = [line for line in err.splitlines() if line.startswith("viiwork: ")]
    assert len(said) == 1, err
    assert asking.returncode == 1
    assert list(work.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        run("umount", str(folder))


def test_no_space_for_the_state_is_told_and_leaves_nothing(tmp_path, small_disk):
    with Far(tmp_path / "far") as far:
        done = near("--to", f"127.0.0.1:{far.port}", "--dir", str(small_disk), "--size", "16MiB")
    assert (done.code, "no space for a state of" in done.line) == (1, True)
    assert list(small_disk.iterdir()) == []


def test_no_space_on_the_other_host_is_told_before_anything_is_sent(tmp_path, small_disk):
    with Far(small_disk) as far:
        done = near("--to", f"127.0.0.1:{far.port}", "--dir", str(tmp_path), "--size", "1MiB")
        far.until_says("done with")
        assert list(small_disk.iterdir()) == []
    assert (done.code, "the other host says: no space" in done.line) == (1, True)
