"""Two results side by side: what is noise is called so."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.bench.made_results import link_phase, results, work_phase, work_run
from viiwork.bench.compare import comparison, differences
from viiwork.bench.results import Results
from viiwork.errors import UsageError


def verdicts(a: Results, b: Results) -> dict[str, str]:
    return {found.figure: found.verdict for found in differences(a, b)}


def test_the_same_results_differ_in_nothing():
    one = results(link_phase(), work_phase())
    assert set(verdicts(one, one).values()) == {"within the noise"}


def test_a_share_that_fell_far_differs_and_one_that_fell_a_little_does_not():
    before = results(work_phase())
    little = verdicts(before, results(work_phase("10 GbE direct, 16 sessions", work_run(warm=38, partly=2))))
    assert little["warm"] == little["partly"] == little["turns"] == "within the noise"
    far = verdicts(before, results(work_phase("10 GbE direct, 16 sessions", work_run(warm=20, cold=19))))
    assert far["warm"] == far["cold"] == "differs" and far["partly"] == "within the noise"


def test_counts_and_times_differ_beyond_their_intervals_alone():
    before = results(work_phase())
    run = work_run(turns=230, ttft_s=[0.3 * at for at in range(1, 101)], send_s=[0.5, 0.65, 0.7])
    found = verdicts(before, results(work_phase("10 GbE direct, 16 sessions", run)))
    assert found["turns"] == found["send, s"] == "within the noise"
    assert found["TTFT p50, s"] == "differs"
    many = verdicts(before, results(work_phase("10 GbE direct, 16 sessions", work_run(turns=300))))
    assert many["turns"] == "differs"


def test_links_are_compared_way_by_way():
    before, after = results(link_phase("p", 2.2, 2.3, 2.25)), results(link_phase("p", 1.2, 1.3, 1.25))
    assert verdicts(before, after) == {
        "raw TCP, Gb/s": "within the noise",
        "send s, warm cache, compress off, encrypt off": "differs",
    }


def test_single_runs_are_too_few_to_say():
    a, b = results(link_phase("p", 2.2)), results(link_phase("p", 1.2))
    assert set(verdicts(a, b).values()) == {"too few runs to say"}


def test_a_figure_that_one_side_lacks_is_in_neither():
    none = work_run(moves=0, warm=0, partly=0, cold=0, send_s=[], ttft_s=[])
    found = verdicts(results(work_phase()), results(work_phase("10 GbE direct, 16 sessions", none)))
    assert found["warm"] == found["send, s"] == found["TTFT p99, s"] == "not in both"


def test_results_without_a_common_phase_are_refused_with_their_names():
    with pytest.raises(UsageError, match="no phase is in both files: here; and there"):
        differences(results(link_phase("here")), results(link_phase("there")))


def test_the_table_says_which_phases_stand_alone():
    console = Console(width=160)
    with console.capture() as captured:
        console.print(
            comparison(
                results(link_phase("p"), link_phase("old")), results(link_phase("p"), work_phase("new"))
            )
        )
    text = captured.get()
    assert "only before: old" in text and "only after: new" in text and "within the noise" in text
