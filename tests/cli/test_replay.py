from __future__ import annotations

import json
from pathlib import Path

import pytest

from viiwork.cli.main import main
from viiwork.core.capacity import Perf
from viiwork.core.choice import Candidate, Policy, Question, pick
from viiwork.wire.trace import VERSION, Arrival, Head, encode_line


def recorded(path: Path, n: int = 40, policy: Policy | None = None) -> Path:
    """Turns of four sessions on two hosts, the second 1.4 times as slow and warm for half of the turns."""
    policy = policy or Policy()
    data = [encode_line(Head(VERSION, "a", policy))]
    for i in range(n):
        warm = Candidate("b", 1, 1.0, Perf(140.0, 1400.0, 9), 700 if i % 2 else 0)
        question = Question(
            "a",
            "m",
            1000 + i,
            (Candidate("a", 1, perf=Perf(100.0, 1000.0, 9)), warm),
            session=f"s{i % 4}",
            keyed=True,
        )
        data.append(encode_line(Arrival(i, f"{i:016x}", question, pick(policy, question))))
    path.write_bytes(b"".join(data))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return recorded(tmp_path / "trace")


def as_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_under_the_recorded_policy_nothing_is_placed_elsewhere(trace: Path, capsys):
    assert main(["replay", str(trace), "--json"]) == 0
    body = as_json(capsys)
    assert body["decisions"] == 40 and body["elsewhere"] == 0 and body["old"] == body["new"]
    assert body["policy"] == {"performance": True, "band": 1.25, "explore": 0.05, "hold": True}


def test_another_policy_shows_what_it_would_change(trace: Path, capsys):
    assert main(["replay", str(trace), "--set", "performance=false", "--json"]) == 0
    body = as_json(capsys)
    assert body["elsewhere"] == 20  # the warm half stays with the entry node
    assert body["new"]["predicted_ttft_p90_ms"] > body["old"]["predicted_ttft_p90_ms"]
    assert main(["replay", str(trace), "--set", "band=2", "--set", "explore=0", "--json"]) == 0
    assert as_json(capsys)["policy"] == {"performance": True, "band": 2.0, "explore": 0.0, "hold": True}


def test_a_person_reads_a_small_table(trace: Path, capsys):
    assert main(["replay", str(trace), "--set", "hold=false"]) == 0
    text = capsys.readouterr().out
    assert "policy: performance=true band=1.25 explore=0.05 hold=false" in text
    assert "decisions: 40, placed elsewhere: 0 (0.0 %)" in text
    assert "predicted TTFT p50, ms" in text and "recorded" in text


def test_moves_of_sessions_are_counted_for_both_policies(trace: Path, capsys):
    main(["replay", str(trace), "--set", "band=5", "--json"])
    body = as_json(capsys)
    assert body["new"]["moves"] >= 0 and body["old"]["moves"] == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("band", "expected KEY=VALUE"),
        ("bandwidth=2", "expected KEY=VALUE with one of performance, band, explore, hold, got 'bandwidth=2'"),
        ("band=0.5", "--set band: expected a number from 1 to 100, got '0.5'"),
        ("band=nan", "expected a number from 1 to 100"),
        ("explore=2", "expected a number from 0 to 1"),
        ("hold=yes", "--set hold: expected true or false, got 'yes'"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(trace: Path, capsys, given: str, expected: str):
    assert main(["replay", str(trace), "--set", given]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines[1:], ":1: a trace begins with the line that holds its policy"),
        (lambda lines: [*lines[:7], b"oops\n", *lines[7:]], ":8: not a line of a trace"),
        (lambda lines: [*lines[:3], b"x" * 70_000 + b"\n"], ":4: longer than 65536 bytes"),
        (lambda lines: [], ": holds no trace"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_line(trace: Path, capsys, change, expected: str):
    trace.write_bytes(b"".join(change(trace.read_bytes().splitlines(keepends=True))))
    assert main(["replay", str(trace)]) == 2
    error = capsys.readouterr().err
    assert f"{trace}{expected}" in error and error.count("\n") == 1


def test_a_file_that_is_not_there_is_told_so(tmp_path: Path, capsys):
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err


def test_a_line_the_node_is_still_writing_is_left_out(trace: Path, capsys):
    trace.write_bytes(trace.read_bytes()[:-30])
    assert main(["replay", str(trace), "--json"]) == 0
    assert as_json(capsys)["decisions"] == 39
