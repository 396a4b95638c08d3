"""An importer over an engine that is a few numbers, and turns in its slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from viiwork.config.model import RoutingSection
from viiwork.core.capacity import CapacityReport, KvIdentity, ModelCapacity, PeerReport
from viiwork.core.replicas import Replica
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Chain, Grant, Outcome, Usage
from viiwork.engine.slots import Props, RestoreDone, SlotView
from viiwork.errors import EngineError, KvError
from viiwork.mesh.values import Member
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_arrivals import Arrivals
from viiwork.node.kv_held import HeldStates
from viiwork.node.kv_import import Importer
from viiwork.node.kv_pull import Fetcher
from viiwork.node.kv_restore import Restorer
from viiwork.node.kv_save import EngineGates
from viiwork.node.kv_stats import KvStats

SESSION, MODEL = "5" * 32, "m"
KEY = (SESSION, MODEL)
LINKS = tuple(f"{i:016x}" for i in range(1, 9))
IDENTITY = KvIdentity("fp", "4:x", "f16", "f16", False, 100_000)
TOKEN_BYTES = 1000


def chain(n: int) -> Chain:
    """The conversation after `n` messages; every message has 1,000 bytes."""
    return Chain(LINKS[: n + 1], tuple(1000 * i for i in range(n + 1)))


def ask(number: int, n_messages: int = 3, **more: Any) -> Ask:
    usual = {"session": SESSION, "prefer": ("a",)}  # the tests say themselves where it runs
    return Ask(f"r{number}", MODEL, chain=chain(n_messages), **(usual | more))


@dataclass
class Engine:
    """What its slots hold: last task and tokens. `asked` keeps what it was told to do."""

    n_slots: int = 1
    slots_held: list[list[int | None]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    sleeping: bool = False
    is_deaf: bool = False
    n_task: int = 0
    n_looked: int = 0
    restored: int = 0
    fault: Exception | None = None

    def __post_init__(self) -> None:
        self.slots_held = [[0, 1] for _ in range(self.n_slots)]

    def ran(self, slot: int, n_tokens: int) -> None:
        self.n_task += 1
        self.slots_held[slot] = [self.n_task, n_tokens]

    async def props(self, timeout_s: float = 1.0) -> Props:
        self.n_looked += 1
        if self.is_deaf:
            raise EngineError("/props: no answer")
        return Props(self.n_slots, "", "", self.sleeping, 1000)

    async def slots(self, timeout_s: float = 1.0) -> list[SlotView]:
        if self.is_deaf:
            raise EngineError("/slots: no answer")
        assert not self.sleeping, "asking for its slots wakes it"
        return [SlotView(i, 1000, False, task, n, None, None) for i, (task, n) in enumerate(self.slots_held)]

    async def warm_up(self, slot: int, timeout_s: float) -> None:
        self.asked.append(f"warm up {slot}")

    async def restore(self, slot: int, filename: str, timeout_s: float) -> RestoreDone:
        self.asked.append(f"restore {slot}")
        if self.fault is not None:
            raise self.fault
        self.slots_held[slot][1] = self.restored
        return RestoreDone(self.restored, self.restored * TOKEN_BYTES, 0.1)


@dataclass
class Shape:
    token_bytes: int = TOKEN_BYTES


@dataclass
class View:
    epoch: int = 1
    model: str = MODEL


@dataclass
class Layout:
    client: Engine
    save_dir: Path
    shape: Shape = field(default_factory=Shape)
    view: View = field(default_factory=View)

    def target(self, slot: int) -> int:
        return slot

    def identity(self) -> KvIdentity:
        return IDENTITY


class Layouts:
    def __init__(self, layout: Layout) -> None:
        self.layout: Layout | None = layout
        self.stopped: dict[str, str] = {}

    def get(self, backend: str) -> Layout | None:
        return self.layout

    def not_portable(self, model: str, why: str) -> None:
        self.stopped[model] = why
        self.layout = None


@dataclass
class Rendered:
    n_tokens: int

    @property
    def total_bytes(self) -> int:
        return self.n_tokens * TOKEN_BYTES


class Worker:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.held: dict[str, int] = {}  # replica -> tokens
        self.fewer = 0
        self.faults: list[str] = []
        self.dropped: list[str] = []
        self.takes_s = 0.0
        self.useful: int | None = None  # of the last one that was rendered

    async def render(self, name: str, target: int, out: Path, *, at_most: int = 0) -> Rendered:
        self.useful = at_most
        if self.faults:
            raise KvError(self.faults.pop(0))
        await asyncio.sleep(self.takes_s)
        self.engine.restored = self.held[name] - self.fewer
        return Rendered(self.engine.restored)

    async def drop(self, name: str) -> bool:
        self.dropped.append(name)
        return True


class Prompts:
    """What the requests share with replicas, in tokens."""

    def __init__(self) -> None:
        self.shared: int | None = None

    async def common_tokens(self, ask: Ask, layout: Any, replica: Replica) -> int | None:
        return self.shared


class Paths:
    def bytes_per_s(self, member: Member | None) -> float:
        return 1e9


class Peer:
    """Answers pulls as it is told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: Callable[[], Any] = lambda: None
        self.fault: Exception | None = None

    async def ask(self, member: Member, target: str, body: bytes, limit_s: float) -> bytes:
        self.asked.append(member.name)
        if self.fault is not None:
            raise self.fault
        found = self.answers()
        if found is not None:
            await found
        return b'{"generation": 1}'


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0)


class Bench:
    """Node `a` with one backend."""

    def __init__(self, folder: Path, n_slots: int = 1) -> None:
        self.engine = Engine(n_slots)
        self.d = Dispatcher("a", RoutingSection(), prepare=self._prepare, on_end=self._ended)
        self.d.slots.put_backend("m/0", model=MODEL, url="http://e", n_slots=n_slots, routable=True)
        self.worker, self.stats, self.peer = Worker(self.engine), KvStats(), Peer()
        self.prompts = Prompts()
        self.layouts = Layouts(Layout(self.engine, folder))
        self.lost: list[SlotRef] = []  # slots found to hold something else
        self.replicas = self.d.book.replicas
        self.arrivals = Arrivals(self.replicas)
        self.restorer = Restorer("a", self.d, self.worker, EngineGates(), self.stats)  # type: ignore[arg-type]
        self.held = HeldStates(self.d, self.layouts, self.lost.append)  # type: ignore[arg-type]
        self.fetcher = Fetcher(
            self.d,
            self.replicas,
            self.arrivals,
            Paths(),
            self.peer,
            self._member,  # type: ignore[arg-type]
        )
        self.importer = Importer(
            "a",
            self.d,
            self.replicas,
            self.layouts,  # type: ignore[arg-type]
            self.worker,  # type: ignore[arg-type]
            self.restorer,
            self.held,
            self.fetcher,
            self.stats,
            64,
            self.prompts,  # type: ignore[arg-type]
        )
        self._number = 0

    def _member(self, name: str) -> Member | None:
        return Member(name, "127.0.0.9", 1, 2, "alive")

    async def _prepare(self, grant: Grant) -> None:
        await self.importer.prepare(grant)

    def _ended(self, grant: Grant, outcome: Outcome, binding: Any) -> None:
        self.importer.turn_ended(grant, outcome, binding)

    def peer_holds(self, node: str, holding: Any, fp: str = "fp") -> None:
        identity = replace(IDENTITY, model_fp=fp)
        entry = ModelCapacity(MODEL, slots=1, backends=1, healthy_backends=1, kv=identity)
        now = time.monotonic()
        self.d.peers.put(node, "http://p")
        self.d.peers.reported(node, PeerReport(CapacityReport(node, models=(entry,)), now, now))
        self.d.book.reported(node, (holding,), now)

    def put(self, n_tokens: int, n_messages: int, generation: int, source: str = "b") -> Replica:
        """A replica came in of the conversation after so many messages."""
        name = f"{source}{generation}"
        tip = LINKS[n_messages]
        replica = Replica(name, KEY, n_tokens, n_tokens * TOKEN_BYTES, generation, source, tip)
        self.worker.held[name] = n_tokens
        self.replicas.put(replica)
        return replica

    def reads_at(self, seconds_a_token: float) -> None:
        """The model's prefill has been measured."""
        for _ in range(9):
            self.d.speeds.sample(MODEL, 1000 * seconds_a_token, 1000, time.monotonic())

    async def begin(self, n_messages: int = 3, **more: Any) -> Grant:
        self._number += 1
        return await self.d.acquire(ask(self._number, n_messages, **more))

    async def turn(
        self, n_messages: int, cached: int, prompt: int, *, settle: bool = True, **more: Any
    ) -> Grant:
        """A whole turn: the engine says how much it reused, and holds the rest then."""
        grant = await self.begin(n_messages, **more)
        self.engine.ran(grant.slot or 0, prompt)
        self.d.finish(grant, Outcome("done", 200, usage=Usage(cached, prompt - cached, 1)))
        if settle:
            await until(lambda: not len(self.held._background))
        return grant

    async def stop(self) -> None:
        await self.importer.stop()
        await self.held.stop()
        await self.restorer.stop()
