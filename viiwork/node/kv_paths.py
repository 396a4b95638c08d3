"""The ways to the peers: their addresses beside the mesh's, which of them work, which is best."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from viiwork.config.model import KvShareSection
from viiwork.core.addresses import is_private_path, is_within
from viiwork.core.paths import (
    LinkAddress,
    LinkRule,
    Path,
    PeerAddress,
    PeerPaths,
    mesh_path,
    paths_to,
    told_addresses,
)
from viiwork.errors import ChannelRefused, KvRefused, MeshError
from viiwork.limits import (
    LINK_CHECKS_AT_ONCE,
    LINK_GUESS_BYTES_PER_S,
    LINK_LOOK_S,
    LINK_PEERS_MAX,
    LINK_SILENCE_MS,
)
from viiwork.mesh.direct import DirectClient
from viiwork.mesh.notices import one_line
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member, canonical_ip
from viiwork.node.background import Background
from viiwork.wire.kvoffer import ENCRYPT_HEADER
from viiwork.wire.probe import (
    LINK_PAD,
    RUN_BYTES,
    Answer,
    addresses_of,
    decode_probe,
    decode_table,
    encode,
    encode_table,
    prove,
)

log = logging.getLogger(__name__)


class Hears(Protocol):
    """See `node.listeners.Listeners.hears`."""

    def __call__(self, address: LinkAddress, *, is_named: bool) -> Awaitable[bool]: ...


@dataclass(slots=True)
class _Peer:
    """One peer, its addresses as it told them, and the ways there."""

    member: Member
    paths: PeerPaths
    told: tuple[PeerAddress, ...] = ()
    run: str = ""  # of its process, "" = it has told nothing yet
    due_at: float = 0.0
    is_checking: bool = False
    why_not: str = ""  # why there are no direct links to it


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """A raw channel over one of the paths; the socket is the caller's."""

    sock: socket.socket
    path: Path
    encrypt: bool
    bytes_per_s: float  # measured, 0 = not yet


@dataclass(frozen=True, slots=True)
class LinkHost:
    """This machine's addresses, and whether the API is there for a peer that comes to one of them."""

    addresses: Callable[[], list[LinkAddress]]
    hears: Hears


@dataclass(slots=True)
class _Own:
    """This machine's addresses as they were seen last, and those of them that peers are told."""

    all: list[LinkAddress] = field(default_factory=list)
    told: list[LinkAddress] = field(default_factory=list)


class KvPaths:
    """Keeps the paths to all peers that states may go to; implements `api.ports.Links`."""

    def __init__(
        self,
        me: str,
        config: KvShareSection,
        client: PeerClient,
        keys: tuple[bytes, ...],
        origins: MeshOrigins,
        host: LinkHost,
        wanted: Callable[[], Collection[Member]],
    ) -> None:
        """`wanted` lists the members that states may go to or come from now."""
        self._me = me
        self._config = config
        self._client = client
        self._origins = origins
        self._host = host
        self._wanted = wanted
        self._rule = LinkRule(config.direct, secured=bool(keys), open_lan=config.open)
        self._direct = DirectClient(me, client, keys)
        self._run = os.urandom(RUN_BYTES).hex()
        self._own = _Own()
        self._peers: dict[str, _Peer] = {}
        self._background = Background()
        self._room = asyncio.Semaphore(LINK_CHECKS_AT_ONCE)

    async def run(self) -> None:
        """Follow this machine's addresses and the peers', and probe what is due. For the node's life."""
        if not self._config.enabled or self._rule.is_off:
            await asyncio.Event().wait()  # nothing to do, and a task that ends would end the node
        while True:
            await self._look()
            self._follow()
            now = time.monotonic()
            for peer in self._peers.values():
                if now >= peer.due_at and not peer.is_checking:
                    peer.is_checking = True
                    self._background.go(self._check(peer))
            await asyncio.sleep(LINK_LOOK_S)

    async def stop(self) -> None:
        await self._background.stop()

    # -- for those who send --------------------------------------------------------------------------
    async def open(self, member: Member, offer: bytes, without: Collection[Path] = ()) -> OpenedPath:
        """A channel to the member over the best path that is not in `without`.

        A path that does not work is passed over. Raises `ChannelRefused` when the member says no, or none
        is left.
        """
        refused = ChannelRefused(f"no path to {member.name} is left")
        for path in self.ranked(member):
            if path in without:
                continue
            addr = "" if path.is_mesh else path.addr
            try:
                channel = await self._client.open_channel(member, {}, offer, addr=addr, source=path.source)
            except ChannelRefused as error:
                refused = error
                if error.status == KvRefused.http_status or (path.is_mesh and error.status):
                    raise  # the member's word is the same on every path
                self.failed(member, path, str(error))
                continue
            if not path.is_mesh and hasattr(socket, "TCP_USER_TIMEOUT"):
                with suppress(OSError):  # it is gone already, and the worker will say so
                    channel.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_SILENCE_MS)
            encrypt = must_encrypt(self._config, path.addr) or ENCRYPT_HEADER.lower() in channel.headers
            return OpenedPath(channel.sock, path, encrypt, self._measured(member, path))
        raise refused

    def ranked(self, member: Member) -> list[Path]:
        """The ways to the member, the best first; the mesh's is always among them."""
        peer = self._peers.get(member.name)
        if peer is None or peer.member.addr != member.addr:
            return [mesh_path(member.addr, "", self._own.all, ())]
        return peer.paths.ranked(time.monotonic())

    def bytes_per_s(self, member: Member | None) -> float:
        """Bytes/s a transfer to or from the member is expected to get; a guess where nothing is known."""
        peer = self._peers.get(member.name) if member is not None else None
        if peer is None:
            return LINK_GUESS_BYTES_PER_S
        now = time.monotonic()
        return peer.paths.rate(peer.paths.ranked(now)[0], now)[0]

    def _measured(self, member: Member, path: Path) -> float:
        peer = self._peers.get(member.name)
        return peer.paths.measured(path, time.monotonic()) or 0.0 if peer is not None else 0.0

    def sent(self, member: Member, path: Path, n_bytes: int, seconds: float) -> None:
        """A transfer of `n_bytes` on the wire ended well."""
        if peer := self._peers.get(member.name):
            peer.paths.sent(path, n_bytes, seconds, time.monotonic())

    def failed(self, member: Member, path: Path, why: str) -> None:
        """A transfer or its channel failed on this path; it is tried again when a probe finds it working."""
        why = one_line(why)
        if (peer := self._peers.get(member.name)) is not None and peer.paths.failed(path, why):
            log.warning("link.failed peer=%s addr=%s: %s", member.name, path.addr, why)
            peer.due_at = min(peer.due_at, time.monotonic() + peer.paths.next_check_s(False))

    # -- for peers who ask ---------------------------------------------------------------------------
    def is_at(self, name: str, ip: str) -> bool:
        """Did the member tell this node that it has the address?"""
        peer = self._peers.get(name)
        return peer is not None and any(told.addr == ip for told in peer.told)

    def told(self, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str) -> bytes:
        """See `api.ports.Links.told`."""
        name = self._origins.sent_by("POST", path_qs, headers, body, remote_ip)
        self._refuse_when_off()
        table = decode_table(body)
        if table.node != name:
            raise KvRefused(f"{one_line(name)!r} brings the addresses of {one_line(table.node)!r}")
        peer = self._peers.get(name)
        if peer is not None and (peer.run, peer.told) != (table.run, addresses_of(table)):
            peer.run, peer.told = table.run, addresses_of(table)
            peer.due_at = 0.0
        return encode_table(self._me, self._run, self._own.told)

    def probed(
        self, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str, local_ip: str
    ) -> bytes:
        """See `api.ports.Links.probed`."""
        name = self._origins.sent_by("POST", path_qs, headers, body, remote_ip)
        self._refuse_when_off()
        probe = decode_probe(body)
        if probe.to != self._me:
            raise KvRefused(f"this is {self._me!r}, not {one_line(probe.to)!r}")
        if probe.addr != _plain(local_ip):
            # Somebody in between passes our proofs on; or the address is translated, and not this machine's.
            raise KvRefused(f"this was reached at {_plain(local_ip)}, not at {one_line(probe.addr)}")
        key = self._client.key or bytes.fromhex(self._run)
        proof = prove(key, asks=name, asked=self._me, addr=probe.addr, nonce=probe.nonce, run=self._run)
        return encode(Answer(node=self._me, proof=proof, pad=LINK_PAD))

    def _refuse_when_off(self) -> None:
        if not self._config.enabled or self._rule.is_off:
            raise KvRefused("direct links are off on this node")

    # -- what others see -----------------------------------------------------------------------------
    def status(self) -> list[dict[str, Any]]:
        """`kv_share.links` of `/v1/status`."""
        now = time.monotonic()
        return [
            {"peer": name}
            | peer.paths.as_json(now)
            | ({"no_direct_links": peer.why_not} if peer.why_not else {})
            for name, peer in sorted(self._peers.items())
        ]

    # -- keeping up ----------------------------------------------------------------------------------
    async def _look(self) -> None:
        try:
            found = await asyncio.to_thread(self._host.addresses)
        except OSError as error:  # an interface went while it was looked at
            log.debug("addresses: %s", error)
            return
        if found == self._own.all:
            return
        told = [
            address
            for address in told_addresses(found, self._rule)
            if await self._host.hears(address, is_named=self._rule.is_list)
        ]
        self._own = _Own(found, told)
        for peer in self._peers.values():
            peer.due_at = 0.0

    def _follow(self) -> None:
        """Begin and end with peers as they come and go."""
        wanted = {member.name: member for member in list(self._wanted())[:LINK_PEERS_MAX]}
        for name, peer in list(self._peers.items()):
            member = wanted.get(name)
            if member is None or (member.addr, member.api_port) != (peer.member.addr, peer.member.api_port):
                del self._peers[name]
        for name, member in wanted.items():
            if name not in self._peers:
                self._peers[name] = _Peer(member, PeerPaths(self._mesh_path(member, ())))

    def _mesh_path(self, member: Member, told: tuple[PeerAddress, ...]) -> Path:
        return mesh_path(member.addr, self._client.own_ip, self._own.all, told)

    async def _check(self, peer: _Peer) -> None:
        try:
            async with self._room:
                await self._check_now(peer)
        finally:
            peer.is_checking = False

    async def _check_now(self, peer: _Peer) -> None:
        """One round: the peer's addresses anew, and a probe of every path."""
        member, is_whole = peer.member, True
        peer.due_at = float("inf")
        try:
            table = await self._direct.exchange(member, self._run, self._own.told)
            peer.run, peer.told, peer.why_not = table.run, addresses_of(table), ""
        except MeshError as error:
            if str(error) != peer.why_not:
                log.info("link.unknown peer=%s: %s", member.name, error)
            peer.why_not, is_whole = str(error), False
        mesh = self._mesh_path(member, peer.told)
        peer.paths.offer(mesh, paths_to(self._own.all, peer.told, self._rule, member.addr))
        if peer.run:
            for path in peer.paths.paths():
                is_whole &= await self._probe(peer, path)
        peer.due_at = min(peer.due_at, time.monotonic() + peer.paths.next_check_s(is_whole))

    async def _probe(self, peer: _Peer, path: Path) -> bool:
        """Did the peer answer?"""
        member = peer.member
        # A secured mesh proves its nodes from anywhere; an open one by the address they come from.
        source = self._client.source_ip if path.is_mesh else path.source
        try:
            rtt_s = await self._direct.probe(member, peer.run, path, source=source)
        except MeshError as error:
            if peer.paths.failed(path, one_line(str(error))):
                log.warning("link.failed peer=%s addr=%s: %s", member.name, path.addr, error)
            return False
        if peer.paths.answered(path, rtt_s) and not path.is_mesh:
            log.info("link.up peer=%s addr=%s source=%s", member.name, path.addr, path.source or "any")
        return True


def must_encrypt(config: KvShareSection, addr: str) -> bool:
    """`kv_share.encrypt`; auto encrypts wherever the path itself does not keep the bytes private."""
    if config.encrypt == "auto":
        return not is_private_path(addr) and not is_within(addr.partition("%")[0], config.plain)
    return config.encrypt == "on"


def _plain(ip: str) -> str:
    """The address as it is told: one spelling, no zone."""
    try:
        return canonical_ip(ip.partition("%")[0])
    except ValueError:
        return ""
