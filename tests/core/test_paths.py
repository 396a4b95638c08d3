from __future__ import annotations

import pytest

from viiwork.core.paths import LinkAddress, LinkRule, Path, PeerAddress, PeerPaths, paths_to, told_addresses
from viiwork.limits import LINK_PATHS_MAX, LINK_RATE_KEPT_S, MIB

ANY = LinkRule("auto", secured=True, open_lan=False)
MESH = Path("10.0.0.2", speed_mbps=1000, is_mesh=True)
CABLE = Path("10.9.0.2", "10.9.0.1", "eth1", 10_000)


def mine(addr: str, interface: str = "eth1", bits: int = 24, speed: int | None = 10_000) -> LinkAddress:
    return LinkAddress(addr, bits, interface, speed, 1500)


def theirs(addr: str, speed: int | None = 10_000) -> PeerAddress:
    return PeerAddress(addr, speed, 9000)


def test_a_peers_address_is_tried_from_the_interface_on_its_network_at_the_slower_ends_speed():
    own = [mine("10.0.0.1", "eth0"), mine("10.9.0.1")]
    (path,) = paths_to(own, [theirs("10.0.0.2"), theirs("10.9.0.2", 2500)], ANY, "10.0.0.2")
    assert (path.addr, path.source, path.speed_mbps, path.mtu) == ("10.9.0.2", "10.9.0.1", 2500, 1500)


def test_an_address_that_is_also_ours_or_on_no_network_of_ours_is_not_tried():
    own = [mine("172.17.0.1", bits=16)]
    assert paths_to(own, [theirs("172.17.0.1"), theirs("10.9.0.2")], ANY, "10.0.0.2") == []


def test_an_address_the_operator_named_is_tried_through_a_router_too():
    rule = LinkRule(("10.9.0.0/24",), secured=True, open_lan=False)
    (path,) = paths_to([mine("10.8.0.1")], [theirs("10.9.0.2"), theirs("10.7.0.2")], rule, "10.0.0.2")
    assert (path.addr, path.source) == ("10.9.0.2", "")


def test_a_link_local_address_is_tried_with_the_zone_it_has_here():
    (path,) = paths_to([mine("fe80::1", bits=64)], [theirs("fe80::2")], ANY, "10.0.0.2")
    assert (path.addr, path.source) == ("fe80::2%eth1", "fe80::1%eth1")


def test_an_interface_with_an_ordinary_address_tells_no_link_local_one():
    own = [mine("fe80::1", bits=64), mine("10.9.0.1"), mine("fe80::3", "eth2", 64)]
    assert [a.addr for a in told_addresses(own, ANY)] == ["10.9.0.1", "fe80::3"]


def test_no_number_of_addresses_makes_more_paths_than_the_cap():
    own = [mine(f"10.9.0.{i}", f"eth{i}") for i in range(1, 16)]
    told = [theirs(f"10.9.0.{i}") for i in range(100, 116)]
    assert len(paths_to(own, told, ANY, "")) == LINK_PATHS_MAX


@pytest.mark.parametrize(
    ("addr", "secured", "open_lan", "allowed"),
    [
        ("10.9.0.2", True, False, True),
        ("10.9.0.2", False, False, False),
        ("10.9.0.2", False, True, True),
        ("100.64.0.2", False, False, True),
        ("8.8.8.8", False, True, False),
        ("169.254.169.254", True, True, False),
        ("127.0.0.1", True, True, False),
        ("::ffff:10.9.0.2", True, True, False),
        ("fe80::1", False, True, True),
    ],
)
def test_an_open_mesh_uses_private_addresses_where_it_may(addr, secured, open_lan, allowed):
    assert LinkRule("auto", secured=secured, open_lan=open_lan).allows(addr) is allowed


def known(*paths: Path) -> PeerPaths:
    found = PeerPaths(MESH)
    found.offer(MESH, paths)
    for path in (MESH, *paths):
        found.answered(path, 0.001)
    return found


def test_a_direct_link_is_used_once_it_answered_and_no_longer_when_it_failed():
    paths = PeerPaths(MESH)
    paths.offer(MESH, [CABLE])
    assert paths.ranked(0) == [MESH]
    assert paths.answered(CABLE, 0.001)
    assert paths.ranked(0) == [CABLE, MESH]
    assert paths.failed(CABLE, "cut")
    assert paths.ranked(0) == [MESH]


def test_a_measured_speed_counts_until_it_is_old():
    paths = known(CABLE)
    paths.sent(CABLE, 100 * MIB, 10, 0)  # a hidden bottleneck
    assert paths.ranked(1) == [MESH, CABLE]
    assert paths.ranked(LINK_RATE_KEPT_S) == [CABLE, MESH]


def test_a_slow_machine_does_not_send_states_to_a_slower_path():
    mesh = Path("10.0.0.2", speed_mbps=10_000, is_mesh=True)
    paths = PeerPaths(mesh)
    paths.offer(mesh, [CABLE])
    paths.answered(CABLE, 0.001)
    paths.sent(CABLE, 500 * MIB, 1, 0)
    assert paths.ranked(1) == [CABLE, mesh]


def test_a_small_transfer_measures_nothing():
    paths = known(CABLE)
    paths.sent(CABLE, MIB, 100, 0)
    assert paths.ranked(1)[0] == CABLE


def test_the_status_says_which_path_and_why():
    told = known(CABLE).as_json(0)
    assert (told["addr"], told["kind"], told["mb_per_s"]) == ("10.9.0.2", "direct", 1250.0)
    assert told["why"] == "the fastest: link of 10000 Mb/s" and len(told["paths"]) == 2
