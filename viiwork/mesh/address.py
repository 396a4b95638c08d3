"""Which address this node binds and advertises."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from viiwork.config.model import MeshSection
from viiwork.core.addresses import is_loopback
from viiwork.errors import NoOwnAddress
from viiwork.limits import TAILSCALE_GIVE_UP_S, TAILSCALE_LOG_S, TAILSCALE_POLL_S
from viiwork.mesh.notices import Repeats
from viiwork.mesh.tailscale import tailnet_self
from viiwork.mesh.values import canonical_ip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """The address and whether the operator chose a loopback one, which lets loopback members in."""

    ip: str
    loopback_ok: bool = False


async def own_address(
    mesh: MeshSection,
    lan_address: Callable[[], str | None],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> OwnAddress:
    """`mesh.advertise`, else the LAN's or the tailnet's address; waits for one up to five minutes.

    A machine often starts viiwork before its network. Raises NoOwnAddress with what to do.
    """
    if mesh.advertise:
        return advertised(mesh.advertise)
    deadline, repeats = now() + TAILSCALE_GIVE_UP_S, Repeats(every_s=TAILSCALE_LOG_S)
    while True:
        try:
            return OwnAddress(await _find(mesh, lan_address))
        except NoOwnAddress as error:
            if now() >= deadline:
                raise
            if repeats.is_due(str(error), now()):
                log.warning("waiting for an address: %s", error)
        await sleep(TAILSCALE_POLL_S)


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


async def _find(mesh: MeshSection, lan_address: Callable[[], str | None]) -> str:
    if mesh.network == "tailnet":
        return (await tailnet_self(mesh.tailnet.socket)).ip
    ip = await asyncio.to_thread(lan_address)
    if ip is None:
        raise NoOwnAddress("no default route with a usable address; set mesh.advertise to this machine's IP")
    return ip
