"""The sending side of kv_share in front of an engine and peers that do what a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from viiwork.config.model import KvShareSection, RoutingSection
from viiwork.core.affinity import rendezvous
from viiwork.core.capacity import CapacityReport, KvIdentity, ModelCapacity, PeerReport
from viiwork.core.manners import Manners
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slot_states import SlotStates
from viiwork.core.turn import Ask, Grant, Outcome, Usage
from viiwork.engine.slots import SaveDone, SlotView
from viiwork.errors import KvError
from viiwork.kv.jobs import Stages
from viiwork.mesh.values import Member
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_push import Pusher
from viiwork.node.kv_save import EngineGates, Saved, Saver
from viiwork.node.kv_stash import Stash
from viiwork.node.kv_stats import KvStats
from viiwork.node.kv_targets import KvPeers, Targets

IDENTITY = KvIdentity("f" * 64, "4:x", "f16", "f16", False, 4096)
ORDER = rendezvous("s", ["b", "c"])  # of the peers, for the session most tests talk of
KEY = ("s", "m")


class Engine:
    """Saves what it is asked to when `may_save` says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[int] = []
        self.busy: set[int] = set()
        self.may_save = asyncio.Event()
        self.may_save.set()
        self.asked = asyncio.Event()

    async def slots(self, timeout_s: float = 1.0) -> list[SlotView]:
        return [SlotView(i, 4096, i in self.busy, None, 1, None, None) for i in range(2)]

    async def save(self, slot: int, filename: str, timeout_s: float) -> SaveDone:
        self.saved.append(slot)
        self.asked.set()
        await self.may_save.wait()
        (self.folder / filename).write_bytes(b"state")
        return SaveDone(1000, 5, 1.0)


@dataclass
class Sending:
    """One transfer, which ends when the test says so."""

    saved: Saved
    node: str
    why: str
    has_file: bool
    end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Sends:
    """In place of `Sender`."""

    def __init__(self) -> None:
        self.all: list[Sending] = []
        self.at_once = True
        self.fails: dict[str, str] = {}  # node -> reason
        self.failed: list[str] = []
        self.slow: set[str] = set()

    async def send(self, saved: Saved, member: Member, why: str, stages_s: dict[str, float]) -> Any:
        sending = Sending(saved, member.name, why, saved.path.exists())
        self.all.append(sending)
        if member.name in self.fails:
            raise KvError(self.fails[member.name])
        if not self.at_once:
            await sending.end
        return SimpleNamespace(generation=saved.binding.generation, node=member.name)

    def is_slow(self, member: Member, n_bytes: int) -> bool:
        return member.name in self.slow and n_bytes > 0

    def not_sent(self, key: SessionKey, error: BaseException, peer: str = "") -> None:
        self.failed.append(error.reason if isinstance(error, KvError) else type(error).__name__)

    @property
    def to(self) -> list[tuple[str, int]]:
        return [(sending.node, sending.saved.binding.generation) for sending in self.all]


class Kept:
    """In place of the worker: keeps what it is given."""

    def __init__(self) -> None:
        self.files: list[Any] = []

    async def keep(self, file: Any) -> Any:
        self.files.append(file)
        return SimpleNamespace(
            replica=f"kept-{len(self.files)}",
            n_tokens=1000,
            kept=0,
            total_bytes=5,
            raw_bytes=5,
            dropped=(),
            known=(),
            stages=Stages(),
        )

    async def drop(self, name: str) -> bool:
        return True


async def nothing(grant: Grant) -> None:
    pass


class Bench:
    """One engine of two slots, and peers `b` and `c` that could take its states."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self._n_asked = 0
        self.engine, self.sends, self.stats = Engine(folder), Sends(), KvStats()
        self.dispatcher = d = Dispatcher("a", RoutingSection(), prepare=nothing, on_end=self._ended)
        d.slots.put_backend("m/0", model="m", url="http://e", n_slots=2, routable=True)
        self.members = {name: Member(name, "127.0.0.9", 1, 2, "alive") for name in "bc"}
        self.layout: Any = SimpleNamespace(
            client=self.engine,
            save_dir=folder,
            shape=SimpleNamespace(token_bytes=1, recurrent=None),
            model_fp=b"f" * 32,
        )
        layouts: Any = SimpleNamespace(
            get=lambda backend: self.layout, identity=lambda model: IDENTITY if self.layout else None
        )
        settings = KvShareSection(**{"min_tokens": 100, **config})
        self.client: Any = SimpleNamespace(key=b"k")
        peers = KvPeers("a", self.client, lambda name: self.members.get(name))
        self.manners, self.states, self.worker = Manners(settings.stall_share), SlotStates(), Kept()
        self.targets = Targets(settings, peers, d, layouts)
        self.gates = EngineGates()
        saver = Saver("a", d, self.gates, self.manners, self.states, self.stats)
        sender: Any = self.sends
        self.pusher = Pusher(
            settings, d, layouts, saver, sender, self.targets, self.manners, self.states, self.stats
        )
        worker: Any = self.worker
        self.stash = Stash(
            "a", settings, d, layouts, worker, saver, self.targets, self.manners, self.states, self.stats
        )
        for name in self.members:
            d.peers.put(name, "http://p")
            self.reports(name)

    def reports(self, name: str, **changes: Any) -> None:
        """The peer's capacity report comes."""
        entry = {"slots": 2, "backends": 1, "healthy_backends": 1, "kv": IDENTITY} | changes
        report = CapacityReport(name, models=(ModelCapacity("m", **entry),))
        now = time.monotonic()
        self.dispatcher.peers.reported(name, PeerReport(report, now, now + 3600))

    def _ended(self, grant: Grant, outcome: Outcome, binding: Binding | None) -> None:
        if binding is not None and grant.ask.session is not None:
            cached = outcome.usage.cached if outcome.usage is not None else None
            self.states.ran((grant.ask.session, "m"), binding, cached, shared=True)
            self.pusher.turn_ended((grant.ask.session, "m"), binding)

    async def begin(self, session: str = "s") -> Grant:
        self._n_asked += 1
        return await self.dispatcher.acquire(Ask(str(self._n_asked), "m", session=session, pin="a"))

    def end(self, grant: Grant, cached: int = 0, prefilled: int = 1000) -> None:
        self.dispatcher.finish(grant, Outcome("done", 200, usage=Usage(cached, prefilled, 1)))

    async def turn(self, session: str = "s", cached: int = 0, prefilled: int = 1000) -> int:
        """A whole turn; its generation."""
        self.end(await self.begin(session), cached, prefilled)
        binding = self.dispatcher.sessions.get((session, "m"))
        assert binding is not None
        return binding.generation

    async def quiet(self) -> None:
        await until(lambda: not self.pusher.pushing)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)
