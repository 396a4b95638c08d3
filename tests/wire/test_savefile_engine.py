"""Real engines: a state saved on one layout goes on in an unlike one as if it had never moved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.real_engine import CTX, Build, Engine, real_engine
from tests.fakes.statestore import Store, info_of, store_of
from viiwork.wire.savefile import layout_of
from viiwork.wire.sections import words_of
from viiwork.wire.state import Layout

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


def answer(turn: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens, and how likely the likeliest were."""
    first = turn["completion_probabilities"][0]["top_logprobs"]
    return turn["tokens"], [at["logprob"] for at in first]


UNLIKE = [
    ("llama", Build(slots=2), Build(slots=4, unified=True)),
    ("llama", Build(slots=2, unified=True), Build(slots=1, transposed=True)),
    ("llama", Build(slots=2, transposed=True), Build(slots=2)),
    ("llama", Build(slots=2, quantised=True), Build(slots=2, unified=True, quantised=True)),
    ("qwen35", Build(slots=2), Build(slots=4, unified=True)),
    ("qwen35", Build(slots=1, transposed=True), Build(slots=2)),
    ("gemma3", Build(slots=2), Build(slots=4, unified=True)),
    ("gemma3", Build(slots=1), Build(slots=2, transposed=True)),
    ("gemma3", Build(slots=2, transposed=True), Build(slots=1)),
]


@pytest.mark.parametrize(("kind", "one", "other"), UNLIKE, ids=str)
async def test_a_state_goes_on_in_an_unlike_engine(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str, one: Build, other: Build
) -> None:
    a, b = one.slots - 1, other.slots - 1
    model = tiny_models[kind]
    async with (
        real_engine(model, tmp_path / "a", one) as source,
        real_engine(model, tmp_path / "b", other) as target,
    ):
        await source.turn(prompt_of(), a)
        data = await source.save(a)
        store = store_of(data)
        to = await layout(target, b)
        held = list(words_of(store.tokens))
        # As in the engine's own restore, and no less: an append keeps all but what a window's last checkpoint
        # has not; an edit near the end goes back to it, one further back to nothing but a dense model's rows.
        for prompt in (held + WARM, held[:-3] + WARM, held[:-40] + WARM):
            here = await unmoved(source, a, data, prompt)
            there = await moved(target, b, store, to, prompt)
            assert there["timings"]["cache_n"] == here["timings"]["cache_n"]
            if prompt[: len(held)] == held:
                assert there["timings"]["cache_n"] >= len(held) - 12 * (kind == "gemma3")
            if one.transposed == other.transposed:
                assert answer(there) == answer(here)
            else:  # the two kernels round differently, and no more than that
                assert answer(there)[1] == pytest.approx(answer(here)[1], abs=0.02)
        # The engine reads the file as it would its own: what it saves of the restored slot is what it was given.
        await target.restore(b, data := store.render(to))
        assert (await target.save(b)) == data
