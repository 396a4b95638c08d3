"""`viiwork check`: validate a config file and print the config in effect."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path

from viiwork.config.load import LoadedConfig, default_config_path, load_config
from viiwork.config.preflight import startup_problems
from viiwork.config.render import effective_yaml
from viiwork.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="validate a config file and print the config in effect",
        description="Validates a config file. A valid one is printed with every default filled in (exit 0) "
        "and what is doubtful goes to standard error; of a wrong one the first fault is named (exit 2).",
    )
    default = default_config_path()
    parser.add_argument("--config", type=Path, default=default, metavar="PATH", help=f"default {default}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        loaded = load_config(args.config, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for line in (*loaded.warnings, *startup_problems(loaded.config)):
        print(f"warning: {line}", file=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # what is printed is a config file, and those are UTF-8
    sys.stdout.write(f"# mesh: {_mode(loaded)}\n{effective_yaml(loaded.config)}")
    return 0


def _mode(loaded: LoadedConfig) -> str:
    mesh, secrets = loaded.config.mesh, loaded.secrets
    if secrets.current is None:
        return "open"
    rotating = f", the previous one from {mesh.secret_prev_env}" if secrets.previous else ""
    return f"secured by the secret from {mesh.secret_env}{rotating}"
