"""`viiwork serve`: run the node of this machine."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path

import uvloop

from viiwork.cli.logs import FORMATS, set_up_logging
from viiwork.config.load import default_config_path, load_config


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="run the node of this machine",
        description="Run the node: supervise its engines, join the mesh, serve the API until SIGTERM.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=default_config_path(),
        metavar="PATH",
        help="the node's config file (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="lines for people, or one JSON object each (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Held until the node listens to it: its default action would end the process in the middle of its start.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # Only `serve` needs the whole node; the other commands stay light.
    from viiwork.node.node import Node

    set_up_logging(debug=os.environ.get("VIIWORK_DEBUG") == "1", log_format=args.log_format)
    loaded = load_config(args.config, os.environ)
    for warning in loaded.warnings:
        logging.getLogger("viiwork.config").warning("%s", warning)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Node(loaded).run())
