"""The mesh as one part of the node: own address, membership, discovery and capacity polls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from viiwork.config.load import LoadedConfig
from viiwork.core.addresses import is_loopback
from viiwork.core.capacity import CapacityReport, PeerReport
from viiwork.errors import MeshError, NoOwnAddress
from viiwork.host.clock import suspended_s
from viiwork.host.network import address_towards, default_route_address, holds_address, port_owner
from viiwork.limits import (
    ADDRESS_LOOK_S,
    HOLDINGS_ASK_S,
    HOLDINGS_OLD_S,
    LEFT_DRAIN_S,
    MEMBERS_MAX,
    PAUSE_LOOK_S,
    PAUSE_MIN_S,
)
from viiwork.mesh.address import OwnAddress, own_address
from viiwork.mesh.admission import MeshIdentity
from viiwork.mesh.mdns import Mdns
from viiwork.mesh.membership import Membership
from viiwork.mesh.notices import Problems, one_line
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.polls import CapacityPoller
from viiwork.mesh.rejoin import Feeder, Rejoiner, departed, seeds
from viiwork.mesh.tailscale import tailnet
from viiwork.mesh.values import Member, MemberEvent, split_host_port
from viiwork.node.alias_gossip import AliasGossip
from viiwork.node.aliases import Aliases
from viiwork.node.dispatch import Dispatcher
from viiwork.version import VERSION
from viiwork.wire.aliases import MESSAGE_KIND

log = logging.getLogger(__name__)

OnAddress = Callable[[str], Awaitable[None]]


class NodeMesh:
    """Keeps the dispatcher's view of the peers true; `on_address` hears of each new own address."""

    def __init__(
        self,
        name: str,
        loaded: LoadedConfig,
        keys: tuple[bytes, ...],
        client: PeerClient,
        dispatcher: Dispatcher,
        on_fatal: Callable[[MeshError], None],
        aliases: Aliases,
        on_address: OnAddress,
        on_member: Callable[[MemberEvent], None],
    ) -> None:
        self._name = name
        self._config = loaded.config
        self._keys = keys
        self._client = client
        self._dispatcher = dispatcher
        self._on_fatal = on_fatal
        self._on_address = on_address
        self._on_member = on_member
        self._membership: Membership | None = None
        self._rejoiner: Rejoiner | None = None
        mesh = self._config.mesh
        self._poller = CapacityPoller(client, interval_s=mesh.capacity_poll, on_report=self._on_report)
        mdns = mesh.lan.mdns == "on" or (mesh.lan.mdns == "auto" and mesh.network == "lan")
        self._mdns = Mdns(name, self._on_news) if mdns else None
        self._problems = Problems()
        self._at_leave: dict[str, Member] = {}
        self._left: dict[str, tuple[Member, float]] = {}  # who took their leave, and when; oldest first
        self.aliases = AliasGossip(aliases, members=self._alive, send=self._send)
        self.addr = ""  # "" while the node looks for its own address

    async def run(self) -> None:
        """Join when this machine has an address, and follow when it gets another. For the node's life.

        Raises `MeshError` when joining cannot work until somebody changes something.
        """
        look_at, slept_s = 0.0, suspended_s()
        while True:
            now = time.monotonic()
            if (asleep_s := suspended_s() - slept_s) >= PAUSE_MIN_S:
                slept_s += asleep_s
                await self._woke(asleep_s)
                look_at = now
            if now >= look_at:
                await self._look()
                look_at = time.monotonic() + ADDRESS_LOOK_S
            await asyncio.sleep(PAUSE_LOOK_S)

    async def leave(self) -> None:
        """Say goodbye and close; the poller ends too. Members stay known: states still go to them."""
        self._at_leave = {member.name: member for member in self.others()}
        if self._rejoiner is not None:
            await self._rejoiner.stop()
        try:
            # Known until the end: a forward that comes meanwhile must still be told from a client's request.
            await asyncio.gather(
                self._poller.stop(),
                self._mdns.stop() if self._mdns else asyncio.sleep(0),
                self._membership.stop() if self._membership else asyncio.sleep(0),
            )
        finally:
            self._membership = None

    async def ask_peers(self) -> None:
        """Hear at once what the peers hold now."""
        await self._poller.ask_now(HOLDINGS_ASK_S, HOLDINGS_OLD_S)

    def members(self) -> list[Member]:
        return self._membership.members() if self._membership is not None else []

    def others(self) -> list[Member]:
        """All members but this node."""
        return [member for member in self.members() if member.name != self._name]

    def member(self, name: str) -> Member | None:
        """A remote member that is alive or suspect."""
        if self._membership is None:
            return self._at_leave.get(name)
        return self._membership.member(name)

    def known(self, name: str) -> Member | None:
        """A member, or one that took its leave lately: it may still hand its sessions over."""
        if (member := self.member(name)) is not None:
            return member
        left = self._left.get(name)
        return left[0] if left is not None and time.monotonic() - left[1] < LEFT_DRAIN_S else None

    def status(self) -> dict[str, Any]:
        failures = self._poller.failures()
        is_joined = self._membership is not None and self._membership.is_running
        body: dict[str, Any] = {
            "mode": "secured" if self._keys else "open",
            "state": "joined" if is_joined else "looking for an own address",
            "members": [
                {"node": m.name, "addr": m.addr, "api": m.api, "state": m.state, "ver": m.version}
                for m in self.members()
            ],
            "problems": [
                *self._problems.lines(time.monotonic()),
                *(self._membership.problems() if self._membership is not None else ()),
                *(self._rejoiner.problems() if self._rejoiner is not None else ()),
                *(f"no capacity from {name}: {text}" for name, text in failures.items()),
            ],
        }
        if failures:
            body["unreachable"] = failures
        return body

    # -- own address ---------------------------------------------------------------------------------
    async def _look(self) -> None:
        try:
            own = await own_address(self._config.mesh, self._lan_address, self.addr)
            if self._membership is None:
                await self._join(own)
            elif own.ip != self.addr or not self._membership.is_running:
                await self._move(self._membership, own)
        except (NoOwnAddress, OSError) as error:
            # Networks come and go, an interface even while it is looked at; the API stays up meanwhile.
            self._problem("address", f"waiting for an address: {error}")
        else:
            self._problems.clear("address")

    async def _join(self, own: OwnAddress) -> None:
        mesh = self._config.mesh
        identity = MeshIdentity(
            name=self._name,
            addr=own.ip,
            port=mesh.bind_port,
            api_port=self._config.api.port,
            version=VERSION,
            keys=self._keys,
            network=mesh.network,
            loopback_ok=own.loopback_ok,
        )
        membership = Membership(
            identity,
            on_event=self._on_event,
            on_fatal=self._on_fatal,
            on_message=self._on_message,
            on_key=self._on_key,
            port_owner=port_owner,
        )
        await membership.start()
        self._membership = membership
        await self._settled_at(own.ip)
        self._rejoiner = Rejoiner(membership, self._feeders(membership), interval_s=mesh.rejoin_interval)
        self._rejoiner.start()
        log.info("mesh.joined name=%s addr=%s", self._name, membership.local().gossip)

    async def _move(self, membership: Membership, own: OwnAddress) -> None:
        before, self.addr = self.addr, own.ip
        try:
            await membership.move(own.ip)
        except NoOwnAddress:
            raise
        except MeshError as error:  # such as a port that is taken there: it may be free again in a moment
            self._problem("move", f"cannot go on at {own.ip}: {error}")
            return
        self._problems.clear("move")
        await self._settled_at(own.ip)
        if self._rejoiner is not None:
            self._rejoiner.hurry()
        log.warning("mesh.moved from=%s to=%s", before, own.ip)

    async def _settled_at(self, ip: str) -> None:
        self.addr = self._client.own_ip = ip
        if self._mdns is not None and not is_loopback(ip):
            await self._mdns.announce(ip, self._config.mesh.bind_port)
        try:
            await self._on_address(ip)
        except OSError as error:
            self._problem("api", f"peers cannot reach the API at {ip}: {error}")

    def _lan_address(self) -> str | None:
        """Ours while it lasts, else the default route's, else the one on the way to a seed. Blocks."""
        if self.addr and holds_address(self.addr):
            return self.addr
        ways = (address_towards(*split_host_port(seed)) for seed in self._config.mesh.seeds)
        return default_route_address() or next((ip for ip in ways if ip is not None), None)

    async def _woke(self, asleep_s: float) -> None:
        log.warning("node.woke asleep_s=%.0f", asleep_s)
        self._dispatcher.peers.slept(asleep_s)
        if self._rejoiner is not None:
            self._rejoiner.kick()
        await self.ask_peers()

    # -- discovery -----------------------------------------------------------------------------------
    def _feeders(self, membership: Membership) -> dict[str, Feeder]:
        mesh = self._config.mesh
        feeders = {"seeds": seeds(mesh.seeds), "members that died": departed(membership)}
        if self._mdns is not None:
            feeders["mDNS"] = self._mdns.feed
        if mesh.tailnet.enabled == "on" or (mesh.tailnet.enabled == "auto" and mesh.network == "tailnet"):
            feeders["the tailnet"] = self._tailnet
        return feeders

    async def _tailnet(self) -> Sequence[str]:
        mesh = self._config.mesh
        return (await tailnet(mesh.tailnet.socket)).peers(self.addr, mesh.bind_port)

    def _on_news(self) -> None:
        if self._rejoiner is not None:
            self._rejoiner.kick()

    # -- messages ------------------------------------------------------------------------------------
    def _alive(self) -> list[str]:
        return [m.name for m in self.members()[1:] if m.state in ("alive", "suspect")]

    async def _send(self, name: str, data: bytes) -> None:
        if self._membership is not None:
            await self._membership.send(name, data)

    def _on_message(self, name: str, data: bytes) -> None:
        if data[:1] == MESSAGE_KIND:  # other kinds are of later versions
            self.aliases.message(name, data)

    # -- events --------------------------------------------------------------------------------------
    def _on_key(self, key: bytes) -> None:
        self._client.key = key

    def _on_event(self, event: MemberEvent) -> None:
        member = event.member
        log.info("member.%s name=%s addr=%s", event.kind, member.name, event.other_addr or member.api)
        if event.kind in ("dead", "left"):
            if event.kind == "left":
                self._dispatcher.node_left(member.name)
                self._left[member.name] = member, time.monotonic()
                while len(self._left) > MEMBERS_MAX:
                    del self._left[next(iter(self._left))]
            else:
                self._dispatcher.node_died(member.name)
            self.aliases.gone(member.name)
            self._dispatcher.book.node_gone(member.name)
            if event.kind == "dead" and self._rejoiner is not None:
                self._rejoiner.missing()
        elif member.role == "node" and event.kind != "conflict":
            self._dispatcher.peers.put(member.name, f"http://{member.api}")
        self._poller.on_member(event)
        self._on_member(event)
        self._dispatcher.wake()

    def _on_report(
        self, name: str, report: CapacityReport, requested_at: float, received_at: float, rtt_s: float
    ) -> None:
        member = self.member(name)
        api = member.api if member is not None else ""
        self.aliases.reported(name, report.aliases)
        self._dispatcher.peers.reported(name, PeerReport(report, requested_at, received_at, rtt_s, api))
        if report.holdings is not None:
            self._dispatcher.book.reported(name, report.holdings, requested_at)
        self._dispatcher.wake()

    def _problem(self, key: str, line: str) -> None:
        if self._problems.add(key, line, time.monotonic()):
            log.warning("%s", one_line(line))
