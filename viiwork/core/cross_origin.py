"""Which web pages may use the API: what an `Origin` header says, and what a list of origins allows."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from viiwork.core.addresses import is_loopback, is_private_path

_HOST = r"\[[0-9a-f:.]+\]|[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?"
_PORT = "[0-9]{1,5}"
_ORIGIN = re.compile(f"(https?)://({_HOST})(?::({_PORT}))?", re.ASCII)
_PATTERN = re.compile(rf"(?:(https?)://)?(\*\.)?({_HOST})(?::({_PORT}))?", re.ASCII)
_PLACE = re.compile(f"({_HOST})(?::({_PORT}))?", re.ASCII)
_DEFAULT_PORT = {"http": 80, "https": 443}
_ANYBODYS = "x.ts.net"  # whoever has a tailnet can publish a page at a name like this
_OWN_MACHINE = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a page comes from; IPv6 without brackets, the port always there."""

    scheme: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """`host` or `*.domain` (its subdomains only), with or without a port and a scheme."""

    host: str
    subdomains: bool
    scheme: str  # "" = http and https
    port: int  # 0 = any

    def fits(self, origin: Origin) -> bool:
        if (self.scheme and origin.scheme != self.scheme) or (self.port and origin.port != self.port):
            return False
        return origin.host.endswith("." + self.host) if self.subdomains else origin.host == self.host


@dataclass(frozen=True, slots=True)
class OriginRules:
    """The origins whose pages may read answers and send requests."""

    patterns: tuple[Pattern, ...] = ()
    tailnet_ips: bool = False  # pages that come from an address of a tailnet

    @classmethod
    def derived(cls, *, tailnet_suffix: str = "", tailnet_ips: bool = True) -> Self:
        """What holds without a list: this machine, the own tailnet's names, tailnet addresses."""
        patterns = [parse_pattern(host) for host in _OWN_MACHINE]
        with suppress(ValueError):  # not known, or no name that only this tailnet has
            patterns.append(parse_pattern(f"*.{tailnet_suffix}"))
        return cls(tuple(patterns), tailnet_ips)

    @classmethod
    def listed(cls, entries: Iterable[str]) -> Self:
        """Exactly what a list says. Raises `ValueError` with what was expected of the entry."""
        return cls(tuple(parse_pattern(entry) for entry in entries))

    def allows(self, origin: str) -> bool:
        """Judge an `Origin` header; never `null`, nor anything but http and https."""
        found = parse_origin(origin)
        if found is None:
            return False
        if self.tailnet_ips and is_private_path(found.host) and not is_loopback(found.host):
            return True
        return any(pattern.fits(found) for pattern in self.patterns)


def parse_origin(text: str) -> Origin | None:
    """The parts of an `Origin` header, None for `null` and for what no browser sends for a web page."""
    match = _ORIGIN.fullmatch(_low(text))
    if match is None:
        return None
    scheme, host, port = match.groups()
    plain = _plain(host)
    return None if plain is None else Origin(scheme, plain, int(port) if port else _DEFAULT_PORT[scheme])


def parse_pattern(text: str) -> Pattern:
    """One entry of a list of origins. Raises `ValueError` with what was expected."""
    if text.strip() == "*":
        raise ValueError("the origins one by one; * would let every web page use this node")
    match = _PATTERN.fullmatch(_low(text))
    host = _plain(match[3]) if match is not None else None
    if match is None or host is None or (match[2] and not host.strip("0123456789.:")):
        raise ValueError("an origin such as chat.example.org, *.example.org or http://10.0.0.5:3000")
    if match[2] and _ANYBODYS.endswith("." + host):
        raise ValueError("the name of your own tailnet; anyone can have a page below ts.net")
    scheme, port = match[1] or "", int(match[4] or 0)
    return Pattern(host, bool(match[2]), scheme, port or (_DEFAULT_PORT[scheme] if scheme else 0))


def is_same_place(origin: str, host_header: str) -> bool:
    """Whether a page comes from the very host and port its request goes to."""
    found, match = parse_origin(origin), _PLACE.fullmatch(_low(host_header))
    if found is None or match is None:
        return False
    port = int(match[2]) if match[2] else _DEFAULT_PORT[found.scheme]
    return (_plain(match[1]), port) == (found.host, found.port)


def is_loopback_host(host_header: str) -> bool:
    """Whether a `Host` header names this machine itself; a foreign name that resolves to it does not."""
    match = _PLACE.fullmatch(_low(host_header))
    host = _plain(match[1]) if match is not None else None
    return host is not None and (host == "localhost" or is_loopback(host))


def _low(text: str) -> str:
    """In lower case; "" for what no host is written in (the Kelvin sign would become a k)."""
    return text.lower() if text.isascii() else ""


def _plain(host: str) -> str | None:
    """A host as it is compared: IPv6 in its one short form and without brackets."""
    if not host.startswith("["):
        return host
    try:
        return str(ipaddress.IPv6Address(host[1:-1]))
    except ValueError:
        return None
