"""What happens on a node, as events: a ring of the newest, and buffers of those who follow them.

No clock and no loop: times come in, and a follower is told by its callback that its buffer has something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from msgspec import Struct

from viiwork.limits import ACTIVITY_BUFFER_EVENTS, ACTIVITY_FOLLOWERS_MAX, ACTIVITY_REPLAY_MS

Kind = Literal["backend", "request", "system", "alias"]
ARROW = "\N{RIGHTWARDS ARROW}"


class Event(Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of the activity log; `message` of a request is `<model> → <dest>`, then how it ended."""

    t: int  # unix milliseconds
    type: Kind
    message: str
    gpu_id: str = ""  # backend id
    rid: str = ""
    replay: bool = False


class _Entry(NamedTuple):
    event: Event
    is_end: bool  # of its request


class MeshEvent(Struct, frozen=True, omit_defaults=True, gc=False):
    """An event and the node it happened on, as the mesh stream shows it."""

    t: int
    type: Kind
    message: str
    gpu_id: str = ""
    rid: str = ""
    replay: bool = False
    node_id: str = ""  # "" while it is not known
    hostname: str = ""
    addr: str = ""  # `ip:port` of the node's API


class Follower:
    """One subscriber; the log fills `pending`, its owner empties it."""

    def __init__(self, on_event: Callable[[], None]) -> None:
        self.pending: deque[Event] = deque()
        self.n_skipped = 0  # events that found the buffer full
        self.evicted = False  # no more will come
        self.on_event = on_event

    def take(self) -> list[Event]:
        events = list(self.pending)
        self.pending.clear()
        return events


class ActivityLog:
    """Owner of the ring and of its followers."""

    def __init__(self, n_events: int) -> None:
        self._ring: deque[_Entry] = deque(maxlen=n_events)
        self._followers: dict[Follower, None] = {}  # oldest first
        self._taps: list[Callable[[Event], None]] = []

    def emit(self, event: Event, *, is_end: bool = False) -> None:
        """Note an event; a follower whose buffer is full skips it."""
        self._ring.append(_Entry(event, is_end))
        for follower in self._followers:
            if len(follower.pending) < ACTIVITY_BUFFER_EVENTS:
                follower.pending.append(event)
                follower.on_event()
            else:
                follower.n_skipped += 1
        for tap in self._taps:
            tap(event)

    def events(self) -> list[Event]:
        """The ring, oldest first."""
        return [entry.event for entry in self._ring]

    def follow(self, on_event: Callable[[], None]) -> Follower:
        """A new follower; beyond the limit the oldest one is evicted."""
        if len(self._followers) >= ACTIVITY_FOLLOWERS_MAX:
            self._evict(next(iter(self._followers)))
        follower = Follower(on_event)
        self._followers[follower] = None
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.pop(follower, None)

    def close(self) -> None:
        """Send all followers away."""
        for follower in list(self._followers):
            self._evict(follower)

    def tap(self, hear: Callable[[Event], None]) -> None:
        """A part of this node that hears every event, unbuffered and beside the followers."""
        self._taps.append(hear)

    def untap(self, hear: Callable[[Event], None]) -> None:
        self._taps.remove(hear)

    def _evict(self, follower: Follower) -> None:
        self.leave(follower)
        follower.evicted = True
        follower.on_event()

    def replay(self, now_ms: int) -> Iterator[Event]:
        """What a newcomer needs to see: the last while, and all of the requests that have not ended."""
        ended = {entry.event.rid for entry in self._ring if entry.is_end}
        since_ms = now_ms - ACTIVITY_REPLAY_MS
        for event, _ in self._ring:
            if event.t >= since_ms or (event.rid and event.rid not in ended):
                yield Event(event.t, event.type, event.message, event.gpu_id, event.rid, True)


def request_text(model: str, dest: str) -> str:
    """Message of a request that was given a place; `dest` is a backend id or `peer <node>`."""
    return f"{model} {ARROW} {dest}"


def end_text(started: str, *, aborted: str | None, took_s: float) -> str:
    """Message of the same request's end; `aborted` says by whom, "" = by a fault, None = it is done."""
    how = "done" if aborted is None else f"aborted by {aborted}" if aborted else "aborted"
    return f"{started} {how} ({_duration(took_s)})"


def is_end_text(message: str) -> bool:
    """Whether a request's message, of any node's version, says that it ended."""
    return any(word in message.rpartition(ARROW)[2] for word in (" done", " aborted", " finished"))


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"
