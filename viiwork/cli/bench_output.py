"""Where the results of benchmarks go: the terminal, `--json FILE`, `--plot FILE`."""

from __future__ import annotations

import argparse
import os

from rich.console import Console, RenderableType

from viiwork.bench.plot import check_plot, plot
from viiwork.bench.report import report_of
from viiwork.bench.results import Results, encode_results
from viiwork.errors import UsageError

_TABLE_CHARS = 120  # what the widest table takes


def check_outputs(args: argparse.Namespace) -> None:
    """Raises `UsageError` for files that cannot be written: told before anything is measured."""
    if args.dir is not None and not args.dir.is_dir():
        raise UsageError(f"--dir: there is no folder {args.dir}")
    if args.plot is not None:
        check_plot(args.plot)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is None:
            continue
        where = path if path.exists() else path.absolute().parent
        if path.is_dir() or not where.exists() or not os.access(where, os.W_OK):
            raise UsageError(f"{option}: {path} cannot be written")


def put_out(args: argparse.Namespace, results: Results) -> None:
    """To the terminal, and to the files that were asked for."""
    show(report_of(results))
    if args.json is not None:
        args.json.write_bytes(encode_results(results))
    if args.plot is not None:
        plot(results, args.plot)


def show(tables: RenderableType) -> None:
    """A figure that is cut short tells nothing, so a narrow terminal folds lines."""
    Console(width=max(Console().width, _TABLE_CHARS)).print(tables, soft_wrap=True)
