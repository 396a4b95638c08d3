"""Three nodes under more than they can serve: what is served, what waits, what is told to come back.

    python -m bench.soak.run [--minutes 5] [--factor 2] [--faults none,backend] [--leavers 0] [--json FILE]

Real nodes with fake engines (4 slots of each of two models on each node). Requests come at random moments,
`factor` times as many as the fleet can serve, whatever becomes of the earlier ones. Each fault makes a run of
its own: `backend` freezes an engine, `node` a whole node, `deaf` puts a stranger at a node's place that
takes connections and never answers.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.soak.fleet import MODELS, NODES, SETTLE_S, SLOTS, Cost, Depths, Fault, Fleet, Harm, do_harm, fleet
from tests.fakes.load import Planned, Ran, Sent, plan, send, send_one
from tests.fakes.load_figures import (
    SAME_MOMENT_S,
    Window,
    begun_for_nobody,
    expected_depth,
    outside,
    overtaken,
    slot_seconds,
    used_share,
)

HOLD_S = 3.0  # mean service time: 36 s of a real answer, twelve times faster
QUEUE_MAX, QUEUE_TIMEOUT_S = 64, 20.0  # the node's defaults
RAMP_S = 3 * HOLD_S  # until every slot is taken
SHARE_MISSED_MAX = 0.03
FAILED_MAX = 3  # when a backend is frozen
ROUTED_AROUND_S = 2.0  # after it was noticed
GROWN_MIB, GROWN_FDS = 25.0, 8
SOCKETS_MAX = 2 * (SLOTS * len(MODELS) + 2)  # what ran there, of two nodes, and a poll and a probe of each
SLOWER_MS = 25.0  # a busy machine has moments of that length
PROBES = 15


@dataclass
class Verdict:
    """One bar: what was found, and whether it holds."""

    name: str
    found: str
    holds: bool


@dataclass
class Run:
    """Everything one run saw."""

    fault: Fault
    duration_s: float
    began_at: float = 0.0
    requests: list[Planned] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    depths: Depths = field(default_factory=Depths)
    harm: Harm = field(default_factory=lambda: Harm("none"))
    left_over: dict[str, str] = field(default_factory=dict)
    costs: dict[str, tuple[Cost, Cost]] = field(default_factory=dict)  # before and after
    ttfb_ms: tuple[float, float] = (0.0, 0.0)
    cpu_s: dict[str, float] = field(default_factory=dict)
    tracebacks: list[str] = field(default_factory=list)

    @property
    def full(self) -> Window:
        """While the fleet has more to do than it can."""
        return self.began_at + RAMP_S, self.began_at + self.duration_s

    @property
    def waiting(self) -> Window:
        """While the queues are as long as they get."""
        return self.began_at + min(QUEUE_TIMEOUT_S, self.duration_s / 2), self.began_at + self.duration_s


async def run(fault: Fault, args: argparse.Namespace) -> Run:
    seen = Run(fault, args.minutes * 60)
    # Nobody asks a node that hangs.
    entries = args.entries.split(",") if fault in ("none", "backend") else ["a", "b"]
    n_slots = SLOTS * len(MODELS) * len(NODES)
    seen.requests = plan(
        random.Random(args.seed),
        duration_s=seen.duration_s,
        per_s=args.factor * n_slots / HOLD_S,
        entries=entries,
        models=MODELS,
        hold_s=HOLD_S,
        leavers=args.leavers,
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        routing = f"queue_max: {QUEUE_MAX}, queue_timeout: {QUEUE_TIMEOUT_S:g}s"
        async with fleet(Path(name), routing) as nodes:
            before_ms = await probe(nodes, "before")
            await asyncio.sleep(SETTLE_S)
            costs = nodes.costs()
            await _load(seen, nodes, entries)
            seen.left_over = await nodes.idle()
            await asyncio.sleep(SETTLE_S)
            seen.costs = {n: (costs[n], cost) for n, cost in nodes.costs().items()}
            seen.ttfb_ms = before_ms, await probe(nodes, "after")
            seen.ran = nodes.ran()
            seen.tracebacks = [n for n, node in nodes.nodes.items() if "Traceback" in node.log]
            if args.logs:
                for node in nodes.nodes.values():
                    (args.logs / f"{fault}-{node.name}.log").write_text(node.log)
    return seen


async def _load(seen: Run, nodes: Fleet, entries: Sequence[str]) -> None:
    watcher = asyncio.create_task(seen.depths.watch(nodes, entries))
    harm = asyncio.create_task(
        do_harm(nodes, seen.fault, 0.4 * seen.duration_s, max(0.1 * seen.duration_s, 8.0))
    )
    own = psutil.Process()
    of_nodes = {name: psutil.Process(node.pid) for name, node in nodes.nodes.items()}
    cpu = {"clients": _cpu_s(own)} | {name: _cpu_s(process) for name, process in of_nodes.items()}
    machine_s, seen.began_at = _machine_s(), time.monotonic()
    seen.sent = await send(seen.requests, nodes.addresses)
    wall_s = time.monotonic() - seen.began_at
    seen.cpu_s = {
        "wall": wall_s,
        "machine": _machine_s() - machine_s,
        "clients": _cpu_s(own) - cpu["clients"],
    }
    for name, process in of_nodes.items():
        if process.is_running():
            seen.cpu_s[name] = _cpu_s(process) - cpu[name]
    seen.harm = await harm
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)


async def probe(nodes: Fleet, when: str) -> float:
    """Time to the first content, in ms, of requests that need no time: the quickest quarter stays under it.

    Others load the machine too, and slow some of them down; what the load left behind slows all.
    """
    times = []
    for n in range(PROBES * len(NODES)):
        entry, model = [*NODES][n % len(NODES)], MODELS[n % len(MODELS)]
        asked = Planned(f"{when}{n}", 0.0, entry, model, 0.001, 0.0, True, "")
        sent = await send_one(asked, nodes.addresses[entry])
        if not sent.served or sent.token_s is None:
            raise SystemExit(f"a request {when} the load was not served: {sent}")
        times.append(sent.token_s * 1000)
    return statistics.quantiles(times, n=4)[0]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _machine_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + times.nice + times.softirq


# -- verdicts --------------------------------------------------------------------------------------
def verdicts(seen: Run) -> list[Verdict]:
    answers = collections.Counter(outcome(one) for one in seen.sent)
    failed = [one for one in seen.sent if one.failed]
    may_fail = FAILED_MAX if seen.fault == "backend" else 0
    if seen.fault == "deaf":  # what ran on the node that died is lost
        may_fail = SLOTS * len(MODELS)
    found = [
        Verdict("failed requests", f"{len(failed)} {_counts(failed)}", len(failed) <= may_fail),
        Verdict(
            "503",
            str(sum(n for how, n in answers.items() if how.startswith("503"))),
            not any(how.startswith("503") for how in answers),
        ),
    ]
    share = used_share(_counted(seen), slot_seconds(*_slots(seen)), seen.full)
    found.append(Verdict("served / (capacity x time)", f"{share:.3f}", share >= 1 - SHARE_MISSED_MAX))
    passed = overtaken(seen.sent, seen.ran)
    worst = max((one.by_s for one in passed), default=0.0)
    found.append(Verdict("overtaken in their queue", f"{len(passed)}, by at most {worst:.1f} s", not passed))
    nobody = begun_for_nobody(seen.sent, seen.ran)
    found.append(Verdict("begun for clients that had left", str(len(nobody)), not nobody))
    clashes = sum(one.how == "clash" for one in seen.ran)
    found.append(Verdict("two requests in one slot", str(clashes), clashes == 0))
    unhinted = sum(one.refused and one.header("Retry-After") != "2" for one in seen.sent)
    found.append(Verdict("429 without Retry-After: 2", str(unhinted), unhinted == 0))
    found.append(
        Verdict("impossible counts of free slots", str(len(seen.depths.wrong)), not seen.depths.wrong)
    )
    found.append(
        Verdict("counters that did not return to zero", str(seen.left_over or 0), not seen.left_over)
    )
    for name, (before, after) in seen.costs.items():
        grown, fds = after.rss_mib - before.rss_mib, after.fds - before.fds
        text = f"{before.rss_mib:.0f} {grown:+.1f} MiB, {before.fds} {fds:+d} descriptors"
        same = seen.fault == "deaf" and name == "c"  # another process
        found.append(Verdict(f"growth of {name}", text, same or (grown <= GROWN_MIB and fds <= GROWN_FDS)))
    before_ms, after_ms = seen.ttfb_ms
    found.append(
        Verdict(
            "first content, before and after",
            f"{before_ms:.1f} ms, {after_ms:.1f} ms",
            after_ms < 2 * before_ms + SLOWER_MS,
        )
    )
    found.append(Verdict("nodes that logged a traceback", str(seen.tracebacks or 0), not seen.tracebacks))
    if seen.fault != "none":
        found += _of_the_fault(seen)
    return found


def _slots(seen: Run) -> tuple[int, Window, list[tuple[int, Window]]]:
    lost = {"none": 0, "backend": SLOTS}.get(seen.fault, SLOTS * len(MODELS))
    return SLOTS * len(MODELS) * len(NODES), seen.full, [(lost, seen.harm.gone)]


def _counted(seen: Run) -> list[Ran]:
    """What ran in slots that count."""
    if seen.fault == "none":
        return seen.ran
    others = [one for one in seen.ran if not _on_victim(one, seen.harm)]
    return [*others, *outside([one for one in seen.ran if _on_victim(one, seen.harm)], seen.harm.gone)]


def _on_victim(one: Ran, harm: Harm) -> bool:
    return f"{one.node} {one.model}/0".startswith(harm.victim)


def _of_the_fault(seen: Run) -> list[Verdict]:
    harm = seen.harm
    found = [
        Verdict("noticed after", _seconds(harm.noticed_s), harm.noticed_s is not None),
        Verdict("back after its end", _seconds(harm.back_s), harm.back_s is not None),
    ]
    if harm.noticed_s is not None:
        around = harm.began_at + harm.noticed_s + ROUTED_AROUND_S, harm.ended_at
        # What is sent to a victim that stands still lies in its socket, and is begun when it goes on.
        lay = {r.tag for r in seen.ran if 0 <= r.started_at - harm.ended_at < SAME_MOMENT_S}
        late = sum(
            one.planned.tag in lay
            and _place(one).startswith(harm.victim)
            and around[0] < one.sent_at + one.queued_s < around[1]
            for one in seen.sent
        )
        found.append(Verdict("sent there though noticed", str(late), late == 0))
    after = sum(r.started_at > harm.gone[1] and _on_victim(r, harm) for r in seen.ran)
    found.append(Verdict("served there afterwards", str(after), after > 0))
    return found


def _place(one: Sent) -> str:
    return f"{one.header('X-Viiwork-Node')} {one.header('X-Gpu-Backend')}"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def outcome(one: Sent) -> str:
    if one.end == "whole":
        return f"{one.status} {one.code}".strip()
    return f"{one.end} {one.status or ''}".strip()


def _counts(some: Sequence[Sent]) -> str:
    return str(dict(collections.Counter(map(outcome, some)))) if some else ""


# -- showing ---------------------------------------------------------------------------------------
def show(seen: Run, found: Sequence[Verdict]) -> None:
    print(f"\n== fault: {seen.fault}, {seen.duration_s:.0f} s, {len(seen.sent)} requests")
    for entry in NODES:
        here = [one for one in seen.sent if one.planned.entry == entry]
        if here:
            print(f"  entered at {entry}: {_counts(here)}")
    done = [one for one in seen.sent if one.served]
    hold_s = statistics.mean(one.planned.hold_s for one in done) if done else HOLD_S
    possible = slot_seconds(SLOTS * len(MODELS) * len(NODES), (0, seen.duration_s)) / hold_s
    print(f"  served {len(done)}; {possible:.0f} answers of their mean length fit into the time of the load")
    forwarded = sum(one.header("X-Viiwork-Node") != one.planned.entry for one in done)
    print(f"  forwarded {forwarded}, queued {sum(one.queued_s > 0 for one in done)}")
    expected = expected_depth(seen.requests, seen.duration_s, QUEUE_MAX, QUEUE_TIMEOUT_S)
    depths = seen.depths.mean(seen.waiting)
    queues = ", ".join(f"{n}/{m} {depth:.0f} ({expected[n, m]:.0f})" for (n, m), depth in depths.items())
    print(f"  queues, and as long as expected: {queues}")
    late_ms = max((one.late_s for one in seen.sent), default=0.0) * 1000
    cpu = seen.cpu_s
    print(
        f"  CPU: clients {100 * cpu['clients'] / cpu['wall']:.1f} % of a core "
        f"({100 * cpu['clients'] / cpu['machine']:.1f} % of all that the machine did), "
        + ", ".join(f"{n} {100 * cpu[n] / cpu['wall']:.1f} %" for n in NODES if n in cpu)
        + f"; a request was sent at most {late_ms:.0f} ms late"
    )
    for one in found:
        print(f"  {'ok  ' if one.holds else 'MISS'} {one.name}: {one.found}")


def as_json(seen: Run, found: Sequence[Verdict]) -> dict[str, Any]:
    depths = seen.depths.mean(seen.waiting)
    return {
        "fault": seen.fault,
        "duration_s": seen.duration_s,
        "outcomes": collections.Counter(map(outcome, seen.sent)),
        "queues": {f"{n}/{m}": depth for (n, m), depth in depths.items()},
        "cpu_s": seen.cpu_s,
        "verdicts": [asdict(one) for one in found],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of load in each run")
    parser.add_argument("--factor", type=float, default=2.0, help="arrivals, in multiples of the capacity")
    parser.add_argument("--faults", default="none,backend", help="runs to make: none, backend, node, deaf")
    parser.add_argument("--entries", default=",".join(NODES), help="nodes that clients ask")
    parser.add_argument("--leavers", type=float, default=0.0, help="share of clients that wait 5 s at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="a folder for the nodes' logs")
    args = parser.parse_args()
    if not set(args.entries.split(",")) <= NODES.keys():
        parser.error(f"--entries: expected some of {', '.join(NODES)}, not {args.entries!r}")
    results, hold = [], True
    for fault in args.faults.split(","):
        if fault not in ("none", "backend", "node", "deaf"):
            parser.error(f"--faults: {fault!r} is none of none, backend, node, deaf")
        seen = uvloop.run(run(fault, args))
        found = verdicts(seen)
        show(seen, found)
        results.append(as_json(seen, found))
        hold = hold and all(one.holds for one in found)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    return 0 if hold else 1


if __name__ == "__main__":
    sys.exit(main())
