"""`viiwork alias`: the mesh's own names for models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from viiwork.cli.alias_wait import members_that_know
from viiwork.cli.control import ControlClient, add_control_arguments
from viiwork.core.aliases import Entries, alias_name_problem
from viiwork.errors import BadAliases, NodeRefused, NodeUnreachable, UnknownAlias, UsageError
from viiwork.limits import ALIAS_FILE_MAX_BYTES
from viiwork.mesh.notices import one_line
from viiwork.wire.aliases import decode_table, rfc3339

PATH = "/v1/aliases"
_T = TypeVar("_T")
Run = Callable[[argparse.Namespace, ControlClient], int]


class _Alias(msgspec.Struct):
    """One alias of the list."""

    name: str
    target: str
    fallbacks: list[str]
    updated_at: str
    updated_by: str
    resolved: str | None
    state: str


class _Aliases(msgspec.Struct):
    aliases: list[_Alias]


class _Entry(msgspec.Struct):
    target: str
    ver: int
    deleted: bool


class _Written(msgspec.Struct):
    """The answer to a write."""

    name: str
    entry: _Entry


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "alias",
        help="give models names that hold in the whole mesh",
        description="An alias is a name for a model that every node of the mesh understands. When nobody "
        "serves its target, it stands for the first of its fallbacks that somebody serves.",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=type(parser))

    def verb(word: str, does: Run, helped: str, *, writes: bool = False) -> argparse.ArgumentParser:
        sub = verbs.add_parser(word, help=helped, description=helped[0].upper() + helped[1:] + ".")
        add_control_arguments(sub)
        if writes:
            sub.add_argument(
                "--wait",
                action=argparse.BooleanOptionalAction,
                default=True,
                help="wait up to --timeout until all members know it, and say how many do",
            )
        sub.set_defaults(run=lambda args: does(args, ControlClient.from_args(args)))
        return sub

    def name(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("name", type=_name, metavar="NAME", help="the alias")

    verb("ls", _ls, "list the aliases and what they stand for now")
    sub = verb("set", _set, "make or change an alias", writes=True)
    name(sub)
    sub.add_argument("target", metavar="TARGET", help="name of the model it stands for")
    sub.add_argument(
        "--fallback",
        action="append",
        default=[],
        metavar="MODEL",
        help="the model to take while nobody serves the target; may be given several times, in order",
    )
    sub.add_argument("--force", action="store_true", help="also for models that nobody serves yet")
    name(verb("rm", _rm, "remove an alias", writes=True))
    name(verb("revert", _revert, "set an alias to what it was before; twice undoes it", writes=True))
    name(verb("history", _history, "show what an alias was set to, newest first"))
    verb("export", _export, "print the table as JSON, for import")
    sub = verb(
        "import", _import, "set every alias of an exported file; removed ones are left out", writes=True
    )
    sub.add_argument("file", metavar="FILE", help="the exported file, - for standard input")


# -- verbs -----------------------------------------------------------------------------------------
def _ls(args: argparse.Namespace, client: ControlClient) -> int:
    rows = [
        (a.name, a.target, ", ".join(a.fallbacks), a.resolved or "", a.state, a.updated_at, a.updated_by)
        for a in _list(client)
    ]
    _print(("NAME", "TARGET", "FALLBACKS", "RESOLVED", "STATE", "UPDATED", "BY"), rows)
    return 0


def _set(args: argparse.Namespace, client: ControlClient) -> int:
    body = {"target": args.target, "fallbacks": args.fallback, "force": args.force}
    return _written(args, client, client.send("PUT", _path(args.name), body))


def _rm(args: argparse.Namespace, client: ControlClient) -> int:
    return _written(args, client, client.send("DELETE", _path(args.name)))


def _revert(args: argparse.Namespace, client: ControlClient) -> int:
    return _written(args, client, client.send("POST", f"{_path(args.name)}/revert"))


def _history(args: argparse.Namespace, client: ControlClient) -> int:
    entry = _entries(client).get(args.name)
    if entry is None:
        raise UnknownAlias(f"there is no alias {args.name!r}")
    rows = [
        (str(w.ver), w.target or "(removed)", ", ".join(w.fallbacks), rfc3339(w.ts_ms), w.by)
        for w in entry.writes
    ]
    _print(("VER", "TARGET", "FALLBACKS", "UPDATED", "BY"), rows)
    return 0


def _export(args: argparse.Namespace, client: ControlClient) -> int:
    print(json.dumps(client.get(f"{PATH}?table=1"), indent=2))
    return 0


def _import(args: argparse.Namespace, client: ControlClient) -> int:
    entries = {name: e.current for name, e in _read(args.file).items() if not e.deleted}
    vers: dict[str, int] = {}
    for name, write in entries.items():
        body = {"target": write.target, "fallbacks": write.fallbacks, "force": True}
        try:
            answer = client.send("PUT", _path(name), body)
        except NodeRefused as error:
            if error.status in (401, 403):
                raise  # as it will be for each of them
            print(f"viiwork: {name}: {error}", file=sys.stderr)
            continue
        vers[name] = _as(_Written, answer, client).entry.ver
    line = f"imported {len(vers)} of {len(entries)}"
    print(line)
    _wait(args, client, vers, line)
    return 0 if len(vers) == len(entries) else 1


# -- after a write -----------------------------------------------------------------------------------
def _written(args: argparse.Namespace, client: ControlClient, answer: Any) -> int:
    """Say what was written, and then how far it came; how far does not change the exit code."""
    written = _as(_Written, answer, client)
    name, entry = one_line(written.name), written.entry
    if entry.deleted:
        print(line := f"{name} removed (ver {entry.ver})")
    else:
        print(f"{name} -> {one_line(entry.target)} (ver {entry.ver})")
        line = f"{name} -> {_resolved(client, written.name)} (ver {entry.ver})" if args.wait else ""
    _wait(args, client, {written.name: entry.ver}, line)
    return 0


def _resolved(client: ControlClient, name: str) -> str:
    alias = next((a for a in _list(client) if a.name == name), None)
    return one_line((alias.resolved or alias.state) if alias is not None else "removed")


def _wait(args: argparse.Namespace, client: ControlClient, vers: Mapping[str, int], line: str) -> None:
    if args.wait and vers:
        sys.stdout.flush()
        know, alive = members_that_know(client, vers, args.timeout)
        print(f"{line}: {know}/{alive} alive members")


# -- reading ---------------------------------------------------------------------------------------
def _list(client: ControlClient) -> list[_Alias]:
    return _as(_Aliases, client.get(PATH), client).aliases


def _entries(client: ControlClient) -> Entries:
    try:
        return decode_table(json.dumps(client.get(f"{PATH}?table=1")).encode())
    except BadAliases as error:
        raise NodeUnreachable(
            f"{client.address} has no alias table to show: {one_line(str(error))}"
        ) from None


def _read(file: str) -> Entries:
    """The table in an exported file. Raises `UsageError`."""
    try:
        if file == "-":
            data = sys.stdin.buffer.read(ALIAS_FILE_MAX_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(ALIAS_FILE_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UsageError(f"{one_line(file)} cannot be read: {one_line(reason)}") from None
    if len(data) > ALIAS_FILE_MAX_BYTES:
        raise UsageError(f"{one_line(file)} is larger than {ALIAS_FILE_MAX_BYTES} bytes")
    try:
        return decode_table(data)
    except BadAliases as error:
        raise UsageError(f"{one_line(file)} cannot be imported: {one_line(str(error))}") from None


def _as(kind: type[_T], answer: Any, client: ControlClient) -> _T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError:
        raise NodeUnreachable(f"what answers at {client.address} is no node of this version") from None


def _path(name: str) -> str:
    return f"{PATH}/{quote(name, safe='')}"


def _name(text: str) -> str:
    if problem := alias_name_problem(text):
        raise argparse.ArgumentTypeError(f"{one_line(text)[:64]!r} is no alias name, which {problem}")
    return text


# -- printing --------------------------------------------------------------------------------------
def _print(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    # Only here, so that every other command starts without it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))  # not markup: names may hold brackets
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # a line a row for whoever reads it by program
    console.print(table)
