"""The mesh as one part of the node: membership, rejoin rounds and capacity polls, from start to leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from viiwork.config.load import LoadedConfig
from viiwork.core.capacity import CapacityReport, PeerReport
from viiwork.errors import MeshError
from viiwork.host.network import address_towards, default_route_address, port_owner
from viiwork.limits import HOLDINGS_ASK_S
from viiwork.mesh.address import own_address
from viiwork.mesh.admission import MeshIdentity
from viiwork.mesh.membership import Membership
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.polls import CapacityPoller
from viiwork.mesh.rejoin import Rejoiner, seeds
from viiwork.mesh.values import Member, MemberEvent, split_host_port
from viiwork.node.alias_gossip import AliasGossip
from viiwork.node.aliases import Aliases
from viiwork.node.dispatch import Dispatcher
from viiwork.version import VERSION
from viiwork.wire.aliases import MESSAGE_KIND

log = logging.getLogger(__name__)


class NodeMesh:
    """Keeps the dispatcher's view of the peers true."""

    def __init__(
        self,
        name: str,
        loaded: LoadedConfig,
        keys: tuple[bytes, ...],
        client: PeerClient,
        dispatcher: Dispatcher,
        on_fatal: Callable[[MeshError], None],
        aliases: Aliases,
    ) -> None:
        self._name = name
        self._config = loaded.config
        self._keys = keys
        self._client = client
        self._dispatcher = dispatcher
        self._on_fatal = on_fatal
        self._membership: Membership | None = None
        self._rejoiner: Rejoiner | None = None
        self._poller = CapacityPoller(
            client, interval_s=self._config.mesh.capacity_poll, on_report=self._on_report
        )
        self.aliases = AliasGossip(aliases, members=self._alive, send=self._send)
        self.addr = ""  # "" while the node looks for its own address

    async def start(self) -> None:
        """Find the own address (that may take minutes), listen and join. Raises `MeshError`."""
        mesh = self._config.mesh
        own = await own_address(mesh, self._lan_address)
        self.addr = own.ip
        self._client.own_ip = own.ip
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
            port_owner=port_owner,
        )
        await membership.start()
        self._membership = membership
        self._rejoiner = Rejoiner(membership, {"seeds": seeds(mesh.seeds)}, interval_s=mesh.rejoin_interval)
        self._rejoiner.start()
        log.info("mesh.joined name=%s addr=%s:%d", self._name, own.ip, mesh.bind_port)

    def _lan_address(self) -> str | None:
        """Of the default route's interface, else the one that leads to a seed. Blocks."""
        ways = (address_towards(*split_host_port(seed)) for seed in self._config.mesh.seeds)
        return default_route_address() or next((ip for ip in ways if ip is not None), None)

    async def leave(self) -> None:
        """Say goodbye and close; the poller ends too."""
        if self._rejoiner is not None:
            await self._rejoiner.stop()
        try:
            # Known until the end: a forward that comes meanwhile must still be told from a client's request.
            await asyncio.gather(
                self._poller.stop(), self._membership.stop() if self._membership else asyncio.sleep(0)
            )
        finally:
            self._membership = None

    async def ask_peers(self) -> None:
        """Hear at once what the peers hold now."""
        await self._poller.ask_now(HOLDINGS_ASK_S)

    def members(self) -> list[Member]:
        return self._membership.members() if self._membership is not None else []

    def member(self, name: str) -> Member | None:
        """A remote member that is alive or suspect."""
        return self._membership.member(name) if self._membership is not None else None

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "mode": "secured" if self._keys else "open",
            "state": "joined" if self._membership is not None else "looking for an own address",
            "members": [
                {"node": m.name, "addr": m.addr, "api": m.api, "state": m.state, "ver": m.version}
                for m in self.members()
            ],
            "problems": self._membership.problems() if self._membership is not None else [],
        }
        if failures := self._poller.failures():
            body["unreachable"] = failures
        return body

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
    def _on_event(self, event: MemberEvent) -> None:
        member = event.member
        log.info("member.%s name=%s addr=%s", event.kind, member.name, event.other_addr or member.api)
        if event.kind in ("dead", "left"):
            self._dispatcher.peers.remove(member.name)
            self.aliases.gone(member.name)
            self._dispatcher.book.node_gone(member.name)
        elif member.role == "node" and event.kind != "conflict":
            self._dispatcher.peers.put(member.name, f"http://{member.api}")
        self._poller.on_member(event)
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
