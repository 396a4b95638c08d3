"""Which address this node binds and advertises, asked anew each time: networks change."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from viiwork.config.model import MeshSection
from viiwork.core.addresses import is_loopback
from viiwork.errors import NoOwnAddress
from viiwork.mesh.tailscale import tailnet
from viiwork.mesh.values import canonical_ip


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """The address and whether the operator chose a loopback one, which lets loopback members in."""

    ip: str
    loopback_ok: bool = False


async def own_address(
    mesh: MeshSection, lan_address: Callable[[], str | None], current: str = ""
) -> OwnAddress:
    """`mesh.advertise`, else the LAN's or the tailnet's address as it is now.

    `current` is kept while it is one of ours. Raises NoOwnAddress with what to do.
    """
    if mesh.advertise:
        return advertised(mesh.advertise)
    if mesh.network == "tailnet":
        own = (await tailnet(mesh.tailnet.socket)).own
        return OwnAddress(current if current in own else own[0])
    ip = await asyncio.to_thread(lan_address)
    if ip is None:
        raise NoOwnAddress("no default route with a usable address; set mesh.advertise to this machine's IP")
    return OwnAddress(ip)


def advertised(text: str) -> OwnAddress:
    """`mesh.advertise` as an address other nodes can be told. Pure."""
    try:
        ip = canonical_ip(text)
        parsed = ipaddress.ip_address(ip)
    except ValueError as error:
        raise NoOwnAddress(f"mesh.advertise: {text!r} is no IP address") from error
    if parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local:
        raise NoOwnAddress(f"mesh.advertise: other nodes cannot reach {ip}")
    return OwnAddress(ip, loopback_ok=is_loopback(ip))
