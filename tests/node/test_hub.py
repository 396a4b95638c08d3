"""The picture of the mesh and its stream, over peers that answer what the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from viiwork.core.activity import ActivityLog, Event
from viiwork.limits import HUB_FRAME_MAX_BYTES, STATUS_BODY_MAX_BYTES, STATUS_KEPT_S
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member
from viiwork.node import hub as hub_module
from viiwork.node.cluster import Cluster
from viiwork.node.hub import MeshHub

PATIENCE_S = 20.0


@dataclass
class Peer:
    """A node that shows a status and tells its activity."""

    name: str
    status: bytes = b""
    n_status: int = 0
    n_streams: int = 0
    told: list[bytes] = field(default_factory=list)  # sent at the start of each stream
    port: int = 0
    _streams: set[web.StreamResponse] = field(default_factory=set)
    _runner: web.AppRunner | None = None

    @property
    def member(self) -> Member:
        return Member(self.name, "127.0.0.1", 7946, self.port, "alive", "v")

    async def start(self) -> None:
        self.status = self.status or json.dumps({"node": self.name, "node_id": f"id-{self.name}"}).encode()
        app = web.Application()
        app.router.add_get("/v1/status", self._show)
        app.router.add_get("/v1/activity/stream", self._tell)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.001)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def tell(self, data: bytes) -> None:
        for stream in list(self._streams):
            await stream.write(data)

    async def _show(self, request: web.Request) -> web.Response:
        self.n_status += 1
        return web.Response(body=self.status)

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        self.n_streams += 1
        answer = web.StreamResponse()
        await answer.prepare(request)
        for data in self.told:
            await answer.write(data)
        self._streams.add(answer)
        try:
            await asyncio.Event().wait()
        finally:
            self._streams.discard(answer)
        return answer


class Watcher:
    """A viewer that keeps what it was shown."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.closed = False
        self._more = asyncio.Event()

    def put(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._more.set()

    def close(self) -> None:
        self.closed = True

    def shown(self, event: str) -> list[Any]:
        blocks = b"".join(self.frames).split(b"\n\n")[:-1]
        named = (block.split(b"\ndata: ", 1) for block in blocks)
        return [json.loads(data) for name, data in named if name == b"event: " + event.encode()]

    async def until(self, true: Callable[[Watcher], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true(self):
                self._more.clear()
                await self._more.wait()


class Node:
    """The watching node."""

    def __init__(self, client: PeerClient, peers: list[Peer]) -> None:
        self.peers = peers
        self.gone: list[Member] = []
        self.now = 1000.0
        self.room = b""
        self.uptime_s = 0
        self.activity = ActivityLog(100)
        self.table: dict[str, Any] = {}
        self.cluster = Cluster(
            "a",
            client,
            members=self.members,
            own_status=self.status,
            own_api=lambda: "10.0.0.1:8086",
            models=lambda: [{"id": "m"}],
            secured=False,
            poll_s=0.02,
            now=lambda: self.now,
        )
        self.hub = MeshHub(
            "a",
            "id-a",
            self.activity,
            self.cluster,
            client,
            members=self.members,
            own_api=lambda: "10.0.0.1:8086",
            own_status=self.status,
            own_room=lambda: self.room,
            aliases=lambda: self.table,
            look_s=0.02,
            wall_ms=lambda: 1_000_000,
            now=lambda: self.now,
        )

    def members(self) -> list[Member]:
        return [peer.member for peer in self.peers] + self.gone

    def status(self) -> dict[str, Any]:
        self.uptime_s += 1
        return {"node": "a", "node_id": "id-a", "uptime_s": self.uptime_s}


@asynccontextmanager
async def watching(*peers: Peer) -> AsyncIterator[Node]:
    client = PeerClient("a")
    await client.start()
    for peer in peers:
        await peer.start()
    node = Node(client, list(peers))
    try:
        yield node
    finally:
        await node.hub.stop()
        await node.cluster.stop()
        for peer in peers:
            await peer.stop()
        await client.stop()


def line(rid: str, message: str = "m → m/0", t: int = 999_999, **more: Any) -> bytes:
    event = {"t": t, "type": "request", "message": message, "rid": rid} | more
    return b"data: %b\n\n" % json.dumps(event).encode()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.005)


# -- cluster -----------------------------------------------------------------------------------------
async def test_the_first_question_shows_every_member_with_its_status():
    async with watching(Peer("c"), Peer("b")) as node:
        node.gone = [Member("old", "10.0.0.9", 7946, 8086, "left", "v")]
        body = json.loads(await node.cluster.current())
    assert {key: body[key] for key in ("view", "mesh", "models")} == {
        "view": "a",
        "mesh": "open",
        "models": ["m"],
    }
    assert [(m["node"], m["state"], m["role"]) for m in body["members"]] == [
        ("a", "alive", "node"),
        ("b", "alive", "node"),
        ("c", "alive", "node"),
        ("old", "left", "node"),
    ]
    assert [m["status"] and m["status"]["node_id"] for m in body["members"]] == ["id-a", "id-b", "id-c", None]
    assert body["members"][0]["addr"] == "10.0.0.1:8086"
    assert body["members"][1]["addr"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    "status",
    [
        b'{"node":"another"}',
        b"[1]",
        b'{"node":"b"',
        b'{"node":"b","x":"\xff"}',
        b'{"node":"b","x":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"node":"b","x":"' + b"y" * STATUS_BODY_MAX_BYTES + b'"}',
    ],
    ids=["another's", "a list", "cut", "not utf-8", "deep", "huge"],
)
async def test_a_status_that_cannot_be_believed_is_not_shown(status):
    async with watching(Peer("b", status=status), Peer("c")) as node:
        body = json.loads(await node.cluster.current())
    shown = {member["node"]: member["status"] for member in body["members"]}
    assert shown["b"] is None and shown["c"] is not None


async def test_a_status_that_is_no_longer_renewed_is_dropped_and_not_frozen():
    peer = Peer("b")
    async with watching(peer) as node:
        await node.cluster.current()
        await peer.stop()
        node.now += STATUS_KEPT_S - 1
        assert json.loads(node.cluster.picture({}))["members"][1]["status"] is not None
        node.now += 1
        assert json.loads(node.cluster.picture({}))["members"][1]["status"] is None


async def test_members_are_asked_only_while_somebody_looks():
    peer = Peer("b")
    async with watching(peer) as node:
        assert peer.n_status == 0
        await node.cluster.current()
        await until(lambda: peer.n_status >= 3)
        node.now += 61
        await until(lambda: node.cluster._task is None)
        asked = peer.n_status
        await node.cluster.current()
        assert peer.n_status > asked, "and asked again by the next question"


# -- stream ------------------------------------------------------------------------------------------
async def test_a_viewer_sees_what_happens_on_every_node_and_where():
    peer = Peer("b", told=[b":\n\n", line("old")])
    async with watching(peer) as node:
        node.activity.emit(Event(999_000, "request", "m → peer b", rid="own"))
        viewer = Watcher()
        node.hub.enter(viewer)
        await viewer.until(lambda v: len(v.shown("activity")) >= 2 and len(v.shown("cluster")) >= 1)
        await until(lambda: node.cluster.node_id("b") != "")
        await peer.tell(line("new"))
        node.activity.emit(Event(1_000_001, "system", "x"))
        await viewer.until(lambda v: len(v.shown("activity")) == 4)
        seen = {(e["hostname"], e.get("rid", "")): e for e in viewer.shown("activity")}
        node.hub.leave(viewer)
    assert seen["a", "own"] == {
        "t": 999_000,
        "type": "request",
        "message": "m → peer b",
        "rid": "own",
        "replay": True,
        "node_id": "id-a",
        "hostname": "a",
        "addr": "10.0.0.1:8086",
    }
    assert ("b", "old") in seen and seen["a", ""]["message"] == "x" and "replay" not in seen["a", ""]
    new = seen["b", "new"]
    assert (new["node_id"], new["addr"]) == ("id-b", f"127.0.0.1:{peer.port}")


async def test_one_connection_a_member_serves_all_viewers_and_ends_with_the_last():
    peer = Peer("b", told=[line("r")])
    async with watching(peer) as node:
        viewers = [Watcher(), Watcher()]
        for viewer in viewers:
            node.hub.enter(viewer)
            await viewer.until(lambda v: v.shown("activity"))
        late = viewers[1].shown("activity")
        assert late[0]["rid"] == "r" and late[0]["replay"], "from what the hub has seen"
        assert peer.n_streams == 1 and len(peer._streams) == 1
        node.hub.leave(viewers[0])
        await peer.tell(line("still"))
        await viewers[1].until(lambda v: v.shown("activity")[-1]["rid"] == "still")
        node.hub.leave(viewers[1])
        await until(lambda: not peer._streams)
        assert not node.activity._taps and node.hub.n_viewers == 0
        again = Watcher()
        node.hub.enter(again)
        await again.until(lambda v: v.shown("activity") and v.shown("cluster"))


async def test_a_picture_is_sent_only_when_it_changed():
    async with watching() as node:
        viewer = Watcher()
        node.hub.enter(viewer)
        await viewer.until(lambda v: v.shown("cluster"))
        await asyncio.sleep(0.2)  # ten looks
        assert len(viewer.shown("cluster")) == 1 and len(viewer.shown("aliases")) == 1
        node.room = b"busy"
        node.table = {"x": 1}
        await viewer.until(lambda v: len(v.shown("cluster")) == 2 and len(v.shown("aliases")) == 2)
        assert viewer.shown("aliases") == [{}, {"x": 1}]


async def test_a_member_that_restarts_is_followed_again_and_repeats_nothing(monkeypatch):
    monkeypatch.setattr(hub_module, "HUB_RETRY_MIN_S", 0.02)
    peer = Peer("b", told=[line("r", replay=True)])
    async with watching(peer) as node:
        viewer = Watcher()
        node.hub.enter(viewer)
        await viewer.until(lambda v: v.shown("activity"))
        await peer.stop()
        peer.told.append(line("s", replay=True))
        await peer.start()
        await viewer.until(lambda v: len(v.shown("activity")) == 2)
        assert [e["rid"] for e in viewer.shown("activity")] == ["r", "s"]


async def test_a_member_that_left_is_followed_no_more():
    peer = Peer("b")
    async with watching(peer) as node:
        viewer = Watcher()
        node.hub.enter(viewer)
        await until(lambda: bool(peer._streams))
        node.peers = []
        await until(lambda: not peer._streams)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"data: {\n\n",
        b"data: [1,2]\n\n",
        b'data: {"t":1,"type":"unheard","message":""}\n\n',
        b'data: {"t":"x","type":"system","message":"y"}\n\n',
        b"data: " + b"[" * 5000 + b"\n\n",
        b"\xff\xfe\n\n",
    ],
)
async def test_nonsense_in_a_members_stream_is_passed_over(nonsense):
    async with watching(Peer("b", told=[nonsense, line("good", "a\x1b[2Jb" + "c" * 1000)])) as node:
        viewer = Watcher()
        node.hub.enter(viewer)
        await viewer.until(lambda v: v.shown("activity"))
        (event,) = viewer.shown("activity")
    assert event["rid"] == "good" and event["message"].isprintable() and len(event["message"]) <= 300


async def test_a_member_that_floods_without_an_end_is_dropped_and_others_are_not(monkeypatch):
    monkeypatch.setattr(hub_module, "HUB_RETRY_MIN_S", 0.02)
    flood, good = Peer("b", told=[b"x" * (2 * HUB_FRAME_MAX_BYTES)]), Peer("c")
    async with watching(flood, good) as node:
        viewer = Watcher()
        node.hub.enter(viewer)
        await until(lambda: flood.n_streams >= 2 and bool(good._streams))
        await good.tell(line("fine"))
        await viewer.until(lambda v: v.shown("activity"))
        assert viewer.shown("activity")[0]["hostname"] == "c" and good.n_streams == 1


async def test_a_hub_that_closes_lets_all_streams_end():
    async with watching() as node:
        viewer = Watcher()
        node.hub.enter(viewer)
        node.hub.close()
        assert viewer.closed
