"""What a routing decision costs: CPU time and instructions, with 16 hosts and 1,000 sessions.

    python bench/routing/decide.py [--hosts 16] [--sessions 1000] [--rounds 7] [--json FILE]

Each case asks `core.router.choose` for turns of all sessions in turn, over a node whose peers have reported
their room, their speed and what they hold of the conversations. The best round of CPU time counts, for the
machine is shared. Instructions come from `perf_event_open`, where the kernel gives them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport, Perf
from viiwork.core.choice import Policy
from viiwork.core.holdings import Holding
from viiwork.core.peers import PeerTable
from viiwork.core.receipts import Receipts
from viiwork.core.router import Terms, View, choose
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.turn import Ask, Chain
from viiwork.node.sessions import NodeSessions

BAR_US = 50.0
N_LINKS = 40  # messages of a conversation
NOW = 100.0
Case = tuple[View, list[Ask]]


def mesh(n_hosts: int, n_sessions: int, *, policy: Policy, is_full: bool = False) -> Case:
    """A node with 4 slots, its peers with as many, and sessions spread over all of them."""
    rng = random.Random(7)
    slots, peers, book = SlotTable(), PeerTable(3.0), NodeSessions("host-00", 0)
    slots.put_backend("m/0", model="m", url="http://e", n_slots=4, routable=True)
    names = [f"host-{n:02}" for n in range(n_hosts)]
    asks, held = [], {name: [] for name in names}
    for n in range(n_sessions):
        session, links = f"{n:032x}", tuple(f"{rng.getrandbits(64):016x}" for _ in range(N_LINKS))
        tip, home = links[-3], names[n % n_hosts]
        held[home].append(Holding(session, "m", tip, "", 9000 + n, "slot", n, "m/0"))
        if n % 4 == 0:
            copy = names[(n + 1) % n_hosts]
            held[copy].append(Holding(session, "m", tip, "", 9000 + n, "replica", n))
        if home == names[0] and n // n_hosts < 4:
            book.table.ran_here(
                (session, "m"), Binding(home, SlotRef("m/0", n // n_hosts), 9000, n, tip), NOW
            )
        chain = Chain(links, tuple(1000 * (i + 1) for i in range(N_LINKS)))
        asks.append(Ask(f"{n:016x}", "m", session, session, chain=chain, body_bytes=40_000))
    for n, name in enumerate(names[1:], 1):
        peers.put(name, f"http://{name}")
        perf = Perf(100.0 + n, 1000.0 + 20 * n, 9)
        entry = ModelCapacity(
            "m", slots=4, busy=4 if is_full else n % 4, backends=1, healthy_backends=1, perf=perf
        )
        peers.reported(name, PeerReport(CapacityReport(name, "1", (entry,)), NOW, NOW, 0.001))
        book.reported(name, tuple(held[name][:256]), NOW)
    view = View(
        "host-00", slots, book.table, peers, policy, book.held, lambda model, now: Perf(100.0, 1000.0, 9)
    )
    if is_full:
        for slot in range(4):
            slots.lease(SlotRef("m/0", slot))
    return view, asks


def cases(n_hosts: int, n_sessions: int) -> Iterator[tuple[str, Case]]:
    yield "sessions, scored", mesh(n_hosts, n_sessions, policy=Policy())
    yield "sessions, all hosts full", mesh(n_hosts, n_sessions, policy=Policy(), is_full=True)
    view, asks = mesh(n_hosts, n_sessions, policy=Policy())
    yield (
        "no session",
        (view, [msgspec.structs.replace(ask, session=None, session_key=None, chain=None) for ask in asks]),
    )
    yield (
        "new sessions",
        (
            view,
            [msgspec.structs.replace(ask, session=f"{n:x}", chain=None) for n, ask in enumerate(asks, 10**6)],
        ),
    )
    yield "performance: false", mesh(n_hosts, n_sessions, policy=Policy(performance=False))
    yield "one node alone, with its receipt", mesh(1, n_sessions, policy=Policy())


def run(case: Case, with_receipt: bool) -> Callable[[], None]:
    view, asks = case
    receipts = Receipts()

    def all_of_them() -> None:
        for ask in asks:
            decided = choose(view, ask, Terms(NOW + 0.5, 0.0, 20_000.0, (0.5, 0.5)))
            if with_receipt:
                receipts.add(ask, NOW, decided.question, decided.choice)

    return all_of_them


@contextmanager
def instructions() -> Iterator[Callable[[], int | None]]:
    """Counts this process's user-space instructions; None where the kernel has no such counter."""
    numbers = {"x86_64": 298, "aarch64": 241}
    attr = bytearray(128)
    struct.pack_into("IIQQQQQ", attr, 0, 0, 128, 1, 0, 0, 0, (1 << 5) | (1 << 6))  # no kernel, no hypervisor
    libc = ctypes.CDLL(None, use_errno=True)
    fd = -1
    if os.uname().machine in numbers:
        buffer = (ctypes.c_char * 128).from_buffer(attr)
        fd = libc.syscall(numbers[os.uname().machine], buffer, 0, -1, -1, 0)
    try:
        yield lambda: struct.unpack("Q", os.read(fd, 8))[0] if fd >= 0 else None
    finally:
        if fd >= 0:
            os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    with instructions() as count:
        for name, case in cases(args.hosts, args.sessions):
            work = run(case, "receipt" in name)
            work()  # caches of names and sessions are warm in a node too
            best_us, executed = float("inf"), None
            gc.disable()
            for _ in range(args.rounds):
                before, started = count(), time.process_time_ns()
                work()
                spent, after = time.process_time_ns() - started, count()
                best_us = min(best_us, spent / 1000 / args.sessions)
                if before is not None and after is not None:
                    executed = min(executed or after, (after - before) // args.sessions)
            gc.enable()
            rows.append({"case": name, "cpu_us": round(best_us, 2), "instructions": executed})
            shown = "" if executed is None else f"{executed:>12,} instructions"
            print(f"{name:36} {best_us:8.2f} us{shown}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"hosts": args.hosts, "sessions": args.sessions, "rows": rows}, file, indent=2)
    worst = max(row["cpu_us"] for row in rows)
    print(f"worst {worst:.1f} us of {BAR_US:.0f} us: {'met' if worst <= BAR_US else 'MISSED'}")
    return 0 if worst <= BAR_US else 1


if __name__ == "__main__":
    raise SystemExit(main())
