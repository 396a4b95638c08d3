"""Nodes tell each other of writes, and tables that came apart become one again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable

import pytest

from viiwork.core.aliases import Entry, Write
from viiwork.limits import ALIAS_INBOX_MAX, ALIAS_REPAIR_MAX_S, ALIAS_REPAIR_S
from viiwork.node.alias_gossip import AliasGossip
from viiwork.node.alias_store import AliasStore
from viiwork.node.aliases import Aliases
from viiwork.wire.aliases import MESSAGE_KIND, encode_table, encode_write

NOW = 1_800_000_000_000
PATIENCE_S = 30.0


class Net:
    """Nodes with perfect or lossy links, and one clock that only the test moves."""

    def __init__(self, tmp_path) -> None:
        self.nodes: dict[str, Node] = {}
        self.now = 0.0
        self.lost: Callable[[str, str], bool] = lambda sender, receiver: False
        self.sent: list[tuple[str, str, int]] = []
        self.changed = asyncio.Event()
        self._tmp_path = tmp_path

    def add(self, name: str) -> Node:
        folder = self._tmp_path / name
        folder.mkdir()
        node = self.nodes[name] = Node(self, name, AliasStore.open(folder, NOW))
        return node

    def reports(self) -> None:
        """Everybody hears everybody's capacity report; a second passes."""
        self.now += 1
        for a, b in itertools.permutations(self.nodes.values(), 2):
            if not self.lost(b.name, a.name):
                a.gossip.reported(b.name, b.aliases.digest)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):  # tables change on a thread
                        await self.changed.wait()
                self.changed.clear()

    async def settle(self) -> None:
        """Rounds of reports until all tables are the same."""
        async with asyncio.timeout(PATIENCE_S):
            while len({n.aliases.digest for n in self.nodes.values()}) > 1:
                self.reports()
                await asyncio.sleep(0.01)


class Node:
    def __init__(self, net: Net, name: str, store: AliasStore) -> None:
        self.net, self.name = net, name
        self.aliases = Aliases(
            name,
            store,
            known=lambda model: False,
            served=lambda model: True,
            on_write=lambda alias, entry: self.gossip.written(alias, entry),
            now_ms=lambda: NOW,
        )
        self.gossip = AliasGossip(
            self.aliases,
            members=lambda: [n for n in net.nodes if n != name],
            send=self._send,
            now=lambda: net.now,
            piece_pause_s=0.0,
        )
        self.running = asyncio.create_task(self.gossip.run())

    async def _send(self, member: str, data: bytes) -> None:
        self.net.sent.append((self.name, member, len(data)))
        if not self.net.lost(self.name, member):
            self.net.nodes[member].gossip.message(self.name, data)
        self.net.changed.set()

    def target(self, name: str) -> str:
        entry = self.aliases.table.get(name)
        return entry.current.target if entry else ""

    async def put(self, name: str, target: str) -> None:
        await self.aliases.put(name, target, [], True)


@pytest.fixture
async def net(tmp_path):
    net = Net(tmp_path)
    yield net
    for node in net.nodes.values():
        assert not node.running.done()
        node.running.cancel()
    await asyncio.gather(*(n.running for n in net.nodes.values()), return_exceptions=True)


async def test_a_write_is_told_to_every_member_at_once_and_nobody_tells_it_on(net):
    a, b, c = (net.add(name) for name in "abc")
    await a.put("x", "qwen")
    await net.until(lambda: b.target("x") == c.target("x") == "qwen")
    assert sorted((s, r) for s, r, _ in net.sent) == [("a", "b"), ("a", "c")]
    for _ in range(5):
        net.reports()
    await asyncio.sleep(0)
    assert len(net.sent) == 2


async def test_removals_and_reverts_travel_too(net):
    a, b = net.add("a"), net.add("b")
    await a.put("x", "qwen")
    await a.put("x", "gemma")
    await net.until(lambda: b.target("x") == "gemma")
    await b.aliases.revert("x")
    await net.until(lambda: a.target("x") == "qwen")
    await a.aliases.delete("x")
    await net.until(lambda: b.aliases.table["x"].deleted)
    assert a.aliases.digest == b.aliases.digest


async def test_a_newcomer_gets_the_whole_table_and_brings_its_own(net):
    a, b = net.add("a"), net.add("b")
    for i in range(200):
        await a.put(f"name-{i}", "m" * 400)
    await net.until(lambda: len(b.aliases.table) == 200)
    c = net.add("c")
    await c.put("own", "qwen")
    await net.settle()
    assert len(c.aliases.table) == len(a.aliases.table) == 201 and a.target("own") == "qwen"
    assert max(n for _, _, n in net.sent) <= 60 * 1024


async def test_two_halves_that_wrote_different_things_become_one_table_with_both_histories(net):
    nodes = [net.add(name) for name in "abcde"]
    await nodes[0].put("x", "qwen")
    await net.settle()
    half = set("ab")
    net.lost = lambda sender, receiver: (sender in half) != (receiver in half)
    await nodes[0].put("x", "gemma")
    await nodes[0].put("left", "qwen")
    await nodes[4].put("x", "llama")
    await nodes[4].put("right", "qwen")
    await net.until(lambda: nodes[1].target("left") == nodes[3].target("right") == "qwen")
    assert nodes[1].target("x") == "gemma" and nodes[3].target("x") == "llama"
    net.lost = lambda sender, receiver: False
    await net.settle()
    assert {node.target("x") for node in nodes} == {"llama"}
    assert [w.target for w in nodes[0].aliases.table["x"].writes] == ["llama", "gemma", "qwen"]


async def test_lost_messages_are_made_good(net):
    a, b = net.add("a"), net.add("b")
    dice = random.Random(1)
    net.lost = lambda sender, receiver: dice.random() < 0.6
    for i in range(30):
        await a.put(f"a{i}", "qwen")
        await b.put(f"b{i}", "qwen")
    await net.settle()
    assert len(a.aliases.table) == 60


async def test_one_report_that_differs_is_no_reason_to_send(net):
    a, b = net.add("a"), net.add("b")
    net.lost = lambda sender, receiver: True
    await a.put("x", "qwen")
    await net.until(lambda: len(net.sent) == 1)
    a.gossip.reported("b", b.aliases.digest)
    a.gossip.reported("b", a.aliases.digest)
    a.gossip.reported("b", b.aliases.digest)
    a.gossip.reported("b", "")  # a node that says nothing has no table to compare
    a.gossip.reported("b", b.aliases.digest)
    await asyncio.sleep(0.05)
    assert len(net.sent) == 1
    a.gossip.reported("b", b.aliases.digest)
    await net.until(lambda: len(net.sent) == 2)


async def test_a_member_that_never_agrees_is_sent_less_and_less(net, caplog):
    a = net.add("a")
    net.nodes["b"] = a  # takes the messages, to no effect
    await a.put("x", "qwen")
    await net.until(lambda: len(net.sent) == 1)
    at: list[float] = []
    for _ in range(3000):
        n = len(net.sent)
        net.now += 1
        a.gossip.reported("b", "another")
        for _ in range(3):
            await asyncio.sleep(0)
        if len(net.sent) > n:
            at.append(net.now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert pauses[:3] == [ALIAS_REPAIR_S, 2 * ALIAS_REPAIR_S, 4 * ALIAS_REPAIR_S]
    assert max(pauses) == ALIAS_REPAIR_MAX_S and len(at) < 20
    assert "aliases.differ from=b" in caplog.text
    net.nodes.pop("b")


async def test_a_member_that_is_gone_is_forgotten(net):
    a = net.add("a")
    a.gossip.reported("b", "another")
    a.gossip.gone("b")
    a.gossip.reported("b", "another")
    await asyncio.sleep(0.05)
    assert net.sent == []


async def test_hostile_messages_are_refused_once_a_minute_in_the_log_and_change_nothing(net, caplog):
    a = net.add("a")
    entry = Entry(Write(1, NOW, "b", "qwen"))
    for data in (
        MESSAGE_KIND,
        MESSAGE_KIND + b"\xff" * 100,
        MESSAGE_KIND + b'{"v":1,"aliases":{"x":{"target":"","fallbacks":[],"ver":1,"ts":1,"by":"b"}}}',
        MESSAGE_KIND
        + b'{"v":1,"aliases":{"\\u001b[2J":{"target":"m","fallbacks":[],"ver":1,"ts":1,"by":"b"}}}',
        MESSAGE_KIND + encode_table({"x": entry}).replace(b'"ver":1', b'"ver":9007199254740993'),
        encode_write("good", entry),
    ):
        a.gossip.message("b", data)
    await net.until(lambda: a.target("good") == "qwen")
    assert set(a.aliases.table) == {"good"}
    refusals = [r.getMessage() for r in caplog.records if "aliases.refused" in r.getMessage()]
    assert len(refusals) == 1 and refusals[0].isprintable()


async def test_a_flood_of_messages_is_cut_and_made_good_later(net):
    a, b = net.add("a"), net.add("b")
    net.lost = lambda sender, receiver: True
    for i in range(ALIAS_INBOX_MAX + 30):
        await b.put(f"x{i}", "qwen")
    for name, entry in b.aliases.table.items():
        a.gossip.message("b", encode_write(name, entry))  # faster than any can be looked at
    await net.until(lambda: len(a.aliases.table) == ALIAS_INBOX_MAX)
    net.lost = lambda sender, receiver: False
    await net.settle()
    assert len(a.aliases.table) == ALIAS_INBOX_MAX + 30


async def test_a_disk_that_is_full_does_not_end_the_gossip(net, monkeypatch):
    a, b = net.add("a"), net.add("b")
    path = a.aliases._store._path
    path.parent.rmdir()
    await b.put("x", "qwen")
    await net.until(lambda: len(net.sent) == 1)
    net.reports()
    path.parent.mkdir()
    await net.settle()
    assert a.target("x") == "qwen"
