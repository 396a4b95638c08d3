"""States on their way to this node, and the turns that wait for one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from viiwork.core.replicas import ReplicaTable
from viiwork.core.sessions import SessionKey


@dataclass(frozen=True, slots=True)
class Incoming:
    """A transfer that runs now."""

    generation: int
    n_tokens: int
    source: str
    tip: str
    began_s: float  # monotonic


class Arrivals:
    """As many entries as the receiver takes transfers at once, and as many waiters as there are slots."""

    def __init__(self, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._running: dict[SessionKey, list[Incoming]] = {}
        self._waiting: dict[SessionKey, list[asyncio.Future[None]]] = {}

    @contextmanager
    def arriving(
        self, key: SessionKey, generation: int, n_tokens: int, source: str, tip: str
    ) -> Iterator[None]:
        """A transfer runs as long as this; a replica that came of it is in the table before the end."""
        incoming = Incoming(generation, n_tokens, source, tip, time.monotonic())
        self._running.setdefault(key, []).append(incoming)
        try:
            yield
        finally:
            left = self._running[key]
            left.remove(incoming)
            if not left:
                del self._running[key]
            for future in self._waiting.get(key, ()):
                if not future.done():
                    future.set_result(None)

    def newest(self, key: SessionKey) -> Incoming | None:
        """The newest state of the session that is on its way."""
        return max(self._running.get(key, ()), key=lambda incoming: incoming.generation, default=None)

    async def until(self, key: SessionKey, newer_than: int, *, announced: bool) -> bool:
        """Wait until a replica newer than that generation is here; False when none is on its way any more.

        `announced`: one must come though its transfer may not have begun here yet.
        """
        while (replica := self._replicas.get(key)) is None or replica.generation <= newer_than:
            if not announced and key not in self._running:
                return False
            await self._next_end(key)
        return True

    async def _next_end(self, key: SessionKey) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, [])
        waiting.append(future)
        try:
            await future
        finally:
            waiting.remove(future)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]
