"""`viiwork demo`: two nodes on this machine, and what a session's move between them costs cold and warm."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="two nodes on this machine and a session that moves between them",
        description="Start two nodes on 127.0.0.1 and 127.0.0.2 with a small real model, move a session from "
        "one to the other cold and warm, and show what it cost. The mesh stays up until Ctrl-C.",
    )
    parser.add_argument(
        "--exit", action="store_true", help="end after the table instead of waiting for Ctrl-C"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument(
        "--model", type=Path, metavar="GGUF", help="use this chat model instead of SmolLM2-135M"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Only this command needs the terminal's library and an HTTP client: a node is smaller without them.
    from rich.console import Console

    from viiwork.cli.demo_story import tell

    return asyncio.run(tell(args, Console()))
