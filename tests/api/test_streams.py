"""Streams for those who watch: what a newcomer sees, who is cut off, and that nobody holds the node up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tests.fakes.node import Api, FakeDispatcher, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.ports import Viewer
from viiwork.api.streams import ActivityRoutes, MeshRoutes, frame
from viiwork.core.activity import ActivityLog, Event
from viiwork.limits import ACTIVITY_FOLLOWERS_MAX, VIEWER_BUFFER_FRAMES, VIEWERS_MAX

EVERY_S = 0.05


class FakeHub:
    """Shows one picture; tests tell more."""

    def __init__(self) -> None:
        self.viewers: list[Viewer] = []
        self.changed = asyncio.Event()

    async def cluster(self) -> bytes:
        return b'{"view":"a"}'

    @property
    def n_viewers(self) -> int:
        return len(self.viewers)

    def enter(self, viewer: Viewer) -> None:
        self.viewers.append(viewer)
        viewer.put(frame("cluster", {"view": "a"}))
        self.changed.set()

    def leave(self, viewer: Viewer) -> None:
        self.viewers.remove(viewer)
        self.changed.set()

    async def until(self, n_viewers: int) -> None:
        async with asyncio.timeout(10):
            while len(self.viewers) != n_viewers:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def watched(log: ActivityLog | None = None, hub: FakeHub | None = None) -> AsyncIterator[Api]:
    routes = [
        *ActivityRoutes(log or ActivityLog(100), lambda: 1000, comment_every_s=EVERY_S).routes(),
        *MeshRoutes(hub or FakeHub(), comment_every_s=EVERY_S).routes(),
    ]
    async with serving(FakeDispatcher([]), routes=routes) as api:
        yield api


async def events(client: RawClient, n: int) -> list[dict]:
    """The next events of the stream, comments left out."""
    found: list[dict] = []
    while len(found) < n:
        chunk = await client.chunk()
        assert chunk is not None, "the stream ended"
        for block in chunk.split(b"\n\n"):
            if b"data: " in block:
                found.append(json.loads(block.partition(b"data: ")[2]))
    return found


def request(t: int, rid: str, message: str = "m → m/0") -> Event:
    return Event(t, "request", message, "m/0", rid)


async def test_the_activity_is_read_at_once_and_followed():
    log = ActivityLog(100)
    log.emit(request(1, "a"))
    async with watched(log) as api, RawClient(api.port) as client:
        client.get("/v1/activity")
        shown = (await client.reply()).json
        client.get("/v1/activity/stream")
        status, headers = await client.head()
        (first,) = await events(client, 1)
        log.emit(request(2, "b"))
        (second,) = await events(client, 1)
    told = {"t": 1, "type": "request", "message": "m → m/0", "gpu_id": "m/0", "rid": "a"}
    assert shown == {"events": [told]} and first == told | {"replay": True}
    assert (status, dict(headers)["Content-Type"]) == (200, "text/event-stream")
    assert second == told | {"t": 2, "rid": "b"}
    assert not log._followers, "a client that left is no follower"


async def test_a_silent_activity_stream_says_comments():
    async with watched() as api, RawClient(api.port) as client:
        client.get("/v1/activity/stream")
        await client.head()
        assert [await client.chunk() for _ in range(3)] == [b":\n\n"] * 3


async def test_the_oldest_follower_makes_room_and_its_stream_ends_whole():
    log = ActivityLog(100)
    async with watched(log) as api, RawClient(api.port) as oldest:
        oldest.get("/v1/activity/stream")
        await oldest.head()
        others = [RawClient(api.port) for _ in range(ACTIVITY_FOLLOWERS_MAX)]
        for one in others:
            await one.__aenter__()
            one.get("/v1/activity/stream")
            await one.head()
        while (chunk := await oldest.chunk()) is not None:
            assert chunk == b":\n\n"
        log.emit(request(1, "x"))
        assert [len(await events(one, 1)) for one in others] == [1] * len(others)
        for one in others:
            await one.__aexit__()


async def test_a_follower_that_reads_nothing_holds_nobody_up():
    log = ActivityLog(100)
    async with watched(log) as api, RawClient(api.port) as deaf, RawClient(api.port) as client:
        for one in (deaf, client):
            one.get("/v1/activity/stream")
            await one.head()
        deaf.reader._transport.pause_reading()
        big = "x" * 50_000
        for t in range(500):  # 25 MB, far more than a socket takes
            log.emit(request(t, "r", big))
            if t % 10 == 0:
                await events(client, 1)
        (slow, _) = log._followers
        assert slow.n_skipped > 0


async def test_a_mesh_stream_shows_the_picture_and_what_is_told():
    hub = FakeHub()
    async with watched(hub=hub) as api, RawClient(api.port) as client:
        client.get("/v1/cluster")
        assert (await client.reply()).json == {"view": "a"}
        client.get("/v1/mesh/stream")
        await client.head()
        assert await client.chunk() == b'event: cluster\ndata: {"view":"a"}\n\n'
        hub.viewers[0].put(frame("activity", {"t": 1}))
        while (chunk := await client.chunk()) == b":\n\n":
            continue
        assert chunk == b'event: activity\ndata: {"t":1}\n\n'
        client.leave()
        await hub.until(0)


async def test_a_viewer_that_falls_behind_is_cut_off_and_the_others_go_on():
    hub = FakeHub()
    async with watched(hub=hub) as api, RawClient(api.port) as deaf, RawClient(api.port) as client:
        for n, one in enumerate((deaf, client), 1):
            one.get("/v1/mesh/stream")
            await one.head()
            await hub.until(n)
        deaf.reader._transport.pause_reading()
        slow, quick = hub.viewers
        data = frame("cluster", {"x": "y" * 100_000})
        for _ in range(3 * VIEWER_BUFFER_FRAMES):
            slow.put(data)
            await asyncio.sleep(0)
        await hub.until(1)
        assert hub.viewers == [quick]
        quick.put(frame("cluster", {"still": "here"}))
        assert {"still": "here"} in await events(client, 2)


async def test_viewers_beyond_the_limit_are_told_so():
    hub = FakeHub()
    async with watched(hub=hub) as api, RawClient(api.port) as client:
        hub.viewers.extend([object()] * VIEWERS_MAX)  # type: ignore[list-item]
        client.get("/v1/mesh/stream")
        reply = await client.reply()
        hub.viewers.clear()
    assert reply.status == 503 and reply.json["error"]["code"] == "too_many_viewers"


async def test_a_hub_that_closes_ends_its_streams_whole():
    hub = FakeHub()
    async with watched(hub=hub) as api, RawClient(api.port) as client:
        client.get("/v1/mesh/stream")
        await client.head()
        await hub.until(1)
        hub.viewers[0].close()
        while (await client.chunk()) is not None:
            continue
        await hub.until(0)


async def test_a_stream_of_a_client_of_http_1_0_ends_with_its_connection():
    log = ActivityLog(10)
    async with watched(log) as api, RawClient(api.port) as client:
        client.send(b"GET /v1/activity/stream HTTP/1.0\r\n\r\n")
        await client.head()
        await client.reader.readexactly(3)
        log.close()
        assert (await client.closed()).replace(b":\n\n", b"") == b""


async def test_a_frame_takes_what_is_encoded_and_what_is_not():
    assert frame("x", b"{}") == frame("x", {}) == b"event: x\ndata: {}\n\n"
    assert msgspec.json.decode(frame("x", {"a": "\n"}).partition(b"data: ")[2]) == {"a": "\n"}
