"""Hybrid and sliding-window sessions between real engines of unlike layouts, as their nodes learned these."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from tests.fakes.real_engine import CTX, Build, Engine, real_engine
from viiwork.config.model import ModelSection, RoutingSection
from viiwork.core.turn import Grant
from viiwork.engine.slots import SlotsClient
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import StateFile
from viiwork.node.dispatch import Dispatcher
from viiwork.node.fingerprints import StateFingerprints
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_verdicts import Verdicts
from viiwork.wire.replica import Mark
from viiwork.wire.state import Layout

from .test_kv_selftest import until, view

pytestmark = pytest.mark.engine

FIRST, SECOND = 500, 60  # tokens of the prompts
WARM = [9, 10, 11, 12]  # of the next
NOISE = 0.03  # of a likelihood, when one engine computes in batches of another size or with another kernel


def tokens_of(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(n)]


def likelihoods(turn: dict[str, Any]) -> list[float]:
    return [at["logprob"] for at in turn["completion_probabilities"][0]["top_logprobs"]]


class Session(NamedTuple):
    """A session of two turns and its replica."""

    replica: str
    first: int  # tokens after its first turn
    tokens: list[int]  # after its second


async def nothing(grant: Grant) -> None:
    pass


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[KvWorker]:
    made = KvWorker(tmp_path / "replicas", 1 << 30)
    await made.start()
    yield made
    await made.stop()


async def learned(
    engine: Engine, model: Path, build: Build, worker: KvWorker, folder: Path, http: aiohttp.ClientSession
) -> EngineLayout:
    d = Dispatcher("a", RoutingSection(), prepare=nothing, on_end=lambda *_: None)
    d.slots.put_backend("m/0", model="m", url=engine.url, n_slots=build.slots, routable=True)
    for slot in range(build.slots):
        await engine.turn("a", slot, 1)
    facts = StateFingerprints([ModelSection(name="m", engine="llamacpp", path=str(model), context=CTX)])
    layouts = EngineLayouts(worker, facts, Verdicts(folder), lambda url, n: SlotsClient(url, http, n), d)
    layouts.changed(view(engine.folder, engine.url, n_slots=build.slots))
    await until(lambda: layouts.get("m/0") or layouts.why_not())
    known = layouts.get("m/0")
    assert known is not None, layouts.why_not()
    return known


async def kept(engine: Engine, worker: KvWorker, slot: int, generation: int, known: tuple[Mark, ...]) -> str:
    path, done = await engine.save_as(slot, f"s{generation}.bin")
    file = StateFile(
        path=str(path),
        session=b"s" * 32,
        model_fp=b"m" * 32,
        generation=generation,
        created_unix_s=1.0,
        source="a",
        known=known,
        n_saved=done["n_saved"],
    )
    return (await worker.keep(file)).replica


async def two_turns(engine: Engine, worker: KvWorker, slot: int) -> Session:
    prompt = tokens_of(FIRST, 1)
    first = await engine.turn(prompt, slot)
    n_first = len(prompt) + len(first["tokens"]) - 1
    await kept(engine, worker, slot, 1, ())
    prompt = prompt + first["tokens"][:-1] + tokens_of(SECOND, 2)
    second = await engine.turn(prompt, slot)
    mark = Mark(generation=1, source="a", keep=second["timings"]["cache_n"])
    replica = await kept(engine, worker, slot, 2, (mark,))
    return Session(replica, n_first, prompt + second["tokens"][:-1])


async def imported(
    engine: Engine, worker: KvWorker, session: Session, target: Layout, prompt: list[int], useful: int
) -> dict[str, Any]:
    """The prompt's turn after the replica was rendered and restored for it."""
    path = engine.folder / "in.bin"
    await engine.post(f"/slots/{target.slot}?action=erase", {})
    rendered = await worker.render(session.replica, target, path, at_most=useful)
    done = await engine.post(f"/slots/{target.slot}?action=restore", {"filename": path.name})
    path.unlink()
    assert (done["n_restored"], done["n_read"]) == (rendered.n_tokens, rendered.total_bytes)
    return await engine.turn(prompt, target.slot)


async def cold(engine: Engine, slot: int, prompt: list[int]) -> dict[str, Any]:
    await engine.post(f"/slots/{slot}?action=erase", {})
    return await engine.turn(prompt, slot)


PAIRS = [
    ("qwen35", Build(slots=2), Build(slots=4)),
    ("qwen35", Build(slots=4, unified=True), Build(slots=2)),
    ("qwen35", Build(slots=2, transposed=True), Build(slots=4, unified=True)),
    ("gemma3", Build(slots=2), Build(slots=4)),
    ("gemma3", Build(slots=4, unified=True), Build(slots=2, transposed=True)),
    ("gemma3", Build(slots=2, transposed=True), Build(slots=4, unified=True)),
]


@pytest.mark.parametrize(("kind", "one", "other"), PAIRS, ids=str)
async def test_a_session_goes_on_warm_where_it_was_left_and_from_where_a_prompt_leaves_it(
    tiny_models: dict[str, Path], tmp_path: Path, worker: KvWorker, kind: str, one: Build, other: Build
):
    model = tiny_models[kind]
    async with (
        aiohttp.ClientSession() as http,
        real_engine(model, tmp_path / "a", one) as source,
        real_engine(model, tmp_path / "b", other) as there,
    ):
        layout = await learned(there, model, other, worker, tmp_path, http)
        target = layout.target(other.slots - 1)
        session = await two_turns(source, worker, one.slots - 1)
        whole, n = session.tokens, len(session.tokens)
        # Its own tokens and more; a part of its last answer; a part of its second prompt.
        for common, reused in ((n, n), (n - 3, n - 20), (session.first + 30, session.first - 20)):
            prompt = whole[:common] + WARM
            warm = await imported(there, worker, session, target, prompt, common)
            assert reused <= warm["timings"]["cache_n"] <= common
            assert likelihoods(warm) == pytest.approx(
                likelihoods(await cold(there, target.slot, prompt)), abs=NOISE
            )
        if (one.transposed, one.unified) == (other.transposed, other.unified):
            here = await source.turn([*whole, *WARM], one.slots - 1)
            moved = await imported(there, worker, session, target, [*whole, *WARM], n)
            assert moved["tokens"] == here["tokens"]


async def test_without_checkpoints_a_hybrid_goes_back_to_its_turn_before(
    tiny_models: dict[str, Path], tmp_path: Path, worker: KvWorker
):
    model, build = tiny_models["qwen35"], Build(slots=2)
    async with (
        aiohttp.ClientSession() as http,
        real_engine(model, tmp_path / "a", build) as source,
        real_engine(model, tmp_path / "b", build) as there,
    ):
        layout = await learned(there, model, build, worker, tmp_path, http)
        target = msgspec.structs.replace(layout.target(1), checkpoints=0)
        session = await two_turns(source, worker, 0)
        prompt = session.tokens[: session.first + 30] + WARM
        warm = await imported(there, worker, session, target, prompt, session.first + 30)
        assert warm["timings"]["cache_n"] == session.first
        assert likelihoods(warm) == pytest.approx(likelihoods(await cold(there, 1, prompt)), abs=NOISE)
        whole = await imported(there, worker, session, target, prompt, 0)
        assert whole["timings"]["cache_n"] == 0  # the engine cannot go back in it


@pytest.mark.parametrize(("padded", "lost"), [(True, 0), (False, 150)])
async def test_a_window_that_an_answer_filled_keeps_an_append_by_the_cell_before_it(
    tiny_models: dict[str, Path], tmp_path: Path, worker: KvWorker, padded: bool, lost: int
):
    model, build = tiny_models["gemma3"], Build(slots=2)
    async with (
        aiohttp.ClientSession() as http,
        real_engine(model, tmp_path / "a", build) as source,
        real_engine(model, tmp_path / "b", build) as there,
    ):
        layout = await learned(there, model, build, worker, tmp_path, http)
        assert layout.target(1).swa_pad
        target = msgspec.structs.replace(layout.target(1), swa_pad=padded)
        prompt = tokens_of(300, 1)
        said = await source.turn(prompt, 0, 160)  # more tokens than the window has
        tokens = prompt + said["tokens"][:-1]
        session = Session(await kept(source, worker, 0, 1, ()), 0, tokens)
        warm = await imported(there, worker, session, target, [*tokens, *WARM], len(tokens))
        assert len(tokens) - 20 - lost <= warm["timings"]["cache_n"] <= len(tokens) - lost
        assert likelihoods(warm) == pytest.approx(
            likelihoods(await cold(there, 1, [*tokens, *WARM])), abs=NOISE
        )
        if padded:
            assert warm["timings"]["cache_n"] == len(tokens)
