"""Real gossip on 127.0.0.x."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from viiwork.errors import DuplicateName, MeshError, NoOwnAddress, PortTaken
from viiwork.host.network import port_owner
from viiwork.limits import DEPARTED_KEPT_S, MOVE_GRACE_S, NAME_GRACE_S
from viiwork.mesh import membership
from viiwork.mesh.membership import Membership

KEY, OTHER = b"k" * 32, b"o" * 32
PROGRAM = Path(__file__).with_name("member_program.py")


class Clock:
    """A clock that is as old as it is heard."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_three_nodes_learn_of_each_other_and_of_a_leave(start_node):
    a = await start_node("a", "127.0.0.1", api_port=8086)
    b = await start_node("b", "127.0.0.2", a, api_port=8087)
    c = await start_node("c", "127.0.0.3", b, api_port=8088, role="gateway", version="9.9")
    seen = (await a.heard.event("joined", "c")).member
    assert (seen.addr, seen.api_port, seen.api) == ("127.0.0.3", 8088, "127.0.0.3:8088")
    assert (seen.role, seen.version, seen.state) == ("gateway", "9.9", "alive")
    assert seen.epoch == c.membership.local().epoch > 0
    await c.heard.event("joined", "a")
    assert [m.name for m in c.membership.members()] == ["c", "a", "b"]

    await b.membership.stop()
    assert (await a.heard.event("left", "b")).member.state == "left"
    assert a.membership.member("b") is None
    assert {m.name: m.state for m in a.membership.members()}["b"] == "left"


async def test_a_killed_process_is_suspect_and_then_dead_and_comes_back_with_a_higher_epoch(start_node):
    a = await start_node("a", "127.0.0.1")
    first, first_epoch = await run_program("b", "127.0.0.2", 0, a.gossip)
    port = (await a.heard.event("joined", "b")).member.gossip_port
    os.kill(first.pid, signal.SIGKILL)
    await first.wait()
    await a.heard.event("suspect", "b")
    assert (await a.heard.event("dead", "b")).member.state == "dead"
    assert {m.name: m.state for m in a.membership.members()} == {"a": "alive", "b": "dead"}
    a.heard.items.clear()

    second, second_epoch = await run_program("b", "127.0.0.2", port, a.gossip)
    try:
        assert (await a.heard.event("joined", "b")).member.epoch == second_epoch > first_epoch
        assert {m.name: m.state for m in a.membership.members()} == {"a": "alive", "b": "alive"}
    finally:
        second.kill()
        await second.wait()


async def run_program(name, ip, port, seed):
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), name, ip, str(port), seed, stdout=asyncio.subprocess.PIPE
    )
    return process, int(await process.stdout.readline())


async def test_departed_members_are_listed_for_a_day(start_node):
    clock = Clock()
    a = await start_node("a", "127.0.0.1", options={"now": clock})
    b = await start_node("b", "127.0.0.2", a)
    await b.membership.stop()
    await a.heard.event("left", "b")
    clock.now += DEPARTED_KEPT_S - 1
    assert [m.name for m in a.membership.members()] == ["a", "b"]
    clock.now += 1
    assert [m.name for m in a.membership.members()] == ["a"]


async def test_a_node_with_another_secret_never_joins_and_both_sides_say_so(start_node, log_lines):
    a = await start_node("a", "127.0.0.1", keys=(KEY,))
    b = await start_node("b", "127.0.0.2", a, keys=(OTHER,))
    assert any(a.gossip in line and "secret differs" in line for line in b.membership.problems())
    await log_lines.until(lambda line: "secret differs from ours" in line and "decrypted" in line)
    await log_lines.until(lambda line: "takes connections but does not answer" in line)
    assert any("secret differs" in line for line in a.membership.problems())
    # Trying again does not fill the log.
    before = len(log_lines.items)
    await b.membership.join([a.gossip])
    assert len(log_lines.items) == before
    assert [m.name for m in a.membership.members()] == ["a"] and not a.heard.items
    assert not any(("k" * 8 in line) or ("o" * 8 in line) for line in log_lines.items)


async def test_a_secured_node_does_not_join_an_open_mesh(start_node):
    a = await start_node("a", "127.0.0.1")
    b = await start_node("b", "127.0.0.2", a, keys=(KEY,))
    assert any("it is open" in line for line in b.membership.problems())
    assert not a.heard.items and not b.heard.items


async def test_a_node_that_has_the_old_secret_joins_while_the_mesh_rotates(start_node):
    a = await start_node("a", "127.0.0.1", keys=(KEY, OTHER))
    await start_node("b", "127.0.0.2", a, keys=(OTHER, KEY))
    await a.heard.event("joined", "b")


async def test_a_young_process_gives_up_a_name_that_is_taken_and_an_older_one_keeps_it(start_node):
    clock = Clock()
    old = await start_node("a", "127.0.0.1", options={"now": clock})
    clock.now += NAME_GRACE_S
    young = await start_node("a", "127.0.0.2", old)
    error = await young.fatal.until(lambda e: True)
    assert isinstance(error, DuplicateName) and old.gossip in str(error) and "'a'" in str(error)
    event = await old.heard.event("conflict", "a")
    assert event.other_addr == young.gossip
    assert not old.fatal.items
    assert any(young.gossip in line for line in old.membership.problems())
    assert [(m.name, m.addr) for m in old.membership.members()] == [("a", "127.0.0.1")]


async def test_a_young_process_with_the_lower_address_gives_way_to_an_older_one_too(start_node, monkeypatch):
    monkeypatch.setattr(membership, "_DUEL_S", 0.05)
    clock = Clock()
    old = await start_node("a", "127.0.0.9", options={"now": clock})
    clock.now += NAME_GRACE_S
    young = await start_node("a", "127.0.0.2", old)
    error = await young.fatal.until(lambda e: True)
    assert isinstance(error, DuplicateName) and old.gossip in str(error)
    assert not old.fatal.items


async def test_of_two_young_processes_with_one_name_one_stays(start_node):
    gone = asyncio.Event()

    async def sleep(seconds):
        await (gone.wait() if seconds == membership._DUEL_S else asyncio.sleep(seconds))

    low = await start_node("a", "127.0.0.2", options={"sleep": sleep})
    high = await start_node("a", "127.0.0.3", low)
    await high.fatal.until(lambda e: isinstance(e, DuplicateName))
    await high.membership.stop()  # what a node does with such an error
    gone.set()
    duel = next(t for t in asyncio.all_tasks() if t.get_name() == "mesh-duel")
    await duel
    assert not low.fatal.items


async def test_a_third_node_keeps_the_first_bearer_of_a_name(start_node):
    a = await start_node("a", "127.0.0.1")
    b = await start_node("b", "127.0.0.2", a)
    await a.heard.event("joined", "b")
    await start_node("b", "127.0.0.3", a)
    await a.heard.event("conflict", "b")
    assert a.membership.member("b").addr == "127.0.0.2"
    assert sum(e.kind == "conflict" for e in a.heard.items) == 1
    assert b.membership.local().addr == "127.0.0.2"


async def test_an_open_mesh_that_does_not_advertise_loopback_hides_loopback_members(start_node, log_lines):
    a = await start_node("a", "127.0.0.1", loopback_ok=False)
    b = await start_node("b", "127.0.0.2", a)
    await log_lines.until(lambda line: "outside the lan ranges" in line)
    assert a.membership.member("b") is None and not a.heard.items
    await b.heard.event("joined", "a")


async def test_a_listener_that_fails_does_not_end_membership(start_node, make_identity, heard, caplog):
    def listener(event):
        heard(event.member.name)
        raise RuntimeError("listener bug")

    a = await start_node("a", "127.0.0.1")
    picky = Membership(make_identity("p", "127.0.0.4"), on_event=listener)
    await picky.start()
    try:
        with caplog.at_level(logging.ERROR):
            await picky.join([a.gossip])
            await start_node("b", "127.0.0.2", a)
            await heard.until(lambda name: name == "b")
        assert picky.member("b") is not None and "listener bug" in caplog.text
    finally:
        await picky.stop()


@pytest.mark.parametrize("kind", ["tcp", "udp"])
async def test_a_taken_port_is_named_with_protocol_and_owner(start_node, make_identity, kind):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        if kind == "tcp":
            holder.listen()
        port = holder.getsockname()[1]
        node = Membership(make_identity("a", "127.0.0.1", port=port), on_event=print, port_owner=port_owner)
        with pytest.raises(PortTaken, match=f"{port}/{kind} on 127.0.0.1 is taken by .*{os.getpid()}"):
            await node.start()
        await node.stop()


async def test_an_address_of_another_machine_is_refused_with_what_to_check(make_identity):
    node = Membership(make_identity("a", "203.0.113.9"), on_event=print)
    with pytest.raises(NoOwnAddress, match=r"203\.0\.113\.9.*mesh\.advertise"):
        await node.start()


@pytest.mark.parametrize("name", ["", "two words", "mesh", "x" * 65, "müller", "a/b"])
async def test_an_unusable_name_is_refused_before_anything_is_bound(make_identity, name):
    node = Membership(make_identity(name, "127.0.0.1"), on_event=print)
    with pytest.raises(MeshError, match=r"node\.name"):
        await node.start()


async def test_joining_junk_or_ourselves_is_no_error_and_no_name_is_looked_up(start_node):
    a = await start_node("a", "127.0.0.1")
    assert await a.membership.join(["localhost:7946", "fe80::1%eth0:7946", a.gossip]) == 0
    assert (
        sum(
            "is not" in line or "not appear" in line or "brackets" in line for line in a.membership.problems()
        )
        == 2
    )


async def test_the_local_member_is_known_before_and_after_the_start(make_identity):
    node = Membership(replace(make_identity("a", "127.0.0.1"), role="gateway"), on_event=print)
    assert node.local().gossip_port == 0
    await node.start()
    assert node.local().gossip_port > 0 and node.local().role == "gateway"
    await node.stop()
    await node.stop()


async def test_ipv6_members_are_known_with_bracketed_api_addresses(start_node):
    a = await start_node("a", "::1")
    await start_node("b", "::1", a, api_port=8087)
    seen = (await a.heard.event("joined", "b")).member
    assert (seen.addr, seen.api) == ("::1", "[::1]:8087")


async def test_a_node_that_moves_keeps_who_it_sees_and_is_no_rival_of_its_own_name(start_node):
    a = await start_node("a", "127.0.0.1")
    b = await start_node("b", "127.0.0.2", a)
    await b.heard.event("joined", "a")
    await b.membership.move("127.0.0.7")
    assert b.membership.local().addr == "127.0.0.7" and b.membership.is_running
    assert [m.name for m in b.membership.members()] == ["b", "a"], "nobody is forgotten"
    assert await b.membership.join([a.gossip]) == 1
    await b.heard.event("updated", "a")
    await a.heard.event("conflict", "b")  # its old record is not forgotten yet
    await b.membership.join([a.gossip])
    assert not b.fatal.items and not b.membership.problems()


async def test_members_that_are_not_met_again_after_a_move_are_let_go(start_node):
    settle = asyncio.Event()

    async def sleep(seconds):
        await (settle.wait() if seconds == MOVE_GRACE_S else asyncio.sleep(seconds))

    a = await start_node("a", "127.0.0.1")
    b = await start_node("b", "127.0.0.2", a, options={"sleep": sleep})
    await b.heard.event("joined", "a")
    await b.membership.move("127.0.0.7")
    settle.set()
    await b.heard.event("dead", "a")


async def test_a_move_to_a_place_that_cannot_be_had_is_tried_again(start_node):
    b = await start_node("b", "127.0.0.2")
    port = b.membership.local().gossip_port
    with pytest.raises(NoOwnAddress):
        await b.membership.move("203.0.113.9")
    assert not b.membership.is_running and await b.membership.join(["127.0.0.1:1"]) == 0
    with pytest.raises(NoOwnAddress):
        await b.membership.move("203.0.113.9")
    await b.membership.move("127.0.0.2")
    assert b.membership.is_running and port


async def test_during_a_rotation_a_node_sends_with_the_old_secret_until_all_can_read_the_new(start_node):
    told = []
    a = await start_node("a", "127.0.0.1", keys=(OTHER,))
    b = await start_node("b", "127.0.0.2", a, keys=(KEY, OTHER), options={"on_key": told.append})
    await a.heard.event("joined", "b")
    await b.heard.event("joined", "a")
    assert not told, "a knows the old one only"
    await a.membership.stop()
    await b.heard.event("left", "a")
    c = await start_node("c", "127.0.0.3", b, keys=(KEY,))
    await b.heard.event("joined", "c")
    await c.heard.event("joined", "b")
    while not told:
        await asyncio.sleep(0.01)
    assert told == [KEY]


async def test_a_lonely_node_with_two_secrets_finds_a_mesh_that_has_only_the_new_one(start_node):
    a = await start_node("a", "127.0.0.1", keys=(KEY,))
    b = await start_node("b", "127.0.0.2", a, keys=(KEY, OTHER))
    await a.heard.event("joined", "b")
    await b.heard.event("joined", "a")


@pytest.mark.parametrize(
    ("ours", "theirs", "why"), [((), (KEY,), "we are open"), ((KEY,), (), "we are secured")]
)
async def test_the_side_that_was_asked_says_that_the_kinds_of_mesh_differ(
    start_node, log_lines, ours, theirs, why
):
    a = await start_node("a", "127.0.0.1", keys=ours)
    await start_node("b", "127.0.0.2", a, keys=theirs)
    await log_lines.until(lambda line: why in line)
    assert any(why in line for line in a.membership.problems())


def test_secrets_are_in_no_representation(make_identity):
    assert "k" * 8 not in repr(make_identity("a", "127.0.0.1", keys=(KEY,)))
