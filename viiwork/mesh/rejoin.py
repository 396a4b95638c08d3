"""Finding members again: every source of addresses asked in rounds, the unknown ones joined."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from viiwork.limits import (
    DISCOVERY_TIMEOUT_S,
    HURRY_INTERVAL_S,
    HURRY_MEMBERS,
    HURRY_S,
    JOINS_AT_ONCE,
    MISSING_INTERVAL_S,
    MISSING_S,
    ROUND_GAP_S,
    ROUNDS_AT_ONCE,
    SEED_CANDIDATES_MAX,
    YOUNG_INTERVAL_S,
    YOUNG_S,
)
from viiwork.mesh.membership import Membership
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import host_port, split_host_port

log = logging.getLogger(__name__)

Feeder = Callable[[], Awaitable[Sequence[str]]]  # addresses as ip:port


def seeds(addresses: Sequence[str]) -> Feeder:
    """The config's seeds, as written."""

    async def feed() -> Sequence[str]:
        return addresses

    return feed


def departed(membership: Membership) -> Feeder:
    """Where members that died were last: the other half of a network that was split."""

    async def feed() -> Sequence[str]:
        return [member.gossip for member in membership.members() if member.state == "dead"]

    return feed


class Rejoiner:
    """Runs a round at once, when kicked and every `interval_s`; soon again at first, for others start too."""

    def __init__(
        self,
        membership: Membership,
        feeders: Mapping[str, Feeder],
        *,
        interval_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._feeders = dict(feeders)
        self._interval_s = interval_s
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._rounds: set[asyncio.Task[int]] = set()
        self._kick = asyncio.Event()
        self._hurry_until = self._missing_until = self._young_until = 0.0
        self._trying: set[str] = set()
        self._gate = asyncio.Semaphore(JOINS_AT_ONCE)
        self._said: dict[str, str] = {}  # feeder -> its last error

    def start(self) -> None:
        self._young_until = self._now() + YOUNG_S
        self._task = asyncio.create_task(self._run(), name="mesh-rejoin")

    async def stop(self) -> None:
        tasks = [*self._rounds, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kick(self) -> None:
        """A round soon: a source has something new."""
        self._kick.set()

    def hurry(self) -> None:
        """Rounds in quick succession for a while, members we see included.

        After this node moved, its members hold its name for the old address until that record expires, and
        learn the new one only from an exchange after that.
        """
        self._hurry_until = self._now() + HURRY_S
        self._kick.set()

    def missing(self) -> None:
        """A member died. It, or the half of the network it stands for, may be back soon."""
        self._missing_until = self._now() + MISSING_S
        self._kick.set()

    def problems(self) -> list[str]:
        """Sources that gave no addresses in the last round, one line each."""
        return [f"no addresses from {name}: {text}" for name, text in self._said.items()]

    async def round(self) -> int:
        """One round; returns how many addresses answered."""
        found = await asyncio.gather(*(self._feed(name, feed) for name, feed in self._feeders.items()))
        candidates = self._unknown([address for addresses in found for address in addresses])
        return sum(await asyncio.gather(*(self._join(address) for address in candidates)))

    async def _run(self) -> None:
        while True:
            self._kick.clear()
            if len(self._rounds) >= ROUNDS_AT_ONCE:
                await asyncio.wait(self._rounds, return_when=asyncio.FIRST_COMPLETED)
            # Not waited for: an address that does not answer takes seconds, and news must not wait for it.
            round_ = asyncio.create_task(self.round(), name="mesh-round")
            self._rounds.add(round_)
            round_.add_done_callback(self._ended)
            await asyncio.sleep(min(ROUND_GAP_S, self._interval_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._kick.wait()

    def _pause_s(self) -> float:
        now, pause_s = self._now(), self._interval_s
        if now < self._missing_until:
            pause_s = min(pause_s, MISSING_INTERVAL_S)
        if now < self._young_until:
            pause_s = min(pause_s, YOUNG_INTERVAL_S)
        return min(pause_s, HURRY_INTERVAL_S) if now < self._hurry_until else pause_s

    def _ended(self, task: asyncio.Task[int]) -> None:
        self._rounds.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a round of discovery failed", exc_info=error)  # our own bug; the next round comes

    async def _join(self, address: str) -> int:
        self._trying.add(address)
        try:
            async with self._gate:
                return await self._membership.join([address])
        finally:
            self._trying.discard(address)

    async def _feed(self, name: str, feed: Feeder) -> Sequence[str]:
        try:
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
                addresses = await feed()
        except Exception as error:  # noqa: BLE001 - one source's fault must not end the others' rounds
            text = one_line(str(error) or type(error).__name__)
            if self._said.get(name) != text:
                log.warning("no addresses from %s: %s", name, text)
            self._said[name] = text
            return ()
        self._said.pop(name, None)
        return addresses[:SEED_CANDIDATES_MAX]

    def _unknown(self, addresses: Sequence[str]) -> list[str]:
        """Without ourselves, without who is here already or being tried, each once."""
        us, *others = self._membership.members()
        here = [m.gossip for m in others if m.is_present]
        known = {us.gossip, *here, *self._trying}
        wanted: dict[str, None] = {}
        if self._now() < self._hurry_until:
            wanted = dict.fromkeys(address for address in here[:HURRY_MEMBERS] if address not in self._trying)
        for address in addresses:
            try:
                candidate = host_port(*split_host_port(address))
            except ValueError as error:
                log.warning("not an address to join: %s", error)
                continue
            if candidate not in known:
                wanted[candidate] = None
        return list(wanted)[:SEED_CANDIDATES_MAX]
