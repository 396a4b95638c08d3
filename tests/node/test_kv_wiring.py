"""What kv_share's control side does when engines, slots or the worker are not ready for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from viiwork.config.model import RoutingSection
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.engine.slots import Props, SaveDone, SlotView
from viiwork.engine.views import BackendView
from viiwork.errors import KvError
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayouts
from viiwork.node.kv_verdicts import Verdict
from viiwork.wire.state import CacheShape, Plane, StateShape

KEY = ("s", "m")
PLANES = (Plane(1, 128),)
DENSE = StateShape(
    state_version=4,
    ext=False,
    caches=(CacheShape(name="base", n_rot_k=0, n_rot_v=0, k=PLANES, v=PLANES),),
)


def view(folder: Path, **changes: Any) -> BackendView:
    made = BackendView(
        id="m/0",
        model="m",
        status="healthy",
        phase="",
        pid=1,
        url="http://e1",
        epoch=1,
        n_slots=2,
        ctx=512,
        busy=0,
        tok_decoded=None,
        tok_remain=None,
        gpus=(),
        rss_bytes=None,
        respawns=0,
        uptime_s=1.0,
        last_lines=(),
        reason="",
        save_dir=folder,
        embedded=True,
    )
    return replace(made, **changes)


class Client:
    """An engine's slots: `held[i]` tokens in slot i."""

    def __init__(self, held: tuple[int, ...] = (1, 1)) -> None:
        self.held = held
        self.saved: list[int] = []
        self.never: asyncio.Event | None = None

    async def props(self) -> Props:
        return Props(len(self.held), "b1", "/m.gguf", False, 512)

    async def slots(self, timeout_s: float = 1.0) -> list[SlotView]:
        return [SlotView(i, 512, False, None, n, None, None) for i, n in enumerate(self.held)]

    async def save(self, slot: int, filename: str, timeout_s: float) -> SaveDone:
        self.saved.append(slot)
        if self.never is not None:
            await self.never.wait()
        return SaveDone(1, 10, 0.1)


class Info:
    shape = DENSE
    n_stream = 2
    v_trans = False


class Worker:
    def __init__(self, *faults: str) -> None:
        self.faults = list(faults)
        self.dropped: list[str] = []

    def _fault(self) -> None:
        if self.faults:
            raise KvError(self.faults.pop(0))

    async def inspect(self, path: Path) -> Info:
        self._fault()
        return Info()

    async def render(self, *args: Any, **options: Any) -> None:
        self._fault()

    async def drop(self, name: str) -> bool:
        self.dropped.append(name)
        return True


async def nothing(grant: Grant) -> None:
    pass


def dispatcher(n_slots: int = 2) -> Dispatcher:
    d = Dispatcher("a", RoutingSection(), prepare=nothing, on_end=lambda *_: None)
    d.slots.put_backend("m/0", model="m", url="http://e1", n_slots=n_slots, routable=True)
    return d


class Facts:
    async def of(self, model: str) -> bytes:
        return b"f" * 32

    async def swa_rows(self, model: str) -> int | None:
        return 0


class Tested:
    """Says of every engine that its states are portable."""

    async def get(self, key: str) -> Verdict | None:
        return Verdict(word="portable")


def layouts_of(worker: Worker, client: Client, d: Dispatcher) -> EngineLayouts:
    made: Any = (worker, Facts(), Tested(), lambda url, n: client, d)
    return EngineLayouts(*made, again_s=0.001)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.001)


async def test_the_probe_leaves_a_slot_that_serves_a_request_alone(tmp_path: Path):
    d, client = dispatcher(), Client(held=(1, 400))
    running = await d.acquire(Ask("1", "m"))
    assert running.slot == 0
    layouts = layouts_of(Worker(), client, d)
    layouts.changed(view(tmp_path))
    await until(lambda: layouts.get("m/0"))
    assert client.saved == [1]
    d.finish(running, Outcome("done", 200))
    assert d.slots.open_leases == 0


async def test_the_probe_takes_the_emptiest_slot(tmp_path: Path):
    client = Client(held=(400, 1))
    layouts = layouts_of(Worker(), client, dispatcher())
    layouts.changed(view(tmp_path))
    await until(lambda: layouts.get("m/0"))
    assert client.saved == [1]


async def test_the_probe_waits_until_a_slot_is_idle(tmp_path: Path):
    d, client = dispatcher(n_slots=1), Client(held=(1,))
    running = await d.acquire(Ask("1", "m"))
    layouts = layouts_of(Worker(), client, d)
    layouts.changed(view(tmp_path))
    await until(lambda: "m" in layouts.why_not())
    assert client.saved == []
    d.finish(running, Outcome("done", 200))
    await until(lambda: layouts.get("m/0"))
    assert layouts.why_not() == {}


async def test_a_worker_that_is_down_at_the_probe_is_asked_again(tmp_path: Path):
    layouts = layouts_of(Worker("worker_down", "worker_died"), Client(), dispatcher())
    layouts.changed(view(tmp_path))
    await until(lambda: layouts.get("m/0"))


async def test_a_state_that_is_not_portable_is_probed_once(tmp_path: Path):
    client = Client()
    layouts = layouts_of(Worker("not_portable"), client, dispatcher())
    layouts.changed(view(tmp_path))
    await until(layouts.why_not)
    await asyncio.sleep(0.01)
    assert client.saved == [0] and layouts.get("m/0") is None


async def test_a_backend_that_takes_the_name_of_a_removed_one_is_learned_anew(tmp_path: Path):
    client = Client()
    layouts = layouts_of(Worker(), client, dispatcher())
    layouts.changed(view(tmp_path))
    await until(lambda: layouts.get("m/0"))
    layouts.removed("m/0", "m")
    assert layouts.get("m/0") is None and layouts.identity("m") is None
    layouts.changed(view(tmp_path, url="http://e2"))  # its first process, as the removed one's was
    await until(lambda: layouts.get("m/0"))
    known = layouts.get("m/0")
    assert known is not None and known.view.url == "http://e2" and len(client.saved) == 2


async def test_a_probe_of_an_engine_that_is_gone_ends_and_gives_its_slot_back(tmp_path: Path):
    d, client = dispatcher(), Client()
    client.never = asyncio.Event()
    layouts = layouts_of(Worker(), client, d)
    layouts.changed(view(tmp_path))
    await until(lambda: client.saved)
    layouts.changed(view(tmp_path, status="respawn", url=None))
    await until(lambda: d.slots.open_leases == 0)
    client.never = None
    layouts.changed(view(tmp_path, epoch=2, url="http://e2"))
    await until(lambda: layouts.get("m/0"))
    known = layouts.get("m/0")
    assert known is not None and known.view.epoch == 2
