from __future__ import annotations

from pathlib import Path

from viiwork.host.network import leads_out, link_addresses


def interface(folder: Path, name: str, *ports: str) -> Path:
    made = folder / name
    made.mkdir()
    if ports:
        (made / "brif").mkdir()
    for port in ports:
        (made / "brif" / port).mkdir()
    return made


def test_an_ordinary_interface_leads_to_other_machines_also_where_nothing_is_known_of_it(tmp_path: Path):
    assert leads_out(interface(tmp_path, "eth0")) and leads_out(tmp_path / "en0")


def test_a_port_of_a_bridge_and_a_bridge_of_guests_alone_lead_nowhere(tmp_path: Path):
    virtual = tmp_path / "devices" / "virtual" / "net"
    virtual.mkdir(parents=True)
    net = tmp_path / "net"
    net.mkdir()
    (virtual / "veth1").mkdir()
    (net / "veth1").symlink_to(virtual / "veth1")
    (net / "eth0").mkdir()
    (net / "eth0" / "master").mkdir()
    guests, outside = interface(net, "docker0", "veth1"), interface(net, "vmbr0", "veth1", "eth0")
    assert (leads_out(net / "eth0"), leads_out(guests), leads_out(outside)) == (False, False, True)


def test_loopback_is_no_end_of_a_link():
    assert all(address.interface != "lo" for address in link_addresses())
