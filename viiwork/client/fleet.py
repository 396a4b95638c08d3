"""Asks a node how much room the mesh has for a model, once in five minutes, and says what to do with it.

Neither class ever raises for a fault of the mesh: then the configured number counts, and `reason` says why.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp

from viiwork.client.policy import Failure, Host, Reason, View, after, base_url, first_view, hosts_in, question
from viiwork.limits import FLEET_BODY_MAX_BYTES, FLEET_TIMEOUT_S

log = logging.getLogger(__name__)

_FINE = frozenset(("fleet", "held", "shrinking"))


class _Asker:
    """What both classes share: the view, and how an answer changes it."""

    def __init__(self, url: str, model: str, *, configured: int, clock: Callable[[], float] = time.monotonic):
        """Room for `model`, which may be an alias, as the node at `url` sees it; at least `configured`."""
        self._url = base_url(url)
        self._model = model
        self._configured = configured
        self._clock = clock
        self._view = first_view(self._url, configured)
        self._answered = False

    @property
    def reason(self) -> Reason:
        """Why the last number was what it was."""
        return self._view.reason

    def _begin(self) -> None:
        # Before the answer: a question that fails is not repeated before its time either.
        self._view = replace(self._view, asked_at=self._clock())

    def _end(self, heard: tuple[Host, ...] | Failure) -> None:
        before = self._view
        self._view = view = after(before, heard, configured=self._configured, url=self._url)
        self._answered = True
        if (view.slots, view.reason) != (before.slots, before.reason):
            level = logging.INFO if view.reason in _FINE else logging.WARNING
            log.log(level, "fleet.capacity model=%s slots=%d reason=%s", self._model, view.slots, view.reason)


class FleetCapacity(_Asker):
    """For threads; any number of them may share one object.

    One call in five minutes takes as long as the node takes to answer, five seconds at most; the others
    return at once what is known, except before the first answer, for which all wait.
    """

    def __init__(self, url: str, model: str, *, configured: int, clock: Callable[[], float] = time.monotonic):
        super().__init__(url, model, configured=configured, clock=clock)
        self._asking = threading.Lock()

    def slots(self) -> int:
        """How many requests may be under way in the mesh."""
        return self._fresh().slots

    def per_url(self) -> dict[str, int]:
        """The same by node, for programs that spread their requests: URL of its API -> its slots."""
        return dict(self._fresh().urls)

    def _fresh(self) -> View:
        wait = not self._answered
        if (wait or self._view.is_due(self._clock())) and self._asking.acquire(blocking=wait):
            try:
                if self._view.is_due(self._clock()):  # and no other thread has asked meanwhile
                    self._begin()
                    self._end(_ask(self._url, self._model))
            finally:
                self._asking.release()
        return self._view


class AsyncFleetCapacity(_Asker):
    """For tasks of one event loop; any number of them may share one object.

    They wait as the threads of `FleetCapacity` do.
    """

    def __init__(self, url: str, model: str, *, configured: int, clock: Callable[[], float] = time.monotonic):
        super().__init__(url, model, configured=configured, clock=clock)
        self._asking: asyncio.Task[None] | None = None

    async def slots(self) -> int:
        """How many requests may be under way in the mesh."""
        return (await self._fresh()).slots

    async def per_url(self) -> dict[str, int]:
        """The same by node, for programs that spread their requests: URL of its API -> its slots."""
        return dict((await self._fresh()).urls)

    async def _fresh(self) -> View:
        if self._asking is None and self._view.is_due(self._clock()):
            self._asking = asyncio.create_task(self._ask())
            await asyncio.shield(self._asking)  # a caller that is cancelled leaves the question to the others
        elif self._asking is not None and not self._answered:
            await asyncio.shield(self._asking)
        return self._view

    async def _ask(self) -> None:
        try:
            self._begin()
            self._end(await _ask_async(self._url, self._model))
        finally:
            self._asking = None


def _ask(url: str, model: str) -> tuple[Host, ...] | Failure:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(str(parts.hostname), parts.port, timeout=FLEET_TIMEOUT_S)
    try:
        connection.connect()
        # The socket's own time limit is one for each read; this is one for all of them.
        late = threading.Timer(FLEET_TIMEOUT_S, _cut, (connection.sock,))
        late.daemon = True
        late.start()
        try:
            connection.request("GET", parts.path + question(model), headers={"Connection": "close"})
            answer = connection.getresponse()
            body = answer.read(FLEET_BODY_MAX_BYTES + 1)
            if answer.length:  # what it promised did not come, unless it is too much anyway
                return "bad_answer" if len(body) > FLEET_BODY_MAX_BYTES else "unreachable"
        finally:
            late.cancel()
    except (OSError, http.client.HTTPException):
        return "unreachable"
    finally:
        connection.close()
    return hosts_in(answer.status, body, model)


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


async def _ask_async(url: str, model: str) -> tuple[Host, ...] | Failure:
    timeout = aiohttp.ClientTimeout(total=FLEET_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            async with session.get(url + question(model), allow_redirects=False) as answer:
                body = bytearray()
                while len(body) <= FLEET_BODY_MAX_BYTES and (piece := await answer.content.readany()):
                    body += piece
    except (aiohttp.ClientError, OSError, TimeoutError):
        return "unreachable"
    return hosts_in(answer.status, bytes(body), model)
