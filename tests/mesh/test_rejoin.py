"""Rounds of joining."""

from __future__ import annotations

import asyncio

import pytest

from viiwork.limits import HURRY_MEMBERS, HURRY_S, JOINS_AT_ONCE, MISSING_S, YOUNG_INTERVAL_S, YOUNG_S
from viiwork.mesh import rejoin
from viiwork.mesh.rejoin import Rejoiner, departed, seeds


class FakeMembership:
    """Membership as far as rounds need it: counts joins under way, lets them go on when told."""

    def __init__(self, members) -> None:
        self._members = members
        self.heard = asyncio.Event()  # an address was tried
        self.tried: list[str] = []
        self.under_way = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.full = asyncio.Event()  # as many under way as may be

    def members(self):
        return self._members

    async def join(self, addresses):
        assert len(addresses) == 1
        self.tried += addresses
        self.heard.set()
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.under_way >= JOINS_AT_ONCE:
            self.full.set()
        await self.gate.wait()
        self.under_way -= 1
        return 1


async def test_a_node_finds_its_seed_when_the_seed_comes_later(start_node):
    first = await start_node("a", "127.0.0.1")
    seed = first.gossip
    port = first.membership.local().gossip_port
    await first.membership.stop()
    b = await start_node("b", "127.0.0.2")
    rejoiner = Rejoiner(b.membership, {"seeds": seeds([seed, b.gossip])}, interval_s=0.2)
    rejoiner.start()
    await start_node("a", "127.0.0.1", port=port)
    await b.heard.event("joined", "a")
    await rejoiner.stop()


async def test_nodes_that_start_together_meet_although_the_first_round_was_too_early(start_node):
    first = await start_node("a", "127.0.0.1")
    seed, port = first.gossip, first.membership.local().gossip_port
    await first.membership.stop()
    b = await start_node("b", "127.0.0.2")
    rejoiner = Rejoiner(b.membership, {"seeds": seeds([seed])}, interval_s=3600)
    rejoiner.start()
    await start_node("a", "127.0.0.1", port=port)
    await b.heard.event("joined", "a")
    await rejoiner.stop()


async def test_after_its_first_minute_a_node_keeps_to_the_usual_interval(make_member):
    now = [5.0]
    rejoiner = Rejoiner(
        FakeMembership([make_member("a", "127.0.0.1", 1)]), {}, interval_s=60, now=lambda: now[0]
    )
    rejoiner.start()
    assert rejoiner._pause_s() == YOUNG_INTERVAL_S
    now[0] += YOUNG_S
    assert rejoiner._pause_s() == 60
    await rejoiner.stop()


async def test_a_round_tries_each_unknown_address_once(make_member):
    us, b = make_member("a", "127.0.0.1", 1), make_member("b", "127.0.0.2", 1)
    gone = make_member("c", "127.0.0.3", 1, state="dead")
    membership = FakeMembership([us, b, gone])

    async def other():
        return ["127.0.0.4:7946", "127.0.0.3:7946"]

    feeders = {"seeds": seeds(["127.0.0.1:7946", "127.0.0.2:7946", "127.0.0.3:7946", "junk"]), "x": other}
    assert await Rejoiner(membership, feeders, interval_s=60).round() == 2
    assert membership.tried == ["127.0.0.3:7946", "127.0.0.4:7946"]


async def test_joins_run_a_few_at_a_time(make_member):
    membership = FakeMembership([make_member("a", "127.0.0.1", 1)])
    membership.gate.clear()
    many = seeds([f"127.0.1.{i}:7946" for i in range(1, 40)])
    under_way = asyncio.create_task(Rejoiner(membership, {"seeds": many}, interval_s=60).round())
    await membership.full.wait()
    membership.gate.set()
    assert await under_way == 39
    assert membership.most == JOINS_AT_ONCE


async def test_a_failing_source_neither_stops_the_others_nor_fills_the_log(make_member, caplog):
    membership = FakeMembership([make_member("a", "127.0.0.1", 1)])

    async def broken():
        raise OSError("no\nway")

    rejoiner = Rejoiner(membership, {"bad": broken, "seeds": seeds(["127.0.0.2:7946"])}, interval_s=60)
    for _ in range(3):
        assert await rejoiner.round() == 1
    assert [r.getMessage() for r in caplog.records] == ["no addresses from bad: no\ufffdway"]


async def test_news_start_a_round_at_once_although_another_one_hangs(make_member, monkeypatch):
    monkeypatch.setattr(rejoin, "ROUND_GAP_S", 0.0)
    membership = FakeMembership([make_member("a", "127.0.0.1", 1)])
    membership.gate.clear()
    found = ["127.0.0.2:7946"]
    rejoiner = Rejoiner(membership, {"news": seeds(found)}, interval_s=3600)
    rejoiner.start()
    await membership.heard.wait()
    membership.heard.clear()
    found.append("127.0.0.3:7946")
    rejoiner.kick()
    await membership.heard.wait()
    assert membership.tried == ["127.0.0.2:7946", "127.0.0.3:7946"], "what is being tried is not tried twice"
    await rejoiner.stop()


async def test_members_that_died_are_tried_again_and_those_that_left_are_not(make_member):
    members = [
        make_member("a", "127.0.0.1", 1),
        make_member("b", "127.0.0.2", 1, state="dead"),
        make_member("c", "127.0.0.3", 1, state="left"),
    ]
    membership = FakeMembership(members)
    await Rejoiner(membership, {"died": departed(membership)}, interval_s=60).round()
    assert membership.tried == ["127.0.0.2:7946"]


async def test_a_node_that_moved_asks_a_few_members_it_sees_for_a_while(make_member):
    now = [1000.0]
    us, *others = (make_member(f"n{i}", f"127.0.0.{i}", 1) for i in range(1, 9))
    membership = FakeMembership([us, *others])
    rejoiner = Rejoiner(membership, {}, interval_s=60, now=lambda: now[0])
    assert await rejoiner.round() == 0
    rejoiner.hurry()
    assert await rejoiner.round() == HURRY_MEMBERS
    now[0] += HURRY_S
    assert await rejoiner.round() == 0


@pytest.mark.parametrize(("interval_s", "hurry", "missing", "pause_s"), [
    (60, False, False, 60), (60, False, True, 10), (60, True, True, 3), (1, True, True, 1),
])  # fmt: skip
def test_rounds_follow_more_quickly_when_somebody_is_missed(make_member, interval_s, hurry, missing, pause_s):
    now = [5.0]
    rejoiner = Rejoiner(FakeMembership([]), {}, interval_s=interval_s, now=lambda: now[0])
    if missing:
        rejoiner.missing()
    if hurry:
        rejoiner.hurry()
    assert rejoiner._pause_s() == pause_s
    now[0] += MISSING_S
    assert rejoiner._pause_s() == interval_s


async def test_sources_that_fail_are_shown_until_they_answer_again(make_member):
    membership, answers = FakeMembership([make_member("a", "127.0.0.1", 1)]), [OSError("gone")]

    async def feed():
        if answers:
            raise answers.pop()
        return []

    rejoiner = Rejoiner(membership, {"mDNS": feed}, interval_s=60)
    await rejoiner.round()
    assert rejoiner.problems() == ["no addresses from mDNS: gone"]
    await rejoiner.round()
    assert rejoiner.problems() == []
