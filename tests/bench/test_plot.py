"""Pictures of results, and what is said where none can be made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.made_results import link_phase, results, work_phase, work_run
from viiwork.bench.plot import check_plot, plot
from viiwork.errors import UsageError


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_links_and_workloads_are_drawn(tmp_path: Path, suffix: str):
    path = tmp_path / f"p{suffix}"
    plot(results(link_phase(), link_phase("10 GbE direct", 0.3), work_phase()), path)
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in head


def test_a_picture_names_its_phases_and_what_was_published(tmp_path: Path):
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot(results(link_phase(), work_phase()), tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    for words in ("switched 1 GbE", "10 GbE direct, 16 sessions", "published warm", "published, 247 MiB"):
        assert words in text
    assert "goodput over time" in text and "where the time goes" in text


def test_a_workload_without_moves_or_transfers_is_drawn(tmp_path: Path):
    run = work_run(moves=0, warm=0, partly=0, cold=0, send_s=[], goodput=[], send_stages_s={})
    plot(results(work_phase("p", run)), tmp_path / "p.svg")
    assert (tmp_path / "p.svg").stat().st_size > 1000


def test_a_name_that_tells_no_format_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(UsageError, match=r"\.png or \.svg, got 'p\.jpg'"):
        check_plot(tmp_path / "p.jpg")


def test_nothing_to_draw_and_no_place_to_draw_to_are_one_line(tmp_path: Path):
    with pytest.raises(UsageError, match="nothing to draw"):
        plot(results(), tmp_path / "p.svg")
    with pytest.raises(UsageError, match="cannot be written"):
        plot(results(work_phase()), tmp_path / "no" / "p.svg")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'viiwork\[bench\]'"):
        check_plot(tmp_path / "p.png")
