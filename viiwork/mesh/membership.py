"""Who is in the mesh: kinship's gossip behind our own values, with the mesh's admission rules.

kinship runs the protocol on a thread of its own, so a busy event loop never makes this node look dead. Its
members pass three checks before anyone here hears of them: metadata of our version, a usable name, and, in
an open mesh, an address of a private range. Everything below runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import kinship

from viiwork.core.addresses import is_loopback
from viiwork.core.names import node_name_problem
from viiwork.errors import DuplicateName, MeshError, NoOwnAddress, PortTaken
from viiwork.limits import (
    DEPARTED_KEPT_S,
    DEPARTED_MAX,
    FORMER_ADDRESSES_MAX,
    GOSSIP_MAX_BYTES,
    GOSSIP_STREAM_S,
    HURRY_S,
    LEAVE_TIMEOUT_S,
    MEMBERS_MAX,
    MOVE_GRACE_S,
    NAME_GRACE_S,
)
from viiwork.mesh.admission import MeshIdentity, admit
from viiwork.mesh.counters import UDP_LOOK_S, udp_loss, unread_packets
from viiwork.mesh.keys import sending_key
from viiwork.mesh.library_log import route_kinship_log
from viiwork.mesh.notices import Problems, one_line
from viiwork.mesh.probe import is_own, listens, taken_protocols
from viiwork.mesh.values import EventKind, Member, MemberEvent, MemberState, host_port, split_host_port

log = logging.getLogger(__name__)

CLUSTER = "viiwork"  # label on every packet: other kinship clusters on the port ignore us and we them
_DUEL_S = 3.0  # a node that gives up its name leaves the mesh first, within a second
_WATCH_S = 2.0  # how often the counters are looked at; only problems wait for it

_STATES: dict[kinship.State, MemberState] = {
    kinship.State.ALIVE: "alive",
    kinship.State.SUSPECT: "suspect",
    kinship.State.DEAD: "dead",
    kinship.State.LEFT: "left",
}


class Membership:
    """Owner of the member table.

    `on_event` hears everything that happens to other members, in order, and conflicts of any name once a
    minute. `on_message` gets what members sent with `send`; the name of the sender is what it claims.
    `on_key` hears which secret to sign with, whenever that changes. `on_fatal` is called once if this node
    must give up its name. All run on the event loop.
    """

    def __init__(
        self,
        identity: MeshIdentity,
        *,
        on_event: Callable[[MemberEvent], None],
        on_fatal: Callable[[MeshError], None] | None = None,
        on_key: Callable[[bytes], None] | None = None,
        on_message: Callable[[str, bytes], None] | None = None,
        port_owner: Callable[[int, str], str | None] | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._id = identity
        self._on_event = on_event
        self._on_fatal = on_fatal
        self._on_key = on_key
        self._on_message = on_message
        self._port_owner = port_owner
        self._now = now
        self._sleep = sleep
        self._born_at = now()
        self._cluster: kinship.Cluster | None = None
        self._members: dict[str, Member] = {}  # alive and suspect, this node excluded
        self._departed: dict[str, tuple[float, Member]] = {}  # oldest first
        self._problems = Problems()
        self._tasks: list[asyncio.Task[None]] = []
        self._duel: asyncio.Task[None] | None = None  # while it is open who keeps our name
        self._former: dict[str, None] = {}  # our gossip addresses before the last move, oldest first
        self._key = identity.keys[-1] if identity.keys else b""  # the one we send with
        self._said_key = b""
        self._fatal = False

    async def start(self) -> None:
        """Bind and listen; joins nobody yet. Raises PortTaken, NoOwnAddress or MeshError."""
        if problem := node_name_problem(self._id.name):
            raise MeshError(f"node name {self._id.name!r} {problem}; set node.name")
        await asyncio.to_thread(route_kinship_log)
        await self._open()

    async def move(self, addr: str) -> None:
        """Go on at another address of this machine; raises as `start`, and may then be called again.

        Nobody is told goodbye: the old address is gone. Members are kept until they are met again or
        MOVE_GRACE_S have passed, so that sessions stay with their hosts.
        """
        if self._cluster is not None:
            self._former.pop(self.local().gossip, None)
            self._former[self.local().gossip] = None
            while len(self._former) > FORMER_ADDRESSES_MAX:
                del self._former[next(iter(self._former))]
        await self._close(leave_s=None)
        self._id = replace(self._id, addr=addr)
        await self._open()

    @property
    def is_running(self) -> bool:
        return self._cluster is not None

    async def stop(self) -> None:
        """Say goodbye within LEAVE_TIMEOUT_S, then close."""
        await self._close(leave_s=LEAVE_TIMEOUT_S)

    async def _open(self) -> None:
        bind = host_port(self._id.addr, self._id.port)
        keys = [self._key, *(key for key in self._id.keys if key != self._key)] if self._id.keys else []
        try:
            config = kinship.Config.lan(
                name=self._id.name,
                bind=bind,
                cluster=CLUSTER,
                seeds=[],  # joined by `join`, one at a time, so that one dead seed delays nobody
                keys=keys,
                insecure_plaintext=self._id.is_open,
                max_members=MEMBERS_MAX,
                udp_max_payload=GOSSIP_MAX_BYTES,
                tcp_timeout=GOSSIP_STREAM_S,
                join_retries=1,  # the next round of discovery tries again
                meta=self._id.meta(),
            )
            cluster = kinship.Cluster(config)
            await cluster.start()
        except kinship.KinshipError as error:
            raise MeshError(f"cannot start membership on {bind}: {one_line(str(error))}") from error
        except OSError as error:
            raise await asyncio.to_thread(self._bind_error, error) from error
        self._cluster = cluster
        if self._id.is_open and not is_loopback(self._id.addr):
            log.warning("the mesh is open: anyone who reaches %s can join and read prompts", bind)
        events = cluster.events()
        self._tasks = [
            asyncio.create_task(self._consume(cluster, events), name="mesh-events"),
            asyncio.create_task(self._watch(cluster), name="mesh-watch"),
            asyncio.create_task(self._settle(cluster), name="mesh-settle"),
        ]

    async def _close(self, *, leave_s: float | None) -> None:
        cluster, self._cluster = self._cluster, None
        tasks, self._tasks = [*self._tasks, *([self._duel] if self._duel else [])], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if cluster is None:
            return
        try:
            if leave_s is not None:
                with contextlib.suppress(kinship.KinshipClosed):
                    await cluster.leave(leave_s)
        finally:
            await cluster.close()

    async def _settle(self, cluster: kinship.Cluster) -> None:
        """Let go of members from before a move that were not met again."""
        if self._members:
            await self._sleep(MOVE_GRACE_S)
        self._resync(cluster)

    async def join(self, addresses: list[str]) -> int:
        """Try each `ip:port`; returns how many answered. Failures are no errors: they become problems."""
        answered = 0
        for address in addresses:
            answered += await self._join_one(address)
        return answered

    async def send(self, name: str, data: bytes) -> None:
        """Send a member at most 64 KiB, the first byte for their kind; nothing tells whether they came."""
        if self._cluster is not None:
            try:
                await self._cluster.send(name, data)
            except kinship.MessageTooLarge:
                raise  # our own bug
            except (kinship.KinshipError, OSError) as error:
                # It may have left in this moment; whoever sends repeats what matters.
                log.debug("message to %s: %s", name, error)

    def members(self) -> list[Member]:
        """This node first, then the others by name; departed ones for 24 h."""
        self._expire_departed()
        gone = [m for _, m in self._departed.values() if m.name not in self._members]
        return [self.local(), *sorted([*self._members.values(), *gone], key=lambda m: m.name)]

    def member(self, name: str) -> Member | None:
        """A remote member that is alive or suspect."""
        return self._members.get(name)

    def local(self) -> Member:
        """This node; the port is the real one after `start`."""
        port, epoch = self._id.port, 0
        if self._cluster is not None:
            local = self._cluster.local
            port, epoch = split_host_port(local.addr)[1], local.epoch
        identity = self._id
        return Member(
            name=identity.name,
            addr=identity.addr,
            gossip_port=port,
            api_port=identity.api_port,
            state="alive",
            version=identity.version,
            role=identity.role,
            epoch=epoch,
        )

    def problems(self) -> list[str]:
        """What is wrong with the mesh right now, one line each."""
        return self._problems.lines(self._now())

    # -- joining -----------------------------------------------------------------------------------
    async def _join_one(self, address: str) -> int:
        cluster = self._cluster
        if cluster is None:
            return 0
        try:
            # Literals only: a name would be looked up, for up to half a minute, by whoever answers DNS.
            address = host_port(*split_host_port(address))
            answered = await self._join_with_either(cluster, address)
        except kinship.JoinError:
            # kinship cannot tell a silent machine from one that could not read us; a connect can.
            if self._cluster is not None and await listens(address):
                self._problem(
                    f"join {address}",
                    f"{address} takes connections but does not answer: its secret differs from ours, "
                    f"{'it is secured and we are open' if self._id.is_open else 'it is open'}, "
                    "or something else has the port",
                )
            return 0
        except kinship.KinshipClosed:
            return 0  # stopped or moved meanwhile
        except (kinship.KinshipError, ValueError) as error:
            self._problem(f"join {address[:64]}", f"cannot join: {error}")
            return 0
        self._problems.clear(f"join {address}")
        return answered

    async def _join_with_either(self, cluster: kinship.Cluster, address: str) -> int:
        """With two secrets a lonely node cannot know which one the others have: it tries both."""
        if len(self._id.keys) < 2 or self._members:
            return await cluster.join([address])
        try:
            return await cluster.join([address])
        except kinship.JoinError:
            await self._send_with(cluster, next(key for key in self._id.keys if key != self._key))
            return await cluster.join([address])

    def _bind_error(self, error: OSError) -> MeshError:
        # kinship's error carries no errno: find out ourselves what is wrong.
        if not is_own(self._id.addr):
            return NoOwnAddress(f"{self._id.addr} is no address of this machine; check mesh.advertise")
        taken = taken_protocols(self._id.addr, self._id.port)
        if not taken:
            return MeshError(f"cannot listen on {host_port(self._id.addr, self._id.port)}: {error}")
        owner = self._port_owner(self._id.port, taken[0]) if self._port_owner else None
        by = f" by {owner}" if owner else ""
        return PortTaken(
            f"gossip port {self._id.port}/{' and '.join(taken)} on {self._id.addr} is taken{by}; "
            "stop that process or set mesh.bind_port on every node"
        )

    # -- secrets -----------------------------------------------------------------------------------
    async def _choose_key(self, cluster: kinship.Cluster) -> None:
        if len(self._id.keys) < 2 or not self._members:
            return
        key = sending_key(self._id.keys, [member.key_ids for member in self._members.values()])
        await self._send_with(cluster, key)
        if key != self._said_key:
            self._said_key = key
            log.info("mesh.secret using=%s", "current" if key == self._id.keys[0] else "previous")

    async def _send_with(self, cluster: kinship.Cluster, key: bytes) -> None:
        if key == self._key:
            return
        self._key = key
        await cluster.keyring.use(key)
        if self._on_key is not None:
            self._on_key(key)

    # -- events ------------------------------------------------------------------------------------
    async def _consume(self, cluster: kinship.Cluster, events: kinship.EventStream) -> None:
        try:
            async for event in events:
                match event:
                    case kinship.MemberJoined(member=m):
                        self._see(m, "joined")
                    case kinship.MemberSuspect(member=m):
                        self._see(m, "suspect")
                    case kinship.MemberRecovered(member=m):
                        self._see(m, "recovered")
                    case kinship.MemberUpdated(member=m):
                        self._see(m, "updated")
                    case kinship.MemberDead(member=m):
                        self._depart(m.name, "dead")
                    case kinship.MemberLeft(member=m):
                        self._depart(m.name, "left")
                    case kinship.NameConflict(member=m, other_addr=other):
                        self._conflict(m, other)
                    case kinship.UserMessage(sender=m, data=data):
                        self._hear(m.name, data)
                    case kinship.EventsLost():
                        self._resync(cluster)
                await self._choose_key(cluster)
        except Exception as error:
            # Whatever it was, nobody would hear of a change any more: better to stop than to go on blind.
            log.exception("membership stopped")
            self._die(MeshError(f"membership stopped: {one_line(str(error) or type(error).__name__)}"))

    def _hear(self, name: str, data: bytes) -> None:
        """Pass a message on, if it is of a member of ours."""
        if self._on_message is None or name not in self._members:
            return
        try:
            self._on_message(name, data)
        except Exception:  # a listener's bug must not end membership for everybody else
            log.exception("a listener failed on a message of %s", name)

    def _see(self, raw: kinship.Member, kind: EventKind) -> None:
        """Take over what gossip says of a present member, unless it is not one of ours."""
        if raw.name == self._id.name:
            return
        member = self._admit(raw)
        known = self._members.get(raw.name)
        if member is None:
            if known is not None:  # it changed into something we would not have let in
                self._depart(raw.name, "left")
            return
        self._members[member.name] = member
        self._departed.pop(member.name, None)
        if known is None or known.gossip != member.gossip:
            self._problems.clear(f"name {member.name}")  # two claimed it; one has it now
        if known is None:
            kind = "joined"  # whatever gossip calls it: the node has not heard of this member yet
        elif kind == "joined":
            kind = "updated"
        self._emit(MemberEvent(kind, member))
        if known is None and member.state == "suspect":
            self._emit(MemberEvent("suspect", member))

    def _depart(self, name: str, state: MemberState) -> None:
        member = self._members.pop(name, None)
        if member is None:
            return
        gone = replace(member, state=state)
        while len(self._departed) >= DEPARTED_MAX:
            del self._departed[next(iter(self._departed))]
        self._departed[name] = (self._now(), gone)
        self._emit(MemberEvent("left" if state == "left" else "dead", gone))

    def _resync(self, cluster: kinship.Cluster) -> None:
        """Make the table equal to gossip's own and emit the differences."""
        present = {m.name: m for m in cluster.members()}
        for name in [n for n in self._members if n not in present]:
            tombstone = cluster.member(name)
            left = tombstone is not None and tombstone.state is kinship.State.LEFT
            self._depart(name, "left" if left else "dead")
        for name, raw in present.items():
            known = self._members.get(name)
            if known is None or known.epoch != raw.epoch:
                self._see(raw, "joined")
            elif known.state != _STATES[raw.state]:
                self._see(raw, "suspect" if raw.state is kinship.State.SUSPECT else "recovered")
            elif known != self._admit(raw):
                self._see(raw, "updated")

    def _admit(self, raw: kinship.Member) -> Member | None:
        """The member as ours, None (and a problem) if it has no business here."""
        verdict = admit(self._id, raw.name, raw.addr, _STATES[raw.state], raw.meta, raw.epoch)
        if isinstance(verdict, Member):
            return verdict
        self._problem(f"admit {raw.name[:64]}", verdict)
        return None

    def _conflict(self, raw: kinship.Member, other_addr: str) -> None:
        if raw.name == self._id.name:
            if other_addr in self._former:
                return  # the others have not forgotten where we were
            line = f"another node at {other_addr} bears our name {raw.name!r}; give one another node.name"
            due = self._problem(f"name {raw.name}", line)
            if self._now() - self._born_at >= NAME_GRACE_S:
                if due:
                    self._emit(MemberEvent("conflict", self.local(), other_addr))
            elif _address_key(self.local().gossip) > _address_key(other_addr):
                self._die(DuplicateName(line))
            elif self._duel is None or self._duel.done():
                self._duel = asyncio.create_task(self._outlast(other_addr, line), name="mesh-duel")
            return
        line = f"two nodes claim the name {raw.name!r}: {raw.addr} and {other_addr}; the second is ignored"
        member = self._members.get(raw.name)
        # A node that comes back with another address is refused until its old record expires (30 s).
        if member is not None and self._problem(f"name {raw.name[:64]}", line):
            self._emit(MemberEvent("conflict", member, other_addr))

    async def _outlast(self, other_addr: str, line: str) -> None:
        """Give up the name too, unless its other bearer is gone in a moment.

        Two young processes that both gave up at once would, started again by whoever looks after them,
        give up for ever. So the one with the lower address looks whether the other is an older process,
        which stays, or a young one, which has just given up.
        """
        await self._sleep(_DUEL_S)
        if self._cluster is None:
            return
        with contextlib.suppress(kinship.KinshipError, ValueError):
            if await self._cluster.join([other_addr]):
                self._die(DuplicateName(line))

    # -- watching ----------------------------------------------------------------------------------
    async def _watch(self, cluster: kinship.Cluster) -> None:
        seen = udp_seen = cluster.stats()
        udp_due_at = self._now() + UDP_LOOK_S
        # Who has just moved is not heard until its old record expires, which looks like lost datagrams.
        quiet_until = self._now() + HURRY_S if self._former else 0.0
        with contextlib.suppress(kinship.KinshipClosed):
            while True:
                await self._sleep(_WATCH_S)
                stats = cluster.stats()
                for key, line in unread_packets(seen, stats, is_open=self._id.is_open):
                    self._problem(key, line)
                seen = stats
                if self._now() >= udp_due_at:
                    found = udp_loss(udp_seen, stats, self.local().gossip_port)
                    if found and udp_due_at - UDP_LOOK_S >= quiet_until:
                        self._problem(*found)
                    udp_seen, udp_due_at = stats, self._now() + UDP_LOOK_S

    def _problem(self, key: str, line: str) -> bool:
        due = self._problems.add(key, line, self._now())
        if due:
            log.warning("%s", one_line(line))
        return due

    def _emit(self, event: MemberEvent) -> None:
        try:
            self._on_event(event)
        except Exception:  # a listener's bug must not end membership for everybody else
            log.exception("a listener failed on %s of %s", event.kind, event.member.name)

    def _die(self, error: MeshError) -> None:
        if self._fatal:
            return
        self._fatal = True
        log.error("%s", error)
        if self._on_fatal is not None:
            self._on_fatal(error)

    def _expire_departed(self) -> None:
        now = self._now()
        for name in [n for n, (at, _) in self._departed.items() if now - at >= DEPARTED_KEPT_S]:
            del self._departed[name]


def _address_key(address: str) -> tuple[int, int, int]:
    """An order of addresses; one that cannot be read comes last."""
    try:
        ip, port = split_host_port(address)
    except ValueError:
        return 7, 0, 0
    parsed = ipaddress.ip_address(ip)
    return parsed.version, int(parsed), port
