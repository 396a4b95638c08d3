from __future__ import annotations

import io

import pytest
from rich.console import Console

from viiwork.bench.results import Phase, Results, Run
from viiwork.bench.table import table_of
from viiwork.limits import BENCH_SIZE_BYTES, MIB

RUN = Run(
    cache="warm",
    compress="off",
    encrypt="off",
    bytes=100_000_000,
    wire_bytes=101_000_000,
    seconds=1.0,
    raw_bytes_per_s=125e6,
    stages={"send_s": 0.9, "render_s": 0.05},
)


def shown(*phases: Phase, size: int = BENCH_SIZE_BYTES, **settings: float) -> str:
    made = Results(
        viiwork="1",
        kind="lab",
        started_unix_s=0.0,
        host={},
        settings={"size_bytes": size, "runs": 1, **settings},
        phases=list(phases),
    )
    out = io.StringIO()
    Console(file=out, width=120).print(table_of(made))
    return out.getvalue()


def test_a_line_tells_the_median_the_spread_the_rate_and_the_share_of_raw():
    runs = [RUN, Run(**{**{f: getattr(RUN, f) for f in RUN.__struct_fields__}, "seconds": 2.0}), RUN]
    said = shown(Phase(name="p", raw_bytes_per_s=[125e6], runs=runs))
    for cell in ("plain", "1.000", "1.000-2.000", "0.80", "80.0%", "900", "50"):
        assert cell in said, cell


@pytest.mark.parametrize(("size", "is_shown"), [(BENCH_SIZE_BYTES, True), (MIB, False)])
def test_the_published_time_stands_beside_ours_for_states_of_its_size(size, is_shown):
    said = shown(Phase(name="switched 1 GbE", raw_bytes_per_s=[125e6], runs=[RUN]), size=size)
    assert ("3.24" in said) is is_shown


def test_what_failed_what_is_emulated_and_a_busy_machine_are_told():
    said = shown(
        Phase(name="p", failed="cannot be reached"),
        Phase(name="q", emulated=["the link: a wire"], raw_bytes_per_s=[1e9], runs=[RUN]),
        busy_share=0.9,
    )
    assert "p: cannot be reached" in said
    assert "q: emulated: the link: a wire" in said
    assert "other work kept 90% of the CPUs busy" in said
    assert "busy" not in shown(busy_share=0.1)
