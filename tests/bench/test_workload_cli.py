"""`bench kvshare --workload` and `bench compare` as commands: options, outputs, faults in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.made_results import link_phase, results, work_phase
from tests.node.nodes import free_port
from viiwork.bench.results import encode_results
from viiwork.cli.main import main
from viiwork.errors import UsageError


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, and the last line on standard error."""
    try:
        code = main(["bench", *words])
    except SystemExit as left:
        code = int(str(left.code or 0))
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    return code, said.out, lines[-1] if lines else ""


LAB = ("kvshare", "--lab", "--workload")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sessions", "0"), "expected numbers from 1 to 256, such as 12,16"),
        (("--sessions", "16,,"), "expected numbers from 1 to 256"),
        (("--minutes", "0"), "expected a number above 0, at most 1440"),
        (("--minutes", "nan"), "expected a number above 0"),
        (("--speed", "fast"), "expected a number above 0, at most 50"),
        (("--scale", "48"), "expected a power of two up to 256"),
        (("--seed", "-1"), "expected a whole number"),
        (("--stall-share", "0"), "expected a share of the time from 0.001 to 1"),
        (("--context", "12"), "expected 1024 tokens or more"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
):
    code, _, line = run(capsys, *LAB, *words)
    assert code == 2 and said in line


def test_a_workload_needs_nodes_on_both_hosts(capsys: pytest.CaptureFixture[str]):
    code, _, line = run(capsys, "kvshare", "--listen", "--workload")
    assert code == UsageError.exit_code and "--lab, or with --to HOST" in line


@pytest.mark.netns
def test_files_that_cannot_be_are_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for words, said in (
        (("--model", str(tmp_path / "none.gguf")), "there is no file"),
        (("--dir", str(tmp_path / "none")), "there is no folder"),
        (("--json", str(tmp_path / "none" / "a.json")), "cannot be written"),
        (("--plot", str(tmp_path / "a.jpg")), ".png or .svg"),
    ):
        code, _, line = run(capsys, *LAB, *words)
        assert code == UsageError.exit_code and said in line
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, line = run(capsys, *LAB, "--plot", str(tmp_path / "a.png"))
    assert code == UsageError.exit_code and "viiwork[bench]" in line


def test_a_node_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    port = free_port("127.0.0.1")
    config = tmp_path / "viiwork.yaml"
    config.write_text(f"api: {{host: 127.0.0.1, port: {port}}}\n")
    words = ("kvshare", "--to", f"127.0.0.1:{port}", "--workload", "--config", str(config))
    code, _, line = run(capsys, *words)
    assert (
        code == 1
        and f"here (http://127.0.0.1:{port}) does not answer: 127.0.0.1:{port}: Connection refused" in line
    )


def test_two_results_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for name, found in (("a", results(link_phase(), work_phase())), ("b", results(work_phase()))):
        (tmp_path / f"{name}.json").write_bytes(encode_results(found))
    code, out, _ = run(capsys, "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert code == 0 and "within the noise" in out and "only before: switched 1 GbE" in out


def test_results_that_cannot_be_read_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "a.json").write_bytes(encode_results(results(link_phase())))
    (tmp_path / "b.json").write_text("{}")
    for other, said in (("b.json", "expected the results of a benchmark"), ("c.json", "No such file")):
        code, _, line = run(capsys, "compare", str(tmp_path / "a.json"), str(tmp_path / other))
        assert code == UsageError.exit_code and said in line
