"""`viiwork down` and `viiwork up`: take models of a node out of service for a while, and back."""

from __future__ import annotations

import argparse
from typing import Any

from viiwork.cli.control import ControlClient, add_control_arguments
from viiwork.errors import NodeUnreachable
from viiwork.mesh.notices import one_line

_TEXTS = {
    ("down", True): "parked",
    ("down", False): "was parked already",
    ("up", True): "in service",
    ("up", False): "was in service already",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for word, helped, description in (
        (
            "down",
            "park models of a running node",
            "Parks models: their engines end once the running requests are done, and new ones go to "
            "other nodes. Without names all models of the node. It lasts until `viiwork up` or a restart.",
        ),
        (
            "up",
            "take parked models back into service",
            "Starts the engines of parked models again. Without names all models of the node.",
        ),
    ):
        parser = commands.add_parser(word, help=helped, description=description)
        add_control_arguments(parser)
        parser.add_argument("models", nargs="*", metavar="MODEL", help="name of a model of the node")
        parser.set_defaults(run=run, word=word)


def run(args: argparse.Namespace) -> int:
    client = ControlClient.from_args(args)
    answer = client.send("POST", f"/v1/models/{args.word}", {"models": args.models} if args.models else {})
    for line in _lines(answer, args.word, client.address):
        print(line)
    return 0


def _lines(answer: Any, word: str, address: str) -> list[str]:
    """`<host>  <model>  <text>` for each model of the answer."""
    try:
        host = _text(answer["node"])
        rows = [(_text(model["name"]), _TEXTS[word, model["changed"]]) for model in answer["models"]]
    except (KeyError, TypeError):
        raise NodeUnreachable(f"what answers at {address} is no node of this version") from None
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{host}  {name:<{width}}  {text}" for name, text in rows]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return one_line(value)
