from __future__ import annotations

import io

from rich.console import Console

from viiwork.bench.progress import BenchProgress


def test_on_a_terminal_it_is_a_bar_with_the_remaining_time():
    out = io.StringIO()
    with BenchProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress.plan(4)
        progress.step("one of them")
        assert progress._bar is not None
        progress._bar.refresh()
    shown = out.getvalue()
    assert "one of them" in shown
    assert "25%" in shown
    assert "-:--:--" in shown or "0:0" in shown


def test_elsewhere_it_is_a_line_for_ten_steps_and_one_at_the_end():
    out = io.StringIO()
    with BenchProgress(Console(file=out, width=100)) as progress:
        progress.plan(25)
        for at in range(25):
            progress.step(f"step {at + 1}")
    assert out.getvalue().splitlines() == ["10 of 25: step 10", "20 of 25: step 20", "25 of 25: step 25"]
