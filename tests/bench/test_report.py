"""The tables: published figures beside ours, intervals, and what was scaled or emulated said under them."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from tests.bench.made_results import link_phase, results, work_phase, work_run
from viiwork.bench.report import report_of
from viiwork.bench.results import Phase, Results
from viiwork.errors import UsageError


def shown(found: Results) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report_of(found))
    return captured.get()


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if name in line)
    return [cell.strip() for cell in line.strip("│┃ ").split("│")]


def test_shares_stand_beside_the_published_ones_with_their_intervals():
    text = shown(results(work_phase()))
    cells = row(text, "10 GbE direct, 16 sessions")
    assert cells[1:4] == ["200", "40 (22-58)", "97.5% (87.1%-99.6%)"]
    assert cells[6:8] == ["warm 96.2%", "97.0%"]


def test_seconds_and_bytes_are_those_of_the_modelled_system():
    text = shown(results(work_phase()))
    assert row(text, "10 GbE direct, 16 sessions")[8].startswith("20.2 / ")
    second = text[text.index("States that were moved") :]
    cells = row(second, "10 GbE direct, 16 sessions")
    assert cells[1:4] == ["180", "256 (256)", "2.40 (2.72)"]
    assert cells[4] == "128 / 64"  # 1e8 bytes x 64 in 100 s x 4
    assert cells[5:] == ["39", "1.00 (1.00)", "3.0%"]
    assert "not of the scaled run" in text and "emulated: the engines: simulated" in text


def test_several_runs_show_their_spread():
    runs = work_run(), work_run(warm=30, partly=8, cold=2, turns=180)
    text = shown(results(work_phase("p", *runs)))
    assert row(text, "2 runs, from - to")[1:4] == ["180 - 200", "40 - 40", "75.0% - 97.5%"]
    assert row(text, "│ p ")[1] == "380"


def test_what_went_wrong_is_said_under_the_tables():
    run = work_run(failed={"status 503": 3}, untold=2, moved_compactions=4)
    text = shown(results(work_phase("p", run)))
    assert "p: 3 tries failed" in text and "of 2 turns" in text and "4 compacted turns" in text


def test_a_phase_that_failed_says_why_and_one_without_moves_says_none():
    failed = msgspec.structs.replace(work_phase("gone"), failed="the link died")
    still = work_phase("still", work_run(moves=0, warm=0, partly=0, cold=0, send_s=[], send_bytes=[]))
    text = shown(results(failed, still))
    assert row(text, "gone")[1] == "the link died"
    assert row(text, "still")[3] == "none"


def test_links_and_workloads_have_their_own_tables():
    text = shown(results(link_phase(), work_phase()))
    assert text.index("247 MiB") < text.index("changes of host")
    assert "10 GbE direct, 16 sessions" not in text[: text.index("changes of host")]
    assert "247 MiB" in text and "changes of host" in text
    assert "changes of host" not in shown(results(link_phase(), kind="lab"))


def test_a_workload_that_is_none_is_refused():
    with pytest.raises(UsageError, match="figures of a workload"):
        report_of(results(Phase(name="p", workload={"setting": 3})))
