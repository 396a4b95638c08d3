"""Our own address, from the config, the routing table or tailscaled."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from viiwork.config.model import MeshSection, TailnetSection
from viiwork.errors import NoOwnAddress
from viiwork.host import network
from viiwork.host.network import (
    parse_proc_ipv6_route,
    parse_proc_route,
    parse_route_get,
    usable_address,
)
from viiwork.mesh.address import OwnAddress, own_address
from viiwork.mesh.tailscale import parse_status, tailnet_suffix

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
RUNNING = {"BackendState": "Running", "Self": {"TailscaleIPs": ["fd7a:115c:a1e0::1", "100.101.102.103"]}}


class Waiting:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.naps = 0.0, 0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


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


async def test_a_lan_node_takes_the_routes_address_once_the_network_is_there():
    clock, answers = Waiting(), iter([None, None, "192.168.1.5"])
    found = await own_address(MeshSection(network="lan"), lambda: next(answers), now=clock, sleep=clock.sleep)
    assert found == OwnAddress("192.168.1.5") and clock.naps == 2


async def test_waiting_says_why_now_and_then_and_ends_after_five_minutes(caplog):
    clock = Waiting()
    with pytest.raises(NoOwnAddress, match=r"set mesh\.advertise"):
        await own_address(MeshSection(network="lan"), nowhere, now=clock, sleep=clock.sleep)
    assert clock.now == 300.0
    assert len(caplog.records) == 30


@pytest.fixture
async def tailscaled(tmp_path):
    """A tailscaled whose status can be set."""
    state = {"status": 200, "body": json.dumps(RUNNING)}

    async def answer(request):
        assert (request.path, request.host) == ("/localapi/v0/status", "local-tailscaled.sock")
        return web.Response(status=state["status"], text=state["body"])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "tailscaled.sock")).start()
    state["mesh"] = MeshSection(tailnet=TailnetSection(socket=str(tmp_path / "tailscaled.sock")))
    yield state
    await runner.cleanup()


async def test_a_tailnet_node_takes_the_address_tailscaled_gives(tailscaled):
    assert await own_address(tailscaled["mesh"], nowhere) == OwnAddress("100.101.102.103")


async def test_a_tailnet_node_waits_for_the_login(tailscaled):
    clock = Waiting()
    tailscaled["body"] = '{"BackendState":"NeedsLogin"}'

    async def sleep(seconds):
        await clock.sleep(seconds)
        tailscaled["body"] = json.dumps(RUNNING)

    assert (await own_address(tailscaled["mesh"], nowhere, now=clock, sleep=sleep)).ip == "100.101.102.103"
    assert clock.naps == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"BackendState":"NeedsLogin"}', "tailscale up"),
        ('{"BackendState":"Running"}', "no IPv4"),
        ('{"BackendState":"Running","Self":{"TailscaleIPs":null}}', "no IPv4"),
        ('{"BackendState":"Running","Self":{"TailscaleIPs":["fd7a::1","8.8.8.8","x"]}}', "no IPv4"),
        ('{"BackendState":5}', "cannot be read"),
        ("<html>", "cannot be read"),
    ],
)
def test_every_way_tailscale_is_not_ready_says_what_to_do(body, why):
    with pytest.raises(NoOwnAddress, match=why):
        parse_status(body.encode())


@pytest.mark.parametrize(("status", "why"), [(403, "may this user ask it"), (302, "302")])
async def test_a_tailscaled_that_refuses_is_named(tailscaled, status, why):
    clock = Waiting()
    tailscaled["status"] = status
    with pytest.raises(NoOwnAddress, match=why):
        clock.now = 0.0
        await own_address(tailscaled["mesh"], nowhere, now=lambda: clock.now, sleep=_jump(clock))


async def test_no_tailscaled_at_all_says_how_to_go_on(tmp_path):
    clock = Waiting()
    mesh = MeshSection(tailnet=TailnetSection(socket=str(tmp_path / "none.sock")))
    with pytest.raises(NoOwnAddress, match=r"start Tailscale.*mesh\.network: lan"):
        await own_address(mesh, nowhere, now=clock, sleep=_jump(clock))


def _jump(clock):
    async def sleep(seconds):
        clock.now += 1000.0

    return sleep


async def test_the_tailnets_suffix_is_read_and_its_absence_is_no_fault(tailscaled, tmp_path):
    path = tailscaled["mesh"].tailnet.socket
    tailscaled["body"] = json.dumps({**RUNNING, "MagicDNSSuffix": "tail1.ts.net"})
    assert await tailnet_suffix(path) == "tail1.ts.net"
    for body in (json.dumps(RUNNING), "{", '{"MagicDNSSuffix":5}', "[" * 10_000):
        tailscaled["body"] = body
        assert await tailnet_suffix(path) is None
    assert await tailnet_suffix(str(tmp_path / "none.sock")) is None
