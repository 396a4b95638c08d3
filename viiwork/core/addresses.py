"""What kind an address is: whose a member of an open mesh may have, and on which nobody else listens."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Literal

Network = Literal["tailnet", "lan"]

_LAN = tuple(ipaddress.ip_network(n) for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
_TAILNET = (ipaddress.ip_network("100.64.0.0/10"), ipaddress.ip_network("fd7a:115c:a1e0::/48"))
# Inside the tailnet's ranges, but answered by each machine's own tailscaled.
_TAILNET_OWN = frozenset(ipaddress.ip_address(a) for a in ("100.100.100.100", "fd7a:115c:a1e0::53"))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_acceptable(addr: str, network: Network, *, loopback_ok: bool = False) -> bool:
    """True if a member of an open mesh may live at `addr`.

    Without a secret anyone can name any address, and this node would then send prompts there: only private
    ranges count, never link-local ones (169.254.169.254 hands out cloud credentials). `loopback_ok` is for
    a node that was told to advertise a loopback address itself.
    """
    try:
        ip = _embedded(ipaddress.ip_address(addr))
    except ValueError:
        return False
    if "%" in addr or ip.is_unspecified or ip.is_link_local or ip.is_multicast or ip in _TAILNET_OWN:
        return False
    if ip.is_loopback:
        return loopback_ok
    ranges = _TAILNET if network == "tailnet" else _LAN
    return any(ip.version == net.version and ip in net for net in ranges)


def is_tailnet(addr: str) -> bool:
    """True for an address of 100.64.0.0/10 or fd7a:115c:a1e0::/48 that a machine of the tailnet may have."""
    return is_acceptable(addr, "tailnet")


def is_private_path(addr: str) -> bool:
    """True if bytes to `addr` are unreadable for others already: loopback, or a tailnet's tunnel."""
    try:
        ip = _embedded(ipaddress.ip_address(addr.partition("%")[0]))
    except ValueError:
        return False
    return ip.is_loopback or any(ip.version == net.version and ip in net for net in _TAILNET)


def is_within(addr: str, networks: Iterable[str]) -> bool:
    """Is the address one of these, or in one of these ranges?"""
    try:
        ip = _embedded(ipaddress.ip_address(addr))
    except ValueError:
        return False
    nets = (ipaddress.ip_network(text) for text in networks)
    return any(ip.version == net.version and ip in net for net in nets)


def is_loopback(addr: str) -> bool:
    try:
        return _embedded(ipaddress.ip_address(addr)).is_loopback
    except ValueError:
        return False


def _embedded(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address inside a mapped or NAT64 one: that is where packets end up."""
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return ip.ipv4_mapped
        if ip in _NAT64:
            return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip
