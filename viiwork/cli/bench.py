"""`viiwork bench`: what a faster link would buy, measured."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import NoReturn

from viiwork.cli import bench_options
from viiwork.cli.control import add_secret_arguments, secrets_of
from viiwork.errors import UsageError
from viiwork.limits import (
    BENCH_PORT,
    BENCH_RUNS,
    BENCH_RUNS_MAX,
    BENCH_SIZE_BYTES,
    BENCH_SIZE_MAX_BYTES,
    BENCH_SIZE_MIN_BYTES,
    GIB,
    KIB,
    MIB,
)
from viiwork.mesh.notices import one_line

_SIZE = re.compile(r"([0-9]{1,15})(KiB|MiB|GiB)?", re.ASCII)
_UNITS = {None: 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure what a link is worth to kv_share",
        description="Measure links as kv_share uses them, between two hosts or in a lab on this one.",
    )
    kinds = parser.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", required=True, parser_class=type(parser)
    )
    _add_kvshare(kinds)
    bench_options.add_compare(kinds)


def _add_kvshare(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "kvshare",
        help="how fast a session's state moves, on every path, and where the time goes",
        description="Start it with --listen on one host and with --to HOST on the other; or with --lab, as "
        "root on Linux, on one machine. Nothing is left behind on either host.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--listen", action="store_true", help="be the other end until Ctrl-C")
    what.add_argument("--to", type=_host, metavar="HOST[:PORT]", help="measure every path to this host")
    what.add_argument("--lab", action="store_true", help="two network namespaces and four shaped links")
    parser.add_argument(
        "--port", type=_port, default=BENCH_PORT, help="where to listen (default: %(default)s)"
    )
    parser.add_argument(
        "--size",
        type=_size,
        default=BENCH_SIZE_BYTES,
        metavar="SIZE",
        help="of the delta that is sent, such as 64MiB (default: 247MiB)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="with --listen: end when one host is done, none comes, or standard input ends",
    )
    parser.add_argument("--file", type=Path, metavar="SAVEFILE", help="send this slot save-file instead")
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where states are made (default: the system's folder), with --listen kept (default: memory)",
    )
    parser.add_argument(
        "--runs",
        type=_runs,
        metavar="N",
        help=f"rounds, each with every way to send (default: {BENCH_RUNS}); of a workload, runs (default: 1)",
    )
    parser.add_argument(
        "--overlay", choices=("wireguard-go",), help="in the lab: a real tunnel where one is emulated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them to FILE.png or FILE.svg")
    add_secret_arguments(parser)
    bench_options.add_workload(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Only this command needs what it measures with.
    from viiwork.cli import bench_kvshare

    signal.signal(signal.SIGTERM, _on_term)
    if args.workload:
        return _workload(args)
    args.runs = args.runs or BENCH_RUNS
    if args.lab:
        return bench_kvshare.lab(args)
    keys = secrets_of(args, os.environ)
    try:
        end = bench_kvshare.listen if args.listen else bench_kvshare.link
        return asyncio.run(_until_term(end(args, keys)))
    except KeyboardInterrupt:
        return 0 if args.listen else 130
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def _workload(args: argparse.Namespace) -> int:
    from viiwork.cli import bench_workload

    if args.listen:
        raise UsageError("--workload goes with --lab, or with --to HOST where a node runs on both hosts")
    try:
        return bench_workload.lab(args) if args.lab else asyncio.run(bench_workload.at_nodes(args))
    except KeyboardInterrupt:
        return 130


async def _until_term(work: Coroutine[None, None, int]) -> int:
    """SIGTERM cancels the work: an exception out of the blue would leave half-started processes."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def _on_term(_signal: int, _frame: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _host(text: str) -> tuple[str, int]:
    """`host`, `host:port`, an IPv6 address bare or as `[ip]:port`; 0 = no port was said."""
    host, port = text, 0
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise argparse.ArgumentTypeError(f"expected host[:port], got {one_line(text)[:64]!r}")
        port = _port(rest[1:]) if rest else 0
    elif text.count(":") == 1:
        host, _, said = text.partition(":")
        port = _port(said)
    if not host or len(host) > 253 or not host.isprintable() or any(c.isspace() for c in host):
        raise argparse.ArgumentTypeError(f"expected host[:port], got {one_line(text)[:64]!r}")
    return host, port


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {one_line(text)[:64]!r}")


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if BENCH_SIZE_MIN_BYTES <= size <= BENCH_SIZE_MAX_BYTES:
        return size
    most = f"{BENCH_SIZE_MIN_BYTES // MIB}MiB to {BENCH_SIZE_MAX_BYTES // GIB}GiB"
    raise argparse.ArgumentTypeError(f"expected a size from {most}, got {one_line(text)[:64]!r}")


def _runs(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 6 and 0 < int(text) <= BENCH_RUNS_MAX:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected 1 to {BENCH_RUNS_MAX} runs, got {one_line(text)[:64]!r}")
