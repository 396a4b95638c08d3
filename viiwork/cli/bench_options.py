"""The options of `viiwork bench kvshare --workload` and `viiwork bench compare`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from viiwork.limits import (
    AGENTS_MAX,
    KV_STALL_SHARE_MIN,
    WORKLOAD_MINUTES_MAX,
    WORKLOAD_SCALE,
    WORKLOAD_SCALE_MAX,
    WORKLOAD_SPEED,
    WORKLOAD_SPEED_MAX,
)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The options of `--workload`."""
    group = parser.add_argument_group("workload", "coding agents at two nodes, instead of single states")
    group.add_argument(
        "--workload",
        action="store_true",
        help="with --lab: two nodes of its own; with --to HOST: this machine's node and the one there",
    )
    group.add_argument(
        "--sessions",
        type=_sessions,
        default=(16,),
        metavar="N,...",
        help="agents, such as 12,16 (default: 16)",
    )
    group.add_argument(
        "--minutes",
        type=_number(WORKLOAD_MINUTES_MAX),
        default=3.0,
        metavar="M",
        help="of each run, beside the time in which all begins (default: 3; the published study ran 90)",
    )
    group.add_argument("--seed", type=_seed, default=1, metavar="N", help="of all agents (default: 1)")
    group.add_argument(
        "--speed",
        type=_number(WORKLOAD_SPEED_MAX),
        default=WORKLOAD_SPEED,
        metavar="X",
        help="simulated engines, think times and links run so many times faster (default: %(default)g)",
    )
    group.add_argument(
        "--scale",
        type=_scale,
        default=WORKLOAD_SCALE,
        metavar="N",
        help="simulated states and links are so many times smaller (default: %(default)d)",
    )
    group.add_argument(
        "--model",
        metavar="GGUF|NAME",
        help="in the lab: a real engine with this model file; between nodes: which of their models; without "
        "--workload: a real engine of this host makes the state, and imports it",
    )
    group.add_argument(
        "--stall-share",
        type=_share,
        metavar="X",
        help="in the lab: kv_share.stall_share of the nodes (default: theirs, 0.05)",
    )
    group.add_argument(
        "--context", type=_context, default=None, metavar="TOKENS", help="of a slot (default: 65536)"
    )


def add_compare(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "compare",
        help="what differs between two results by more than chance",
        description="Compare two files that --json wrote, phase by phase.",
    )
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    # Only this command needs it.
    from viiwork.cli import bench_workload

    return bench_workload.compare(args)


def _sessions(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if all(part.isascii() and part.isdigit() and 0 < int(part[:6]) <= AGENTS_MAX for part in parts):
        return tuple(int(part) for part in dict.fromkeys(parts))
    raise argparse.ArgumentTypeError(f"expected numbers from 1 to {AGENTS_MAX}, such as 12,16")


def _number(most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if 0 < value <= most:
            return value
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most {most:g}")

    return parse


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if KV_STALL_SHARE_MIN <= value <= 1.0:
        return value
    raise argparse.ArgumentTypeError(f"expected a share of the time from {KV_STALL_SHARE_MIN} to 1")


def _seed(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    raise argparse.ArgumentTypeError("expected a whole number")


def _scale(text: str) -> int:
    powers = [1 << n for n in range(WORKLOAD_SCALE_MAX.bit_length())]
    if text.isascii() and text.isdigit() and int(text[:6]) in powers:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a power of two up to {WORKLOAD_SCALE_MAX}")


def _context(text: str) -> int:
    if text.isascii() and text.isdigit() and 1024 <= int(text[:9]) <= 1 << 22:
        return int(text)
    raise argparse.ArgumentTypeError("expected 1024 tokens or more")
