"""Addresses as the config writes them: IP literals, `ip:port` seeds, direct links, servers."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from urllib.parse import urlsplit

from viiwork.config.fault import Fault, shown
from viiwork.limits import URL_MAX_CHARS

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_PORT = re.compile("[1-9][0-9]{0,4}")

# Ranges whose members an open mesh accepts: private IPv4 and IPv6, and a tailnet's addresses.
_OPEN_RANGES = tuple(
    ipaddress.ip_network(n)
    for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)


def ip_literal(path: str, text: str) -> IpAddress:
    """The address in `text`; names, brackets and zones (`%eth0`) are refused."""
    expected = "an IP address"
    if text.startswith("["):
        raise Fault(path, expected, f"{shown(text)} (write it without brackets)")
    if "%" in text:
        raise Fault(path, expected, f"{shown(text)} (an address with a zone means nothing to other machines)")
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        hint = " (host names are not looked up)" if text[:1].isalpha() else ""
        raise Fault(path, expected, f"{shown(text) or 'an empty text'}{hint}") from None


def unicast(path: str, text: str) -> IpAddress:
    """An address a peer can be reached at; loopback is one, for members on the same machine."""
    address = ip_literal(path, text)
    _refuse_unreachable(path, address)
    return address


def seed(path: str, text: str) -> None:
    """`ip:port`, IPv6 as `[ip]:port`."""
    expected = "ip:port such as 192.168.1.5:7946 or [fd00::5]:7946"
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        hint = " (host names are not looked up)" if text[:1].isalpha() and text.count(":") < 2 else ""
        raise Fault(path, expected, f"{shown(text) or 'an empty text'}{hint}") from None
    fits = (address.version == 6) == bracketed and "%" not in host
    if not fits or not _PORT.fullmatch(port) or int(port) > 65535:
        raise Fault(path, expected, shown(text))
    _refuse_unreachable(path, address)


def _refuse_unreachable(path: str, address: IpAddress) -> None:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        raise Fault(path, f"{address.ipv4_mapped} for an IPv4 address", str(address))
    if address.is_unspecified or address.is_multicast or address.is_link_local:
        raise Fault(path, "an address other machines can reach", str(address))


def network(path: str, text: str) -> None:
    """An address or a CIDR range."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        expected = "an address or a range such as 10.9.0.0/24"
        with suppress(ValueError):
            expected = f"{ipaddress.ip_network(text, strict=False)} or one address"
        raise Fault(path, expected, shown(text) or "an empty text") from None


def in_open_ranges(address: IpAddress) -> bool:
    return any(address.version == n.version and address in n for n in _OPEN_RANGES)


def http_url(path: str, text: str) -> None:
    """Base address of a server: scheme, host, perhaps port and path. One with a login is not echoed."""
    expected = "an address as http://host:port or https://host:port"
    if len(text) > URL_MAX_CHARS:
        raise Fault(path, f"{expected}, at most {URL_MAX_CHARS} characters", f"{len(text)} characters")
    if "@" in text:
        raise Fault(path, f"{expected} without a login (models[].api_key_env names a key)", "one with an @")
    if not text.isascii() or not text.isprintable() or any(c in text for c in ' "<>\\^`{|}'):
        raise Fault(path, expected, shown(text))
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        usable = False
    if not usable or url.query or url.fragment or text.endswith(("?", "#")):
        raise Fault(path, expected, shown(text))
