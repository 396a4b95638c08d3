"""The mesh stream: one hub for all viewers of this node, at work only while there are any.

It follows each member's activity over one connection, adds its own, and looks once a second whether the
picture of the cluster changed. A viewer that comes later gets what the others have seen, from the rings here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import msgspec

from viiwork.api.ports import Viewer
from viiwork.api.streams import frame
from viiwork.core.activity import ActivityLog, Event, MeshEvent, is_end_text
from viiwork.limits import (
    CLUSTER_LOOK_S,
    HUB_EVENTS_PER_MEMBER,
    HUB_FRAME_MAX_BYTES,
    HUB_HEALTHY_S,
    HUB_MEMBERS_MAX,
    HUB_RETRY_MAX_S,
    HUB_RETRY_MIN_S,
    HUB_SILENCE_S,
    STATUS_POLL_S,
)
from viiwork.mesh.notices import one_line
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member
from viiwork.node.clock import wall_ms
from viiwork.node.cluster import Cluster

log = logging.getLogger(__name__)

ACTIVITY_STREAM_PATH = "/v1/activity/stream"
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=HUB_RETRY_MIN_S, sock_read=HUB_SILENCE_S)
_decode = msgspec.json.Decoder(Event).decode


class MeshHub:
    """Implements `api.ports.Hub`."""

    def __init__(
        self,
        name: str,
        node_id: str,
        activity: ActivityLog,
        cluster: Cluster,
        client: PeerClient,
        *,
        members: Callable[[], Sequence[Member]],
        own_api: Callable[[], str],
        own_status: Callable[[], dict[str, Any]],
        own_room: Callable[[], object],
        aliases: Callable[[], Any] | None = None,
        look_s: float = CLUSTER_LOOK_S,
        wall_ms: Callable[[], int] = wall_ms,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own_room` tells cheaply whether this node's part of the picture may have changed."""
        self._name = name
        self._node_id = node_id
        self._activity = activity
        self._cluster = cluster
        self._client = client
        self._members = members
        self._own_api = own_api
        self._own_status = own_status
        self._own_room = own_room
        self._aliases = aliases
        self._look_s = look_s
        self._wall_ms = wall_ms
        self._now = now
        self._viewers: dict[Viewer, None] = {}
        self._followed: dict[str, _Followed] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._own: tuple[float, object, dict[str, Any]] | None = (
            None  # own status, and when and for which room
        )
        self._shown: dict[str, bytes] = {}  # newest frame of each kind of picture

    # -- api.ports.Hub -------------------------------------------------------------------------------
    async def cluster(self) -> bytes:
        return await self._cluster.current()

    @property
    def n_viewers(self) -> int:
        return len(self._viewers)

    def enter(self, viewer: Viewer) -> None:
        self._viewers[viewer] = None
        for picture in self._shown.values():
            viewer.put(picture)
        now_ms = self._wall_ms()
        events = [self._mine(event) for event in self._activity.replay(now_ms)]
        for followed in self._followed.values():
            events += [followed.seen_here(event) for event in followed.log.replay(now_ms)]
        if events:
            viewer.put(b"".join(frame("activity", event) for event in sorted(events, key=lambda e: e.t)))
        if self._task is None:
            self._activity.tap(self._happened_here)
            self._task = self._go(self._look_on(), "mesh stream")

    def leave(self, viewer: Viewer) -> None:
        self._viewers.pop(viewer, None)
        if not self._viewers:
            self._rest()

    def close(self) -> None:
        """Let all streams end."""
        for viewer in list(self._viewers):
            viewer.close()

    async def stop(self) -> None:
        self.close()
        self._rest()
        await asyncio.gather(*self._ending, return_exceptions=True)

    # -- pictures ------------------------------------------------------------------------------------
    async def _look_on(self) -> None:
        while True:
            self._cluster.watch()
            self._follow_members()
            self._show("cluster", self._cluster.picture(self._fresh_own()))
            if self._aliases is not None:
                self._show("aliases", msgspec.json.encode(self._aliases()))
            await asyncio.sleep(self._look_s)

    def _show(self, event: str, picture: bytes) -> None:
        told = frame(event, picture)
        if self._shown.get(event) != told:
            self._shown[event] = told
            self._tell(told)

    def _fresh_own(self) -> dict[str, Any]:
        """Own status, made anew when slots changed hands or when the others' are asked for anew: clocks and
        memory in it change all the time."""
        room, now = self._own_room(), self._now()
        if self._own is None or self._own[1] != room or now - self._own[0] >= STATUS_POLL_S:
            self._own = now, room, self._own_status()
        return self._own[2]

    # -- activity ------------------------------------------------------------------------------------
    def _happened_here(self, event: Event) -> None:
        self._tell(frame("activity", self._mine(event)))

    def _mine(self, event: Event) -> MeshEvent:
        return _placed(event, self._node_id, self._name, self._own_api())

    def _follow_members(self) -> None:
        present = [member for member in self._members() if member.is_present and member.role == "node"]
        wanted = {member.name: member for member in present[:HUB_MEMBERS_MAX]}
        for name, followed in list(self._followed.items()):
            if name not in wanted or wanted[name].api != followed.member.api:
                del self._followed[name]
                followed.task.cancel()
        for name, member in wanted.items():
            if name not in self._followed:
                followed = self._followed[name] = _Followed(member, self._cluster)
                followed.task = self._go(self._follow(followed), f"follow {name}")

    async def _follow(self, followed: _Followed) -> None:
        pause_s = HUB_RETRY_MIN_S
        while True:
            since = self._now()
            try:
                await self._read(followed)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                log.debug("activity of %s: %s", followed.member.name, one_line(str(error)))
            except Exception:  # our own bug; the member must not stay unseen for ever
                log.exception("following %s failed", followed.member.name)
            if self._now() - since >= HUB_HEALTHY_S:
                pause_s = HUB_RETRY_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, HUB_RETRY_MAX_S)

    async def _read(self, followed: _Followed) -> None:
        url = f"http://{followed.member.api}{ACTIVITY_STREAM_PATH}"
        async with self._client.request("GET", url, timeout=_TIMEOUT) as answer:
            if answer.status != 200:
                raise ValueError(f"{followed.member.api} answers {ACTIVITY_STREAM_PATH} with {answer.status}")
            rest = b""
            known = {(event.t, event.rid, event.message) for event in followed.log.events()}
            while chunk := await answer.content.readany():
                *whole, rest = (rest + chunk).split(b"\n\n")
                if len(rest) > HUB_FRAME_MAX_BYTES:
                    raise ValueError(f"{followed.member.api}: an event over {HUB_FRAME_MAX_BYTES} bytes")
                told = [event for data in whole if (event := _event_of(data)) is not None]
                new = [e for e in told if not e.replay or (e.t, e.rid, e.message) not in known]
                for event in new:
                    followed.log.emit(event, is_end=bool(event.rid) and is_end_text(event.message))
                if new:
                    self._tell(b"".join(frame("activity", followed.seen_here(event)) for event in new))

    def _tell(self, told: bytes) -> None:
        for viewer in list(self._viewers):
            viewer.put(told)

    def _go(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _rest(self) -> None:
        """Nobody looks any more."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        self._activity.untap(self._happened_here)
        for followed in self._followed.values():
            followed.task.cancel()
        self._followed.clear()
        self._shown.clear()
        self._own = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("mesh_stream.failed", exc_info=error)
            self.close()  # viewers come again, and the first one starts anew
            self._rest()


class _Followed:
    """A member, and the newest of its activity."""

    task: asyncio.Task[None]

    def __init__(self, member: Member, cluster: Cluster) -> None:
        self.member = member
        self.log = ActivityLog(HUB_EVENTS_PER_MEMBER)
        self._cluster = cluster

    def seen_here(self, event: Event) -> MeshEvent:
        return _placed(event, self._cluster.node_id(self.member.name), self.member.name, self.member.api)


def _placed(event: Event, node_id: str, hostname: str, addr: str) -> MeshEvent:
    return MeshEvent(
        event.t, event.type, event.message, event.gpu_id, event.rid, event.replay, node_id, hostname, addr
    )


def _event_of(data: bytes) -> Event | None:
    """The event in a block of a peer's stream, its text fit to be shown; None for comments and nonsense."""
    payload = b"\n".join(line[5:] for line in data.split(b"\n") if line.startswith(b"data:"))
    if not payload:
        return None
    try:
        event = _decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return Event(
        event.t,
        event.type,
        one_line(event.message),
        one_line(event.gpu_id),
        one_line(event.rid),
        event.replay,
    )
