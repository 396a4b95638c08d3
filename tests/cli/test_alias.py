"""`viiwork alias` against a real alias table behind the real API."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.node import Api, FakeDispatcher, FakeFacts, serving
from viiwork.api.aliases import AliasApi
from viiwork.api.routes import GET, Route
from viiwork.api.server import json_answer
from viiwork.cli import control
from viiwork.cli.alias_wait import members_that_know
from viiwork.cli.control import ControlClient, add_control_arguments
from viiwork.cli.main import main
from viiwork.core.aliases import Entry, Write
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.node.alias_store import AliasStore
from viiwork.node.aliases import Aliases

NOW = 1_800_000_000_123


class Facts(FakeFacts):
    """Names members in its status."""

    members: tuple[tuple[str, str, str], ...] = ()  # name, api, state

    def status(self) -> dict[str, Any]:
        me = ("a", "127.0.0.1:1", "alive")
        members = [{"node": n, "api": a, "state": s} for n, a, s in (me, *self.members)]
        return {"node": "a", "mesh": {"members": members}}


class Node:
    """One node's table, and the command line that talks to it."""

    def __init__(self, folder: Path) -> None:
        self.models = {"qwen", "gemma"}
        self.aliases = Aliases(
            "a",
            AliasStore.open(folder, NOW),
            known=self.models.__contains__,
            served=self.models.__contains__,
            now_ms=lambda: NOW,
        )
        self.facts = Facts()
        self.api: Api

    async def __call__(self, verb: str, *argv: str) -> int:
        node = ["--node", f"127.0.0.1:{self.api.port}"]
        return await asyncio.to_thread(main, ["alias", verb, *node, *argv])


@pytest.fixture(autouse=True)
def no_config_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "default_config_path", lambda: tmp_path / "default.yaml")
    monkeypatch.delenv("VIIWORK_MESH_SECRET", raising=False)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    routes = AliasApi(node.aliases).routes()
    origins = MeshOrigins("a", (), PeerClient("a", ()), lambda name: None)  # an open mesh
    async with serving(FakeDispatcher([]), facts=node.facts, routes=routes, origins=origins) as node.api:
        yield node


async def test_an_alias_is_set_listed_changed_reverted_and_removed(node, capsys):
    assert await node("set", "fast", "qwen", "--fallback", "gemma") == 0
    assert capsys.readouterr().out == "fast -> qwen (ver 1)\nfast -> qwen (ver 1): 1/1 alive members\n"
    node.models.remove("qwen")
    assert await node("ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["NAME", "TARGET", "FALLBACKS", "RESOLVED", "STATE", "UPDATED", "BY"],
        ["fast", "qwen", "gemma", "gemma", "fallback", "2027-01-15T08:00:00.123Z", "a"],
    ]
    assert await node("set", "--fallback", "qwen", "fast", "--force", "gemma", "--no-wait") == 0
    assert capsys.readouterr().out == "fast -> gemma (ver 2)\n"
    assert await node("revert", "fast") == 0
    assert capsys.readouterr().out.endswith("fast -> gemma (ver 3): 1/1 alive members\n")
    assert await node("rm", "fast") == 0
    assert capsys.readouterr().out == "fast removed (ver 4)\nfast removed (ver 4): 1/1 alive members\n"
    assert await node("history", "fast") == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["VER", "TARGET"], ["4", "(removed)"], ["3", "qwen"], ["2", "gemma"]]
    assert await node("ls") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


async def test_what_nobody_serves_is_said_in_place_of_a_model(node, capsys):
    assert await node("set", "fast", "later", "--force") == 0
    assert "fast -> unavailable (ver 1): 1/1 alive members" in capsys.readouterr().out


async def test_the_members_that_know_are_counted_until_all_do_or_time_is_up(node, tmp_path, capsys):
    (tmp_path / "b").mkdir()
    other = Aliases(
        "b",
        AliasStore.open(tmp_path / "b", NOW),
        known=lambda m: False,
        served=lambda m: True,
        now_ms=lambda: NOW,
    )
    asked = 0

    async def table(request, path):
        nonlocal asked
        asked += 1
        if asked == 3:  # gossip takes its time
            await other.merge([node.aliases.table])
        return json_answer(200, other.table_json())

    async with serving(FakeDispatcher([]), routes=[Route("/v1/aliases", GET, table)]) as there:
        node.facts.members = (
            ("b", f"127.0.0.1:{there.port}", "alive"),
            ("dead", "127.0.0.1:2", "dead"),
            ("gone", "127.0.0.1:2", "left"),
        )
        assert await node("set", "fast", "qwen", "--timeout", "60") == 0
        assert capsys.readouterr().out.splitlines()[1] == "fast -> qwen (ver 1): 2/2 alive members"
        assert asked == 3
        node.facts.members = (("b", f"127.0.0.1:{there.port}", "alive"), ("c", "no address", "alive"))
        await node.aliases.put("fast", "gemma", [], False)
        parser = argparse.ArgumentParser()
        add_control_arguments(parser)
        args = parser.parse_args(["--node", f"127.0.0.1:{node.api.port}", "--timeout", "60"])
        client = ControlClient.from_args(args, {})
        assert await asyncio.to_thread(members_that_know, client, {"fast": 2}, 0.0) == (1, 3)


async def test_a_refusal_is_one_line_and_exit_code_1(node, capsys):
    for argv, why in (
        (("set", "fast", "nope"), "no node serves the target 'nope'"),
        (("set", "qwen", "gemma"), "'qwen' is a model of the mesh"),
        (("rm", "fast"), "there is no alias 'fast'"),
        (("revert", "fast"), "there is no alias 'fast'"),
        (("history", "fast"), "there is no alias 'fast'"),
    ):
        assert await node(*argv) == 1
        said = capsys.readouterr()
        assert said.out == "" and why in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["alias"], "VERB"),
        (["alias", "set", "fast"], "TARGET"),
        (["alias", "set", "a b", "qwen"], "'a b' is no alias name, which has 1 to 64"),
        (["alias", "rm", "\x1b[2J"], "no alias name"),
        (["alias", "import", "/does/not/exist"], "cannot be read: No such file"),
        (["alias", "import", "/"], "cannot be read: Is a directory"),
        (["alias", "import", "a\0b"], "cannot be read"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(argv, why, capsys):
    assert main(argv) == 2
    said = capsys.readouterr()
    assert why in said.err and said.err.count("\n") == 1 and "\x1b" not in said.err


async def test_what_is_exported_can_be_imported_elsewhere_without_its_removals(node, tmp_path, capsys):
    await node.aliases.put("fast", "qwen", ["later"], True)
    await node.aliases.put("old", "qwen", [], False)
    await node.aliases.delete("old")
    assert await node("export") == 0
    exported = capsys.readouterr().out
    assert set(json.loads(exported)["aliases"]) == {"fast", "old"}
    file = tmp_path / "aliases.txt"
    file.write_text(exported)
    await node.aliases.delete("fast")
    assert await node("import", str(file)) == 0
    assert capsys.readouterr().out == "imported 1 of 1\nimported 1 of 1: 1/1 alive members\n"
    fast = node.aliases.table["fast"].current
    assert (fast.ver, fast.target, fast.fallbacks) == (3, "qwen", ("later",))


async def test_an_import_goes_on_after_an_alias_that_is_refused(node, tmp_path, capsys, monkeypatch):
    entry = {"target": "qwen", "fallbacks": [], "ver": 1, "ts": 1, "by": "z"}
    table = {"v": 1, "aliases": {"gemma": entry, "fast": entry}}
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(table).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert await node("import", "-", "--no-wait") == 1
    said = capsys.readouterr()
    assert said.out == "imported 1 of 2\n"
    assert said.err.startswith("viiwork: gemma: ") and "'gemma' is a model of the mesh" in said.err


@pytest.mark.parametrize("text", ["", "[]", '{"v":2,"aliases":{}}', '{"v":1,"aliases":{"\\u001b":{}}}'])
async def test_a_file_that_is_no_table_is_one_line_and_exit_code_2(node, tmp_path, capsys, text):
    (tmp_path / "bad.json").write_text(text)
    assert await node("import", str(tmp_path / "bad.json")) == 2
    err = capsys.readouterr().err
    assert "bad.json cannot be imported: it is" in err and err.count("\n") == 1


async def test_text_of_other_nodes_cannot_move_the_cursor_or_style_the_table(node, capsys):
    hostile = [{"name": "x\x1b[2J", "target": "[red]m[/red]", "fallbacks": ["\r\n"], "updated_at": "\x07"}]
    hostile[0] |= {"updated_by": "b", "resolved": None, "state": "ok"}

    async def listed(request, path):
        return json_answer(200, {"aliases": hostile})

    async with serving(FakeDispatcher([]), routes=[Route("/v1/aliases", GET, listed)]) as node.api:
        assert await node("ls") == 0
    out = capsys.readouterr().out
    assert "[red]m[/red]" in out and out.count("\n") == 2 and all(c.isprintable() or c == "\n" for c in out)


@pytest.mark.parametrize("answer", [[], {}, {"aliases": 5}, {"aliases": [{"name": 1}]}, None])
async def test_something_else_at_the_address_is_told_apart_from_a_node(node, capsys, answer):
    async def listed(request, path):
        return json_answer(200, answer)

    async with serving(FakeDispatcher([]), routes=[Route("/v1/aliases", GET, listed)]) as node.api:
        assert await node("ls") == 1
        assert "is no node of this version" in capsys.readouterr().err
        assert await node("history", "x") == 1
        assert "has no alias table to show" in capsys.readouterr().err


async def test_a_node_that_is_not_there_is_said_with_its_address(capsys):
    assert await asyncio.to_thread(main, ["alias", "ls", "--node", "127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


async def test_an_alias_heard_from_a_member_has_its_writer_in_the_list(node, capsys):
    await node.aliases.merge([{"far": Entry(Write(1, NOW, "node-b", "gemma"))}])
    assert await node("ls") == 0
    assert capsys.readouterr().out.split()[-1] == "node-b"
