"""Rounds of joining."""

from __future__ import annotations

import asyncio

from viiwork.limits import JOINS_AT_ONCE
from viiwork.mesh.rejoin import Rejoiner, seeds


class FakeMembership:
    """Membership as far as rounds need it: counts joins under way, lets them go on when told."""

    def __init__(self, members) -> None:
        self._members = members
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
