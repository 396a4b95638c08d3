"""The self-test of kv_share: what it says of real engines, and that it stands in nobody's way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.old_engine import OldSlots
from tests.fakes.real_engine import CTX, Build, real_engine
from viiwork.config.model import ModelSection, RoutingSection
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.engine.slots import Props, Ran, RestoreDone, SaveDone, SlotsClient, SlotView
from viiwork.engine.views import BackendView
from viiwork.errors import EngineError, KvError
from viiwork.kv.client import KvWorker
from viiwork.node.dispatch import Dispatcher
from viiwork.node.fingerprints import StateFingerprints
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_verdicts import FILE_NAME, Verdict, Verdicts
from viiwork.wire.state import CacheShape, Plane, StateShape

from .nodes import NodeProcess

REF = SlotRef("m/0", 0)


def view(folder: Path, url: str, **changes: Any) -> BackendView:
    made = BackendView(
        id="m/0",
        model="m",
        status="healthy",
        phase="",
        pid=1,
        url=url,
        epoch=1,
        n_slots=2,
        ctx=CTX,
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


async def nothing(grant: Grant) -> None:
    pass


def dispatcher(n_slots: int = 2) -> Dispatcher:
    d = Dispatcher("a", RoutingSection(), prepare=nothing, on_end=lambda *_: None)
    d.slots.put_backend("m/0", model="m", url="http://e1", n_slots=n_slots, routable=True)
    return d


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[KvWorker]:
    made = KvWorker(tmp_path / "replicas", 1 << 30)
    await made.start()
    yield made
    await made.stop()


def section(model: Path, *args: str) -> StateFingerprints:
    return StateFingerprints(
        [ModelSection(name="m", engine="llamacpp", path=str(model), context=CTX, args=args)]
    )


async def learned(layouts: EngineLayouts, engine: BackendView) -> EngineLayout | None:
    """What was learned of an engine, None when it is not portable."""
    layouts.changed(engine)
    await until(lambda: layouts.get(engine.id) or layouts.why_not())
    return layouts.get(engine.id)


async def judged(
    model: Path, folder: Path, worker: KvWorker, *, old: bool = False, args: tuple[str, ...] = ()
) -> tuple[dict[str, Any], EngineLayout | None]:
    async with (
        real_engine(model, folder / "e", Build(slots=2)) as engine,
        aiohttp.ClientSession() as http,
    ):

        def client_of(url: str, n_slots: int) -> SlotsClient:
            return OldSlots(url, http, n_slots, engine.folder) if old else SlotsClient(url, http, n_slots)

        for slot in (0, 1):
            await engine.turn("a", slot, 1)  # as the node does before it calls an engine healthy
        layouts = EngineLayouts(worker, section(model, *args), Verdicts(folder), client_of, dispatcher())
        known = await learned(layouts, view(engine.folder, engine.url))
        assert sorted(path.name for path in engine.folder.iterdir()) == ["log"]
        return layouts.status()["m"], known


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
async def test_states_of_an_engine_that_saves_checkpoints_are_portable(
    tiny_models: dict[str, Path], tmp_path: Path, worker: KvWorker, kind: str
):
    found, known = await judged(tiny_models[kind], tmp_path, worker)
    assert known is not None
    assert found["verdict"] == "portable" and found["kind"] == known.shape.kind
    assert found["append_reused"] >= 0.8 * found["tested_tokens"]
    assert known.target(1).checkpoints == 2
    assert known.target(1).swa_rows == (128 + 512 if kind == "gemma3" else 0)
    assert (await worker.store_stats()).replicas == 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "verdict", "why"),
    [
        ("llama", "portable", None),
        ("qwen35", "append-only", "a prompt that diverges 3 tokens before the end reuses 0 of 48"),
        ("gemma3", "not portable", "a restored state gave no reuse (0 of 48 tokens at an exact append)"),
    ],
)
async def test_without_checkpoints_a_hybrid_can_only_be_appended_to_and_a_short_window_not_be_moved(
    tiny_models: dict[str, Path], tmp_path: Path, worker: KvWorker, kind: str, verdict: str, why: str | None
):
    found, known = await judged(tiny_models[kind], tmp_path, worker, old=True)
    assert found["verdict"] == verdict and found.get("why") == why
    assert (known is None) == (verdict == "not portable")
    assert known is None or kind == "llama" or known.target(0).checkpoints == 0


@pytest.mark.engine
async def test_a_window_kept_whole_is_not_portable(
    tiny_models: dict[str, Path], tmp_path: Path, worker: KvWorker
):
    found, known = await judged(tiny_models["gemma3"], tmp_path, worker, args=("--swa-full",))
    assert known is None
    assert found == {
        "verdict": "not portable",
        "why": "with --swa-full the engine goes back to rows it does not save",
    }


@pytest.mark.engine
async def test_what_a_slot_held_is_there_again_after_the_test(
    tiny_models: dict[str, Path], tmp_path: Path, worker: KvWorker
):
    prompt = list(range(2000, 2200))
    async with (
        real_engine(tiny_models["llama"], tmp_path / "e", Build(slots=1)) as engine,
        aiohttp.ClientSession() as http,
    ):
        await engine.turn(prompt, 0, 1)
        made: Any = (worker, section(tiny_models["llama"]), Verdicts(tmp_path))
        layouts = EngineLayouts(*made, lambda url, n: SlotsClient(url, http, n), dispatcher(1))
        assert await learned(layouts, view(engine.folder, engine.url, n_slots=1))
        again = await engine.turn([*prompt, 5000], 0, 1)
        assert again["timings"]["cache_n"] == len(prompt)


# -- against an engine that does as it is told -----------------------------------------------------

PLANES = (Plane(1, 128),)
SHAPE = StateShape(
    state_version=4,
    ext=False,
    caches=(CacheShape(name="base", n_rot_k=0, n_rot_v=0, k=PLANES, v=PLANES),),
)


class Told:
    """Both the engine's slots and the worker. `reuse` is taken from the front: home, appended, diverged."""

    def __init__(self, *reuse: int, held: int = 1, answers: tuple[int, ...] = (7, 7, 7)) -> None:
        self.reuse, self.held, self.answers = list(reuse), held, list(answers)
        self.did: list[str] = []
        self.blocked: asyncio.Event | None = None
        self.fault: Exception | None = None
        self.n_bytes, self.n_read = 1000, 1000

    async def props(self) -> Props:
        return Props(2, "b7", "/m.gguf", False, 512)

    async def slots(self, timeout_s: float = 1.0) -> list[SlotView]:
        return [SlotView(0, 512, False, None, self.held, None, None)]

    async def tokenized(self, text: str, timeout_s: float) -> list[int]:
        return list(range(100, 200))

    async def run(self, slot: int, tokens: list[int], n_predict: int, timeout_s: float) -> Ran:
        self.did.append(f"run {len(tokens)}")
        if self.fault is not None:
            raise self.fault
        if n_predict == 0:
            if self.blocked is not None:
                await self.blocked.wait()
            return Ran(0, len(tokens), ())
        return Ran(self.reuse.pop(0), 0, (self.answers.pop(0),))

    async def save(self, slot: int, filename: str, timeout_s: float) -> SaveDone:
        self.did.append(f"save {filename.partition('-')[0]}")
        return SaveDone(48, self.n_bytes, 0.1)

    async def restore(self, slot: int, filename: str, timeout_s: float) -> RestoreDone:
        self.did.append(f"restore {filename.partition('-')[0]}")
        return RestoreDone(48, self.n_read, 0.1)

    async def erase(self, slot: int, timeout_s: float = 10.0) -> int:
        return 48

    async def inspect(self, path: Path) -> Any:
        class Info:
            shape, n_stream, v_trans = SHAPE, 1, False

        return Info()

    async def keep(self, file: Any) -> Any:
        class Kept:
            replica = "r"

        return Kept()

    async def render(self, replica: str, target: Any, path: Path) -> Any:
        class Rendered:
            n_tokens, total_bytes = 48, self.n_bytes

        return Rendered()

    async def drop(self, replica: str) -> bool:
        return True


class Facts:
    async def of(self, model: str) -> bytes:
        return b"f" * 32

    async def swa_rows(self, model: str) -> int | None:
        return 0


def told_layouts(told: Told, folder: Path, d: Dispatcher | None = None) -> EngineLayouts:
    made: Any = (told, Facts(), Verdicts(folder), lambda url, n: told, d or dispatcher(1))
    return EngineLayouts(*made, again_s=0.001)


@pytest.mark.parametrize(
    ("told", "word"),
    [
        (Told(48, 48, 45), "portable"),
        (Told(43, 43, 43), "portable"),  # a checkpoint before the end serves both
        (Told(48, 48, 0), "append-only"),
        (Told(48, 0, 0), "not portable"),
        (Told(48, 48, 45, answers=(7, 8, 7)), "not portable"),
        (Told(48, 43, 43, answers=(7, 8, 7)), "portable"),  # another batch may turn a near tie
    ],
)
async def test_the_verdict_says_what_was_reused(tmp_path: Path, told: Told, word: str):
    layouts = told_layouts(told, tmp_path)
    known = await learned(layouts, view(tmp_path, "http://e1", embedded=False))
    assert layouts.status()["m"]["verdict"] == word
    assert (known is None) == (word == "not portable") == (layouts.identity("m") is None)


async def test_a_verdict_outlives_the_node_and_a_new_build_is_tested_anew(tmp_path: Path):
    assert await learned(
        told_layouts(Told(48, 48, 45), tmp_path), view(tmp_path, "http://e1", embedded=False)
    )
    second = Told()
    layouts = told_layouts(second, tmp_path)
    known = await learned(layouts, view(tmp_path, "http://e1", embedded=False))
    assert known is not None and known.verdict.word == "portable" and known.build == "b7"
    assert second.did == ["save probe"]
    third = Told(48, 0, 0)
    other = told_layouts(third, tmp_path)
    assert await learned(other, view(tmp_path, "http://e1")) is None  # an embedded engine is another build
    assert "save test" in third.did


async def test_a_damaged_file_of_verdicts_is_as_good_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / FILE_NAME).write_bytes(b'{"verdicts": 7}')
    assert await Verdicts(tmp_path).get("k") is None
    assert "kv_share.verdicts_unusable" in caplog.text


async def test_the_file_of_verdicts_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("viiwork.node.kv_verdicts.KV_VERDICTS_MAX", 2)
    verdicts = Verdicts(tmp_path)
    for key in "abc":
        await verdicts.put(key, Verdict(word="portable"))
    again = Verdicts(tmp_path)
    assert [await again.get(key) is not None for key in "abc"] == [False, True, True]


async def test_the_test_gives_its_slot_to_a_request_that_waits_and_is_made_later(tmp_path: Path):
    d, told = dispatcher(1), Told(48, 48, 45)
    told.blocked = asyncio.Event()
    layouts = told_layouts(told, tmp_path, d)
    layouts.changed(view(tmp_path, "http://e1"))
    await until(lambda: told.did[-1:] == ["run 48"])
    async with asyncio.timeout(30):
        grant = await d.acquire(Ask("1", "m"))  # the only slot
    assert "wait" in layouts.why_not()["m"] and layouts.get("m/0") is None
    told.blocked.set()
    d.finish(grant, Outcome("done", 200))
    await until(lambda: layouts.get("m/0"))
    assert d.slots.open_leases == 0


async def test_a_session_whose_slot_is_tested_gets_it_back_with_its_state(tmp_path: Path):
    d, told = dispatcher(1), Told(48, 48, 45, held=300)
    told.blocked = asyncio.Event()
    d.sessions.ran_here(("s", "m"), Binding("a", REF, 300, 1))
    layouts = told_layouts(told, tmp_path, d)
    layouts.changed(view(tmp_path, "http://e1"))
    await until(lambda: told.did[-1:] == ["run 48"])
    async with asyncio.timeout(30):
        grant = await d.acquire(Ask("1", "m", session="s"))
    assert told.did == ["save probe", "run 48", "restore probe"]
    d.finish(grant, Outcome("client_gone"))
    await layouts.stop()


async def test_an_engine_that_reads_no_checkpoints_gets_none(tmp_path: Path):
    told = Told(48, 48, 45)
    told.n_read = 900
    known = await learned(told_layouts(told, tmp_path), view(tmp_path, "http://e1"))
    assert known is not None and known.verdict.checkpoints == 0 and known.target(0).checkpoints == 0


@pytest.mark.parametrize(
    "fault", [EngineError("one token: 501 no completions"), KvError("restore_refused", "the engine refused")]
)
async def test_an_engine_that_fails_the_test_is_not_shared_and_the_status_says_why(
    tmp_path: Path, fault: Exception, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    told = Told()
    told.fault = fault
    layouts = told_layouts(told, tmp_path)
    assert await learned(layouts, view(tmp_path, "http://e1")) is None
    assert layouts.status() == {"m": {"verdict": "not portable", "why": str(fault)}}
    assert "kv_share.not_portable model=m" in caplog.text
    assert not (tmp_path / FILE_NAME).exists()


async def test_one_log_line_tells_of_the_test(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    await learned(told_layouts(Told(48, 48, 0), tmp_path), view(tmp_path, "http://e1", embedded=False))
    lines = [record.message for record in caplog.records if "kv_share.tested" in record.message]
    assert lines == [
        "kv_share.tested model=m verdict=append-only kind=dense build=b7 tokens=48 append=48 diverging=0: "
        "a prompt that diverges 3 tokens before the end reuses 0 of 48"
    ]


async def test_an_engine_that_has_no_time_for_the_test_is_asked_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pauses: list[float] = []
    d, told = dispatcher(1), Told(48, 48, 45)
    grant = await d.acquire(Ask("1", "m"))  # the only slot
    layouts = told_layouts(told, tmp_path, d)
    sleep = asyncio.sleep

    async def paused(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        if len(pauses) == 20:
            d.finish(grant, Outcome("done", 200))
        await sleep(0)

    monkeypatch.setattr("viiwork.node.kv_layouts.asyncio.sleep", paused)
    layouts.changed(view(tmp_path, "http://e1"))
    async with asyncio.timeout(120):
        while layouts.get("m/0") is None:
            await sleep(0.005)
    assert pauses[:4] == [0.001, 0.002, 0.004, 0.008] and max(pauses) == 60.0


@pytest.mark.engine
async def test_a_node_shows_what_it_found(http: aiohttp.ClientSession, pair: tuple[NodeProcess, NodeProcess]):
    status = await pair[0].until(http, "tested", lambda s: "small" in s["kv_share"]["models"])
    found = status["kv_share"]["models"]["small"]
    assert found["verdict"] == "portable" and found["build"].startswith("xllamacpp ")
    assert found["tested_tokens"] == found["append_reused"] == 48 and found["diverging_reused"] == 45
    assert "kv_share.tested model=small verdict=portable kind=dense" in pair[0].log
