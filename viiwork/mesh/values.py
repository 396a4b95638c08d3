"""Members and what happens to them, as the rest of the node sees it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

MemberState = Literal["alive", "suspect", "dead", "left"]
EventKind = Literal["joined", "suspect", "recovered", "dead", "left", "updated", "conflict"]


@dataclass(frozen=True, slots=True)
class Member:
    """One node as membership knows it; `(name, epoch)` names one run of it."""

    name: str
    addr: str  # IP literal, no brackets
    gossip_port: int
    api_port: int
    state: MemberState
    version: str = ""
    role: str = "node"
    epoch: int = 0
    key_ids: frozenset[str] = frozenset()  # secrets it can read, see mesh/keys.py

    @property
    def api(self) -> str:
        """`ip:port` of its API, IPv6 in brackets."""
        return host_port(self.addr, self.api_port)

    @property
    def gossip(self) -> str:
        """`ip:port` of its gossip, IPv6 in brackets."""
        return host_port(self.addr, self.gossip_port)

    @property
    def is_present(self) -> bool:
        """Alive or suspect; a suspect member may only be slow."""
        return self.state in ("alive", "suspect")


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """Something happened to a member; `other_addr` is the second bearer of the name in a conflict."""

    kind: EventKind
    member: Member
    other_addr: str = ""


def host_port(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """`ip:port` or `[ipv6]:port` as (canonical IP, port); ValueError says what is wrong."""
    host, colon, port_text = text.rpartition(":")
    if not colon or not port_text.isascii() or not port_text.isdigit():
        raise ValueError(f"{text!r} is not ip:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address needs brackets")
    port = int(port_text)
    if not 1 <= port <= 65535:
        raise ValueError(f"{text!r}: port {port} is not 1-65535")
    return canonical_ip(host), port


def canonical_ip(text: str) -> str:
    """One spelling per address: compressed, IPv4-mapped forms as IPv4. ValueError if it is no IP literal."""
    ip = ipaddress.ip_address(text)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ip)
