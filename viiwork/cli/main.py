"""The `viiwork` command: parses the command line, runs one command, turns errors into one line and a code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from viiwork.cli import alias, bench, check, demo, down, replay, serve
from viiwork.config.fault import printable
from viiwork.errors import UsageError, ViiworkError
from viiwork.mesh.notices import one_line
from viiwork.version import VERSION

COMMANDS = (serve, check, down, alias, replay, demo, bench)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{one_line(message)} (see '{self.prog} --help')")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="viiwork",
        description="Run a few GPU machines as one OpenAI-compatible endpoint.",
        epilog="Exit codes: 0 all is well, 1 it failed, 2 the command line or the config file is wrong.",
    )
    parser.add_argument("--version", action="version", version=f"viiwork {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the answer is the exit code."""
    try:
        args = build_parser().parse_args(argv)
        return int(args.run(args))
    except ViiworkError as error:
        print(f"viiwork: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
