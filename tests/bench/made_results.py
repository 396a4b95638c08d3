"""Results as a benchmark would have written them."""

from __future__ import annotations

from typing import Any

import msgspec

from viiwork.bench.figures import Sample, Workload, WorkloadRun
from viiwork.bench.results import Phase, Results, Run


def work_run(**changes: Any) -> WorkloadRun:
    made = WorkloadRun(
        seed=1,
        seconds=100.0,
        turns=200,
        moves=40,
        warm=39,
        partly=1,
        cold=0,
        reused_tokens=970,
        moved_prompt_tokens=1000,
        ttft_s=[0.1 * at for at in range(1, 101)],
        moved_ttft_s=[0.5, 0.7],
        send_s=[0.5, 0.6, 0.7],
        send_bytes=[4 << 20] * 3,
        send_stages_s={"send": 1.5, "hash": 0.2},
        import_s=[0.25, 0.25],
        sends=180,
        imports=39,
        wire_bytes=[100_000_000, 50_000_000],
        stall_s=[2.0, 4.0],
        goodput=[Sample(1.0, 1.0, 1_000_000, 500_000), Sample(2.0, 1.0, 3_000_000, 0)],
    )
    return msgspec.structs.replace(made, **changes)


def work_phase(name: str = "10 GbE direct, 16 sessions", *runs: WorkloadRun, **changes: Any) -> Phase:
    work = Workload(
        setting="10 GbE direct",
        sessions=16,
        slots=4,
        context=65_536,
        engine="paced",
        speed=4.0,
        scale=64,
        published_warm=0.962,
        runs=list(runs) or [work_run()],
    )
    work = msgspec.structs.replace(work, **changes)
    return Phase(name=name, emulated=["the engines: simulated"], workload=msgspec.to_builtins(work))


def link_phase(name: str = "switched 1 GbE", *seconds: float) -> Phase:
    runs = [
        Run(
            cache="warm",
            compress="off",
            encrypt="off",
            bytes=247 << 20,
            wire_bytes=247 << 20,
            seconds=took_s,
            raw_bytes_per_s=1.2e8,
            stages={"send_s": took_s, "hash_s": 0.1},
        )
        for took_s in seconds or (2.2, 2.3)
    ]
    return Phase(name=name, link_mbps=1000, raw_bytes_per_s=[1.2e8] * len(runs), runs=runs)


def results(*phases: Phase, kind: Any = "workload") -> Results:
    return Results(
        viiwork="9.9",
        kind=kind,
        started_unix_s=0.0,
        host={},
        settings={"size_bytes": 247 << 20, "runs": 2},
        phases=list(phases),
    )
