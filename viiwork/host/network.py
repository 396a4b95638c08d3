"""This machine's addresses: the default route's, those of its links and their speed, and who holds a port."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

from viiwork.core.paths import LinkAddress

_SYS_NET = Path("/sys/class/net")
_ROUTE4 = Path("/proc/net/route")
_ROUTE6 = Path("/proc/net/ipv6_route")
_IF_INET6 = Path("/proc/net/if_inet6")
_RTF_UP, _RTF_REJECT = 0x1, 0x200
_IFA_UNSTABLE = 0x01 | 0x08 | 0x20 | 0x40  # temporary, duplicate, deprecated, not checked yet
_TIMEOUT_S = 5.0


def default_route_address() -> str | None:
    """Address of the interface that carries the default route of lowest metric.

    IPv4 when there is one, else IPv6. Other interfaces are never guessed at: bridges and VPNs have
    addresses too, and they are valid only here.
    """
    by_interface = _interface_addresses()
    unstable = _unstable_addresses()
    for family, interfaces in ((4, _default_interfaces(4)), (6, _default_interfaces(6))):
        for interface in interfaces:
            if address := usable_address(by_interface.get(interface, ()), family, unstable):
                return address
    return None


def holds_address(ip: str) -> bool:
    """True while an interface that is up has the address."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return any(ip in found for name, found in _interface_addresses().items() if name in up)


def link_addresses() -> list[LinkAddress]:
    """Addresses of the interfaces that are up and may lead to other machines, with their speeds."""
    stats, unstable = psutil.net_if_stats(), _unstable_addresses()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        facts = stats.get(name)
        if facts is None or not facts.isup or not leads_out(_SYS_NET / name):
            continue
        is_tunnel = (_SYS_NET / name / "tun_flags").exists()  # it claims 10 Mb/s, whatever carries it
        speed = None if is_tunnel or facts.speed in (0, 0xFFFF, 0xFFFFFFFF) else facts.speed
        for a in addresses:
            ip = a.address.partition("%")[0]  # psutil writes link-local IPv6 as fe80::1%eth0
            if a.family not in (socket.AF_INET, socket.AF_INET6) or ip in unstable:
                continue
            address = ipaddress.ip_address(ip)
            if not (address.is_loopback or address.is_unspecified):
                found.append(LinkAddress(str(address), _prefix_len(ip, a.netmask), name, speed, facts.mtu))
    return found


def leads_out(interface: Path) -> bool:
    """May the interface with this folder of /sys/class/net have other machines behind it?

    Not the ports of a bridge or bond, whose address is the bridge's, and not a bridge that only joins this
    machine's own containers and guests. Where there is no such folder, nothing is known against it.
    """
    if (interface / "master").exists():
        return False
    ports = interface / "brif"
    return not ports.is_dir() or any(not _is_guests(interface.parent / port.name) for port in ports.iterdir())


def _is_guests(port: Path) -> bool:
    """Is the port of a bridge the end of a container's or guest's cable?"""
    try:
        kind = (port / "uevent").read_text()
    except OSError:
        kind = ""
    is_made_up = "/devices/virtual/" in str(port.resolve())
    return is_made_up and not any(f"DEVTYPE={way}\n" in kind for way in ("bond", "vlan", "vxlan", "wlan"))


def _prefix_len(ip: str, netmask: str | None) -> int:
    """Bits of the network; without a mask the address stands alone."""
    if not netmask:
        return 128 if ":" in ip else 32
    return int(ipaddress.ip_address(netmask)).bit_count()


def address_towards(ip: str, port: int) -> str | None:
    """Our address on the way to another one, None when there is no way; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, port))
        except OSError:
            return None
        found: str = probe.getsockname()[0]
    return None if ipaddress.ip_address(found).is_loopback else found


def port_owner(port: int, protocol: str) -> str | None:
    """Name and pid of the process that holds `port`/`protocol`; None if the system does not tell us."""
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    try:
        connections = psutil.net_connections(kind="inet")
    except (psutil.Error, OSError):
        return None
    for c in connections:
        if c.type != kind or not c.laddr or c.laddr.port != port or c.pid is None:
            continue
        if kind == socket.SOCK_STREAM and c.status != psutil.CONN_LISTEN:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            return f"{psutil.Process(c.pid).name()} (pid {c.pid})"
    return None


def usable_address(
    addresses: Iterable[str], family: int, unstable: Collection[str] = frozenset()
) -> str | None:
    """The address of the family that other machines can use for longest. Pure.

    Private IPv6 addresses come before public ones, which change with the provider's prefix; temporary ones
    are taken only when there is nothing else.
    """
    usable = []
    for text in addresses:
        ip = ipaddress.ip_address(text)
        if ip.version == family and not (ip.is_loopback or ip.is_link_local or ip.is_unspecified):
            usable.append((text in unstable, family == 6 and not ip.is_private, text))
    return min(usable, key=lambda u: u[:2])[2] if usable else None


def parse_if_inet6(text: str) -> frozenset[str]:
    """IPv6 addresses that will not last or cannot be used yet, from /proc/net/if_inet6. Pure."""
    found = set()
    for line in text.splitlines():
        fields = line.split()
        try:
            if len(fields) == 6 and int(fields[4], 16) & _IFA_UNSTABLE:
                found.add(str(ipaddress.IPv6Address(int(fields[0], 16))))
        except ValueError:
            continue
    return frozenset(found)


def parse_proc_route(text: str) -> list[str]:
    """Interfaces with an IPv4 default route, lowest metric first, from /proc/net/route. Pure."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        try:
            destination, flags, metric, mask = (
                int(fields[1], 16),
                int(fields[3], 16),
                int(fields[6]),
                int(fields[7], 16),
            )
        except ValueError:
            continue
        if destination == 0 and mask == 0 and flags & _RTF_UP and not flags & _RTF_REJECT:
            found.append((metric, fields[0]))
    return _by_metric(found)


def parse_proc_ipv6_route(text: str) -> list[str]:
    """Interfaces with an IPv6 default route, lowest metric first, from /proc/net/ipv6_route. Pure."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10:
            continue
        try:
            is_default = int(fields[0], 16) == 0 and int(fields[1], 16) == 0
            metric, flags = int(fields[5], 16), int(fields[8], 16)
        except ValueError:
            continue
        if is_default and flags & _RTF_UP and not flags & _RTF_REJECT:
            found.append((metric, fields[9]))
    return _by_metric(found)


def parse_route_get(text: str) -> list[str]:
    """Interface in the answer of macOS `route -n get default`. Pure."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "interface" and value.strip():
            return [value.strip()]
    return []


def _by_metric(found: list[tuple[int, str]]) -> list[str]:
    return list(dict.fromkeys(name for _, name in sorted(found, key=lambda f: f[0]) if name != "lo"))


def _default_interfaces(family: int) -> list[str]:
    if sys.platform == "darwin":
        command = ["route", "-n", "get", *(["-inet6"] if family == 6 else []), "default"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return parse_route_get(answer.stdout)
    path, parse = (_ROUTE4, parse_proc_route) if family == 4 else (_ROUTE6, parse_proc_ipv6_route)
    try:
        return parse(path.read_text())
    except OSError:
        return []


def _unstable_addresses() -> frozenset[str]:
    try:
        return parse_if_inet6(_IF_INET6.read_text())
    except OSError:
        return frozenset()


def _interface_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for a in addresses:
            if a.family in (socket.AF_INET, socket.AF_INET6):
                # psutil writes link-local IPv6 as fe80::1%eth0
                found.setdefault(interface, []).append(a.address.partition("%")[0])
    return found
