"""Finding members again: every source of addresses asked in rounds, the unknown ones joined."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from viiwork.limits import DISCOVERY_TIMEOUT_S, JOINS_AT_ONCE, SEED_CANDIDATES_MAX
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


class Rejoiner:
    """Runs a round at once and then every `interval_s`; a node that met nobody keeps trying for ever."""

    def __init__(self, membership: Membership, feeders: Mapping[str, Feeder], *, interval_s: float) -> None:
        self._membership = membership
        self._feeders = dict(feeders)
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._said: dict[str, str] = {}  # feeder -> its last error

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="mesh-rejoin")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def round(self) -> int:
        """One round; returns how many addresses answered."""
        found = await asyncio.gather(*(self._feed(name, feed) for name, feed in self._feeders.items()))
        candidates = self._unknown([address for addresses in found for address in addresses])
        gate = asyncio.Semaphore(JOINS_AT_ONCE)

        async def join(address: str) -> int:
            async with gate:
                return await self._membership.join([address])

        return sum(await asyncio.gather(*(join(a) for a in candidates)))

    async def _run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(self._interval_s)

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
        """Without ourselves, without who is here already, each once."""
        us, *others = self._membership.members()
        known = {us.gossip, *(m.gossip for m in others if m.is_present)}
        wanted: dict[str, None] = {}
        for address in addresses:
            try:
                candidate = host_port(*split_host_port(address))
            except ValueError as error:
                log.warning("not an address to join: %s", error)
                continue
            if candidate not in known:
                wanted[candidate] = None
        return list(wanted)[:SEED_CANDIDATES_MAX]
