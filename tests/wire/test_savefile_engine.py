"""Real engines: a state saved on one layout goes on in an unlike one as if it had never moved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.real_engine import CTX, Build, Engine, real_engine
from tests.fakes.statestore import Store, info_of, store_of
from tests.fakes.tiny_models import WINDOW
from viiwork.wire.rendering import longest
from viiwork.wire.savefile import layout_of
from viiwork.wire.sections import words_of
from viiwork.wire.state import Layout, segments_of

pytestmark = pytest.mark.engine

N = 500  # tokens of the first prompt; long enough for the engine to make a checkpoint
WARM = [9, 10, 11, 12]  # of a next prompt


def prompt_of(n: int = N, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(n)]


async def layout(engine: Engine, slot: int, **changes: Any) -> Layout:
    """What a node learns of an engine from one probe save."""
    await engine.turn("probe", 0, 1)
    probe = layout_of(info_of(await engine.save(0)), slot=slot, max_tokens=CTX)
    return msgspec.structs.replace(probe, **{"checkpoints": 2, **changes})


async def moved(target: Engine, slot: int, store: Store, to: Layout, prompt: list[int]) -> dict[str, Any]:
    """Restore the rendered state and go on with the prompt."""
    data = store.render(to)
    done = await target.restore(slot, data)
    assert done["n_restored"] == store.stored.n_tokens
    assert done["n_read"] == len(data)
    return await target.turn(prompt, slot)


async def unmoved(engine: Engine, slot: int, data: bytes, prompt: list[int]) -> dict[str, Any]:
    """The same turn where the state comes from."""
    await engine.restore(slot, data)
    return await engine.turn(prompt, slot)


def likelihoods(turn: dict[str, Any]) -> list[float]:
    """How likely the likeliest first tokens were."""
    return [at["logprob"] for at in turn["completion_probabilities"][0]["top_logprobs"]]


def same_tokens(one: dict[str, Any], other: dict[str, Any], exact: bool = True) -> None:
    """Kernels that differ may turn a near tie."""
    if exact:
        assert one["tokens"] == other["tokens"]


# How far apart one engine's own answers are when it computes in batches of another size or with the other
# attention kernel. A row out of place moves them ten times as far (see below).
NOISE = {"llama": 0.06, "qwen35": 0.02, "gemma3": 0.02}

UNLIKE = [
    ("llama", Build(slots=2), Build(slots=4, unified=True)),
    ("llama", Build(slots=2, unified=True), Build(slots=1, transposed=True)),
    ("llama", Build(slots=2, transposed=True), Build(slots=2)),
    ("llama", Build(slots=2, quantised=True), Build(slots=2, unified=True, quantised=True)),
    ("qwen35", Build(slots=2), Build(slots=4, unified=True)),
    ("qwen35", Build(slots=1, transposed=True), Build(slots=2)),
    ("gemma3", Build(slots=2), Build(slots=4, unified=True)),
    ("gemma3", Build(slots=2, transposed=True), Build(slots=1)),
    ("gemma3", Build(slots=1), Build(slots=2, transposed=True)),
]


@pytest.mark.parametrize(("kind", "one", "other"), UNLIKE, ids=str)
async def test_a_state_goes_on_in_an_unlike_engine(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str, one: Build, other: Build
) -> None:
    a, b, model = one.slots - 1, other.slots - 1, tiny_models[kind]
    async with (
        real_engine(model, tmp_path / "a", one) as source,
        real_engine(model, tmp_path / "b", other) as target,
    ):
        await source.turn(prompt_of(), a)
        data = await source.save(a)
        store = store_of(data)
        to = await layout(target, b)
        held = list(words_of(store.tokens))
        # The engine reads the file as one of its own: what it saves of the slot is what it was given.
        await target.restore(b, store.render(to))
        assert await target.save(b) == store.render(to)
        # An append keeps all but what a window's last checkpoint has not. An edit goes as far back as it does
        # at home: to the last checkpoint or, where rows are all there is, to the edit.
        for prompt in (held + WARM, held[:-3] + WARM, held[:-40] + WARM):
            here = await unmoved(source, a, data, prompt)
            there = await moved(target, b, store, to, prompt)
            assert there["timings"]["cache_n"] == here["timings"]["cache_n"]
            if prompt[: len(held)] == held:
                assert there["timings"]["cache_n"] >= len(held) - 12 * (kind == "gemma3")
            same_tokens(here, there, exact=one.transposed == other.transposed)
            assert likelihoods(there) == pytest.approx(likelihoods(here), abs=NOISE[kind])


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
@pytest.mark.parametrize("build", [Build(slots=2), Build(transposed=True)], ids=str)
async def test_rows_below_what_a_turn_kept_are_those_of_the_save_before(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str, build: Build
) -> None:
    async with real_engine(tiny_models[kind], tmp_path / "a", build) as engine:
        first = await engine.turn(prompt_of(), 0)
        store = store_of(await engine.save(0))
        n = store.stored.n_tokens
        grown = await engine.turn(prompt_of() + first["tokens"][:-1] + WARM, 0)
        data = await engine.save(0)
        assert grown["timings"]["cache_n"] == n
        store.add(data, keep=n)
        to = layout_of(info_of(data), slot=0, max_tokens=CTX)
        assert store.render(to) == data[: info_of(data).payload_bytes]


async def test_a_deeper_window_keeps_an_append_and_an_edit_without_a_checkpoint(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    async with (
        real_engine(tiny_models["gemma3"], tmp_path / "a", Build(slots=2)) as source,
        real_engine(tiny_models["gemma3"], tmp_path / "b", Build()) as target,
    ):
        first = await source.turn(prompt_of(), 1)
        store = store_of(await source.save(1))
        n = store.stored.n_tokens
        await source.turn(prompt_of() + first["tokens"][:-1] + prompt_of(60, seed=2), 1)
        data = await source.save(1)
        store.add(data, keep=n)
        held = list(words_of(store.tokens))
        plain = await layout(target, 0, checkpoints=0)
        deep = msgspec.structs.replace(plain, swa_rows=WINDOW + 512)
        for prompt, n_kept in ((held + WARM, len(held)), (held[:-20] + WARM, len(held) - 20)):
            shallow = await moved(target, 0, store, plain, prompt)
            assert shallow["timings"]["cache_n"] == 0
            warm = await moved(target, 0, store, deep, prompt)
            assert warm["timings"]["cache_n"] == n_kept
            assert likelihoods(warm) == pytest.approx(likelihoods(shallow), abs=NOISE["gemma3"])


async def test_a_hybrid_goes_back_to_a_recurrent_state_that_was_kept(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    async with (
        real_engine(tiny_models["qwen35"], tmp_path / "a", Build(slots=2)) as source,
        real_engine(tiny_models["qwen35"], tmp_path / "b", Build()) as target,
    ):
        first = await source.turn(prompt_of(), 1)
        store = store_of(await source.save(1))
        n = store.stored.n_tokens
        await source.turn(prompt_of() + first["tokens"][:-1] + prompt_of(60, seed=2), 1)
        store.add(await source.save(1), keep=n)
        to = await layout(target, 0, checkpoints=0)
        prompt = [*words_of(store.tokens)][: n + 30] + WARM
        cut = longest(store.stored, to, n + 30)
        assert cut == n
        await target.restore(0, store.render(to, cut))
        warm = await target.turn(prompt, 0)
        assert warm["timings"]["cache_n"] == n
        await target.post("/slots/0?action=erase", {})
        cold = await target.turn(prompt, 0)
        assert likelihoods(warm) == pytest.approx(likelihoods(cold), abs=NOISE["qwen35"])


async def test_a_real_model_says_the_same_after_its_state_or_a_part_of_it_moved(
    smollm2: Path, tmp_path: Path
) -> None:
    text = "The river town kept a ledger of every flood. " * 12
    async with (
        real_engine(smollm2, tmp_path / "a", Build(slots=2)) as source,
        real_engine(smollm2, tmp_path / "b", Build(slots=3, unified=True)) as target,
    ):
        await source.turn(text, 1)
        data = await source.save(1)
        store = store_of(data)
        to = await layout(target, 2)
        held = list(words_of(store.tokens))
        here = await unmoved(source, 1, data, held + WARM)
        there = await moved(target, 2, store, to, held + WARM)
        assert there["timings"]["cache_n"] == len(held)
        same_tokens(here, there)
        half = len(held) // 2
        done = await target.restore(2, store.render(to, half))
        assert done["n_restored"] == half
        there = await target.turn(held + WARM, 2)
        assert there["timings"]["cache_n"] == half
        same_tokens(here, there)


async def test_a_row_out_of_place_would_be_noticed(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    async with real_engine(tiny_models["llama"], tmp_path / "a", Build()) as engine:
        await engine.turn(prompt_of(), 0)
        data = await engine.save(0)
        store = store_of(data)
        prompt = [*words_of(store.tokens), *WARM]
        right = await unmoved(engine, 0, data, prompt)
        values = {segment.index for segment in segments_of(store.shape) if segment.part == "v"}
        rows = dict(store.rows)
        store.rows |= {at: rows.get((at[0], at[1] + 1), rows[at]) for at in rows if at[0] in values}
        wrong = await moved(engine, 0, store, await layout(engine, 0), prompt)
        assert abs(likelihoods(wrong)[0] - likelihoods(right)[0]) > 5 * NOISE["llama"]
