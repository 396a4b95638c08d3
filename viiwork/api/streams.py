"""Event streams to people who watch: one writer for each, comments in a silence, no buffer that grows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec
from aiohttp import web

from viiwork.api.ports import Hub
from viiwork.api.routes import AnyRoute, Route
from viiwork.api.server import ClientConnection, json_answer
from viiwork.core.activity import ActivityLog, Event
from viiwork.errors import TooManyViewers
from viiwork.limits import COMMENT_EVERY_S, VIEWER_BUFFER_FRAMES, VIEWERS_MAX

_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
    "Server": "viiwork",
}
_STREAM = ("GET",)


class ActivityRoutes:
    """`/v1/activity` and its stream."""

    def __init__(
        self, log: ActivityLog, now_ms: Callable[[], int], *, comment_every_s: float = COMMENT_EVERY_S
    ) -> None:
        self._log = log
        self._now_ms = now_ms
        self._comment_every_s = comment_every_s

    def routes(self) -> list[AnyRoute]:
        return [
            Route("/v1/activity", ("GET", "HEAD"), self.events),
            Route("/v1/activity/stream", _STREAM, self.stream),
        ]

    async def events(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        return json_answer(200, {"events": self._log.events()})

    async def stream(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """The last while and what has not ended, then each event as it comes; a slow client misses some."""
        wake = asyncio.Event()
        follower = self._log.follow(wake.set)
        data = b"".join(map(_event_frame, self._log.replay(self._now_ms())))
        try:
            answer = await _open_stream(request)
            while True:
                await answer.write(data or b":\n\n")
                if follower.evicted:
                    return answer
                if not follower.pending:
                    await _until(wake, self._comment_every_s)
                wake.clear()
                data = b"".join(map(_event_frame, follower.take()))
        finally:
            self._log.leave(follower)


class MeshRoutes:
    """`/v1/cluster` and `/v1/mesh/stream`."""

    def __init__(self, hub: Hub, *, comment_every_s: float = COMMENT_EVERY_S) -> None:
        self._hub = hub
        self._comment_every_s = comment_every_s

    def routes(self) -> list[AnyRoute]:
        return [
            Route("/v1/cluster", ("GET", "HEAD"), self.cluster),
            Route("/v1/mesh/stream", _STREAM, self.stream),
        ]

    async def cluster(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        return json_answer(200, await self._hub.cluster())

    async def stream(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        if self._hub.n_viewers >= VIEWERS_MAX:
            raise TooManyViewers(f"{VIEWERS_MAX} viewers watch the mesh through this node already")
        transport = request.transport
        viewer = Viewer(lambda: transport.abort() if transport is not None else None)
        self._hub.enter(viewer)
        try:
            answer = await _open_stream(request)
            while True:
                await answer.write(viewer.take() or b":\n\n")
                if viewer.closed:
                    return answer
                await viewer.until_frames(self._comment_every_s)
        finally:
            self._hub.leave(viewer)


class Viewer:
    """One client of the mesh stream, as the hub sees it; what it does not read in time cuts it off."""

    def __init__(self, cut_off: Callable[[], None]) -> None:
        self.closed = False
        self._cut_off = cut_off
        self._frames: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def put(self, frame: bytes) -> None:
        if self.closed:
            return
        if len(self._frames) >= VIEWER_BUFFER_FRAMES:
            self.closed = True  # it will come again and start with a fresh picture
            self._cut_off()
        else:
            self._frames.append(frame)
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    def take(self) -> bytes:
        data = b"".join(self._frames)
        self._frames.clear()
        self._wake.clear()
        return data

    async def until_frames(self, timeout_s: float) -> None:
        await _until(self._wake, timeout_s)


def frame(event: str, value: object) -> bytes:
    """A named event; `value` may be encoded already."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def _event_frame(event: Event) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


async def _open_stream(request: web.BaseRequest) -> web.StreamResponse:
    cast(ClientConnection, request.protocol).needed = True  # a viewer that half-closes has left
    answer = web.StreamResponse(headers=_HEADERS)
    await answer.prepare(request)
    return answer


async def _until(wake: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await wake.wait()
    except TimeoutError:
        return
