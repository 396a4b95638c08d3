"""LAN discovery: this node announced as `_viiwork._tcp` by mDNS, and the addresses others announce.

What is heard only says whom to try: nobody becomes a member by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence

from zeroconf import Error as ZeroconfError
from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from viiwork.core.addresses import is_acceptable
from viiwork.errors import MeshError
from viiwork.limits import MDNS_ADDRESSES_MAX, MDNS_ASK_S, MDNS_INSTANCES_MAX, MDNS_TTL_S, MESH_STOP_S
from viiwork.mesh.library_log import quieten
from viiwork.mesh.notices import one_line
from viiwork.mesh.probe import is_own
from viiwork.mesh.values import canonical_ip, host_port

SERVICE = "_viiwork._tcp.local."
_NAME_MAX_CHARS = 40  # of the node's name in the instance, which has 63 bytes
log = logging.getLogger(__name__)


class Mdns:
    """Announces one address and listens on the interface that has it; `on_news` hears of new answers.

    `feed` (re)starts what is not running, so a network that refuses multicast is tried again each round.
    """

    def __init__(self, node: str, on_news: Callable[[], None]) -> None:
        self._node = node
        self._on_news = on_news
        # Not the name alone: a node that comes back would have to be renamed while others remember it.
        plain = "".join(c if c.isalnum() else "-" for c in node[:_NAME_MAX_CHARS])
        self._label = f"{plain}-{secrets.token_hex(4)}"
        self._wanted: tuple[str, int] | None = None  # what to announce
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._heard: dict[str, None] = {}  # instances of others, oldest first
        self._lock = asyncio.Lock()

    async def announce(self, addr: str, port: int) -> None:
        """From now on at this address; takes effect with the next `feed`."""
        async with self._lock:
            await self._close()
            self._wanted = addr, port
            self._heard.clear()

    async def stop(self) -> None:
        """Say goodbye and close."""
        async with self._lock:
            self._wanted = None
            await self._close()

    async def feed(self) -> Sequence[str]:
        """`ip:port` of every other announced node that may be on this LAN; raises MeshError."""
        async with self._lock:
            if self._wanted is None:
                return ()
            if self._zeroconf is None:
                await self._open(*self._wanted)
            mdns, family_v6 = self._zeroconf, ":" in self._wanted[0]
        if mdns is None:
            return ()
        infos = [AsyncServiceInfo(SERVICE, name) for name in self._heard]
        known = await asyncio.gather(*(_resolve(info, mdns.zeroconf) for info in infos))
        return [a for info, ok in zip(infos, known, strict=True) if ok for a in _addresses(info, family_v6)]

    # -- the library ---------------------------------------------------------------------------------
    async def _open(self, addr: str, port: int) -> None:
        quieten("zeroconf")
        if not is_own(addr):  # the library would leave a socket behind
            raise MeshError(f"cannot use mDNS at {addr}: it is no address of this machine")
        mdns: AsyncZeroconf | None = None
        try:
            mdns = AsyncZeroconf(interfaces=[addr])
            self._zeroconf = mdns
            await mdns.zeroconf.async_wait_for_start(MDNS_ASK_S)
            if not mdns.zeroconf.engine.senders:
                raise OSError("the interface takes no multicast")
            info = AsyncServiceInfo(
                SERVICE,
                f"{self._label}.{SERVICE}",
                port=port,
                properties={"node": self._node},
                server=f"{self._label}.local.",
                parsed_addresses=[addr],
                host_ttl=MDNS_TTL_S,
                other_ttl=MDNS_TTL_S,
            )
            # The label is ours alone: nobody has to be asked whether it is free.
            await mdns.async_register_service(info, cooperating_responders=True, strict=False)
            self._browser = AsyncServiceBrowser(mdns.zeroconf, SERVICE, handlers=[self._on_change])
        except (OSError, ZeroconfError, RuntimeError, TimeoutError) as error:
            await self._close()
            text = one_line(str(error) or type(error).__name__)
            raise MeshError(f"cannot use mDNS at {addr}: {text}") from error

    async def _close(self) -> None:
        browser, self._browser = self._browser, None
        mdns, self._zeroconf = self._zeroconf, None
        # The network may be gone already: closing must end all the same.
        with contextlib.suppress(OSError, ZeroconfError, RuntimeError, TimeoutError):
            async with asyncio.timeout(MESH_STOP_S):
                if browser is not None:
                    await browser.async_cancel()
                if mdns is not None:
                    await mdns.async_close()

    def _on_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if state_change is ServiceStateChange.Removed:
            self._heard.pop(name, None)
            return
        if name.lower() == f"{self._label}.{SERVICE}".lower():
            return  # our own echo
        if name not in self._heard and len(self._heard) >= MDNS_INSTANCES_MAX:
            del self._heard[next(iter(self._heard))]
        self._heard[name] = None
        self._on_news()


async def _resolve(info: AsyncServiceInfo, zeroconf: Zeroconf) -> bool:
    """Whether the answer has what we need; asks when the cache does not hold it."""
    with contextlib.suppress(ZeroconfError, OSError):
        return await info.async_request(zeroconf, MDNS_ASK_S * 1000)
    return False


def _addresses(info: AsyncServiceInfo, family_v6: bool) -> list[str]:
    """What of an answer may be tried: a node's, on a private address, of the family our gossip socket has."""
    if not info.properties.get(b"node") or not info.port:
        return []
    found = []
    for text in info.parsed_scoped_addresses()[:MDNS_ADDRESSES_MAX]:
        with contextlib.suppress(ValueError):
            ip = canonical_ip(text)
            if (":" in ip) == family_v6 and is_acceptable(ip, "lan"):
                found.append(host_port(ip, info.port))
    return found
