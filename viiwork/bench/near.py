"""The near end on a host of the lab: `python -m viiwork.bench.near`, told what to measure by a line of JSON.

It answers with lines of JSON: `plan` and `step` as it goes, in the end `phase` or `error`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from viiwork.bench.link import LinkBench, Target, Way
from viiwork.bench.results import Phase
from viiwork.bench.states import BenchState
from viiwork.core.paths import Path as LinkPath
from viiwork.errors import ViiworkError


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    name: str
    addr: str
    port: int
    key: bytes
    link_mbps: int
    state: str
    base: str | None
    held: int
    runs: int
    ways: tuple[Way, ...]


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the answer."""

    plan: int = 0
    step: str = ""
    phase: Phase | None = None
    error: str = ""


class _Lines:
    def plan(self, steps: int) -> None:
        _tell(Told(plan=steps))

    def step(self, what: str) -> None:
        _tell(Told(step=what))


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


async def _measure(errand: Errand) -> Phase:
    state = BenchState(Path(errand.state), Path(errand.base) if errand.base else None, errand.held)
    async with LinkBench(Target(errand.addr, errand.port, errand.key), state, _Lines()) as bench:
        path = LinkPath(errand.addr, is_mesh=True)
        return await bench.measure(
            path, errand.ways, errand.runs, name=errand.name, link_mbps=errand.link_mbps
        )


def main() -> int:
    errand = msgspec.json.decode(sys.stdin.buffer.readline(), type=Errand)
    try:
        _tell(Told(phase=asyncio.run(_measure(errand))))
    except ViiworkError as error:
        _tell(Told(error=str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
