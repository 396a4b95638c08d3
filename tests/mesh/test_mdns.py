"""Nodes announced on a LAN and what is believed of the announcements of others."""

from __future__ import annotations

import asyncio
import socket

import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from tests.fakes.netns import Lan, ip
from viiwork.errors import MeshError
from viiwork.limits import MDNS_INSTANCES_MAX
from viiwork.mesh import mdns
from viiwork.mesh.mdns import SERVICE, Mdns

HERE, THERE = "10.78.10.1", "10.78.10.201"


@pytest.fixture
def lan():
    """A LAN on which this process has two addresses."""
    with Lan(0, "10.78.10") as lan:
        ip("addr", "add", f"{THERE}/24", "dev", lan.bridge)
        yield lan


@pytest.fixture
async def announced():
    """Starts announcements; all are stopped at the end."""
    started: list[Mdns] = []

    async def start(node: str, addr: str, port: int = 7946) -> Mdns:
        one = Mdns(node, asyncio.Event().set)
        started.append(one)
        await one.announce(addr, port)
        await one.feed()
        return one

    yield start
    await asyncio.gather(*(one.stop() for one in started))


async def until_fed(one: Mdns, wanted: list[str]) -> None:
    async with asyncio.timeout(30):
        while sorted(await one.feed()) != sorted(wanted):
            await asyncio.sleep(0.05)


@pytest.mark.netns
async def test_two_nodes_hear_each_other_until_one_says_goodbye(lan, announced):
    a, b = await announced("a", HERE), await announced("a", THERE, 7000)
    await until_fed(a, [f"{THERE}:7000"])
    await until_fed(b, [f"{HERE}:7946"])
    await b.stop()
    await until_fed(a, [])
    assert await b.feed() == ()


@pytest.mark.netns
async def test_an_announcement_moves_with_the_node(lan, announced):
    a, b = await announced("a", HERE), await announced("b", THERE)
    await until_fed(a, [f"{THERE}:7946"])
    ip("addr", "add", "10.78.10.202/24", "dev", lan.bridge)
    await b.announce("10.78.10.202", 7946)
    await b.feed()
    await until_fed(a, ["10.78.10.202:7946"])


@pytest.mark.netns
async def test_bogus_answers_are_dropped_and_changed_ones_followed(lan, announced):
    a = await announced("a", HERE)
    stranger = AsyncZeroconf(interfaces=[THERE])

    def answer(label: str, *addresses: str, node: str | None = "x", port: int = 7946) -> AsyncServiceInfo:
        properties = {} if node is None else {"node": node}
        return AsyncServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port=port,
            properties=properties,
            server=f"{label}.local.",
            parsed_addresses=list(addresses),
        )

    try:
        good = ["10.78.10.7", "10.78.10.8"]
        several = answer("several", *good, "8.8.8.8", "169.254.169.254", "127.0.0.1", "fe80::1", "fd00::5")
        for info in (
            several,
            answer("printer", "10.78.10.9", node=None),
            answer("zero", "10.78.10.9", port=0),
        ):
            await stranger.async_register_service(info, cooperating_responders=True)
        await until_fed(a, [f"{address}:7946" for address in good])
        await asyncio.sleep(1.1)  # an answer replaces only what is older than a second (RFC 6762, 10.2)
        await stranger.async_update_service(answer("several", "10.78.10.10"))
        await until_fed(a, ["10.78.10.10:7946"])
    finally:
        await stranger.async_close()


@pytest.mark.netns
async def test_an_address_without_its_interface_is_an_error_until_it_is_there(lan, announced):
    one = Mdns("a", lambda: None)
    await one.announce("10.78.10.99", 7946)
    with pytest.raises(MeshError, match=r"cannot use mDNS at 10\.78\.10\.99"):
        await one.feed()
    ip("addr", "add", "10.78.10.99/24", "dev", lan.bridge)
    try:
        assert await one.feed() == []
    finally:
        await one.stop()


def test_an_ipv6_node_is_offered_ipv6_addresses_of_the_lan_only():
    info = AsyncServiceInfo(
        SERVICE,
        f"x.{SERVICE}",
        port=1,
        properties={"node": "x"},
        addresses=[socket.inet_pton(socket.AF_INET6, a) for a in ("fe80::1", "fd00::5", "2001:db8::1")]
        + [socket.inet_aton("10.0.0.1")],
    )
    assert mdns._addresses(info, True) == ["[fd00::5]:1"]
    assert mdns._addresses(info, False) == ["10.0.0.1:1"]


def test_a_flood_of_answers_costs_the_oldest():
    one = Mdns("a", lambda: None)
    for i in range(MDNS_INSTANCES_MAX + 5):
        one._on_change(None, SERVICE, f"i{i}.{SERVICE}", mdns.ServiceStateChange.Added)  # type: ignore[arg-type]
    assert len(one._heard) == MDNS_INSTANCES_MAX and f"i0.{SERVICE}" not in one._heard
