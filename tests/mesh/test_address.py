"""Our own address, from the config or the routing table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from viiwork.config.model import MeshSection
from viiwork.errors import NoOwnAddress
from viiwork.host import network
from viiwork.host.network import (
    parse_if_inet6,
    parse_proc_ipv6_route,
    parse_proc_route,
    parse_route_get,
    usable_address,
)
from viiwork.mesh.address import OwnAddress, own_address

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
vpn0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0
dead0\t00000000\t00000000\t0000\t0\t0\t1\t00000000\t0\t0\t0
"""
ROUTES6 = "\n".join(
    f"{'0' * 32} {length} {'0' * 32} 00 fe80{'0' * 27}1 {metric} 00000001 00000000 {flags} {iface}"
    for length, metric, flags, iface in [
        ("00", "ffffffff", "00200200", "lo"),
        ("00", "00000400", "00000003", "eth1"),
        ("00", "00000100", "00000003", "eth0"),
        ("40", "00000001", "00000001", "eth2"),
    ]
)


def nowhere() -> str | None:
    return None


def test_the_default_route_of_lowest_metric_comes_first_and_bridges_never():
    assert parse_proc_route(ROUTES) == ["eth0", "wlan0"]
    assert parse_proc_ipv6_route(ROUTES6) == ["eth0", "eth1"]
    assert parse_proc_route("") == [] and parse_proc_route("Iface\nx y\n" + "a " * 11) == []
    assert parse_proc_ipv6_route("nonsense " * 10) == []


def test_macos_names_the_interface_of_the_default_route():
    answer = "   route to: default\ndestination: default\n    gateway: 192.168.1.1\n  interface: en0\n"
    assert parse_route_get(answer) == ["en0"]
    assert parse_route_get("route: writing to routing socket: not in table") == []


def test_loopback_and_link_local_are_of_no_use_to_others():
    addresses = ["127.0.1.1", "169.254.3.4", "fe80::1", "::1", "192.168.1.5", "fd00::5"]
    assert usable_address(addresses, 4) == "192.168.1.5"
    assert usable_address(addresses, 6) == "fd00::5"
    assert usable_address(addresses[:4], 4) is None


def test_ipv6_serves_when_there_is_no_ipv4_route(monkeypatch, tmp_path):
    for name, text in (("_ROUTE4", ROUTES.splitlines()[0] + "\n"), ("_ROUTE6", ROUTES6)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(network, name, tmp_path / name)
    monkeypatch.setattr(network.sys, "platform", "linux")
    interfaces = {"eth0": ["10.0.0.9", "fe80::1"], "eth1": ["fd00::9"]}
    monkeypatch.setattr(network, "_interface_addresses", lambda: interfaces)
    assert network.default_route_address() == "fd00::9"
    monkeypatch.setattr(network, "_ROUTE6", tmp_path / "missing")
    assert network.default_route_address() is None


def test_without_a_default_route_the_way_to_a_seed_tells_our_address():
    assert network.address_towards("127.0.0.9", 7946) is None, "loopback is nobody else's way to us"
    towards = network.address_towards("192.0.2.1", 7946)
    assert towards is None or not towards.startswith("127.")


async def test_advertise_wins_and_a_loopback_one_lets_loopback_members_in():
    assert await own_address(MeshSection(advertise="192.168.7.7"), nowhere) == OwnAddress("192.168.7.7")
    assert await own_address(MeshSection(advertise="127.0.0.2"), nowhere) == OwnAddress("127.0.0.2", True)
    assert (await own_address(MeshSection(advertise="::1"), nowhere)).loopback_ok


@pytest.mark.parametrize(
    "text", ["host.example", "0.0.0.0", "::", "224.0.0.1", "fe80::1", "fe80::1%eth0", "1.2.3"]
)
async def test_an_address_others_cannot_use_is_refused_at_once(text):
    with pytest.raises(NoOwnAddress, match=r"mesh\.advertise"):
        await own_address(MeshSection(advertise=text), nowhere)


async def test_a_lan_node_takes_the_address_it_has_or_says_what_to_set():
    assert await own_address(MeshSection(network="lan"), lambda: "192.168.1.5") == OwnAddress("192.168.1.5")
    with pytest.raises(NoOwnAddress, match=r"set mesh\.advertise"):
        await own_address(MeshSection(network="lan"), nowhere)


def test_lasting_ipv6_addresses_come_before_temporary_and_private_before_public_ones():
    flags = (
        "fd000000000000000000000000000007 02 40 00 01     eth0\n"
        + "20010db8000000000000000000000001 02 40 00 40 eth0\nx"
    )
    unstable = parse_if_inet6(flags)
    assert unstable == {"fd00::7", "2001:db8::1"}
    addresses = ["fd00::7", "2a00::9", "fd00::8", "2001:db8::1"]
    assert usable_address(addresses, 6, unstable) == "fd00::8"
    assert usable_address(["fd00::7", "2a00::9"], 6, unstable) == "2a00::9"
    assert usable_address(["fd00::7"], 6, unstable) == "fd00::7", "better than none"


def test_only_addresses_of_interfaces_that_are_up_are_held(monkeypatch):
    stats = {"eth0": SimpleNamespace(isup=True), "wlan0": SimpleNamespace(isup=False)}
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(
        network, "_interface_addresses", lambda: {"eth0": ["10.0.0.1"], "wlan0": ["10.0.0.2"]}
    )
    assert network.holds_address("10.0.0.1")
    assert not network.holds_address("10.0.0.2") and not network.holds_address("10.0.0.3")
