"""What placement relies on: how the real engine's RAM prompt cache treats pinned requests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from viiwork.config.model import LlamacppSection, ModelSection

from .conftest import Watch

pytestmark = pytest.mark.engine

WORDS = "alpha beta gamma delta stone river cloud paper garden window silver engine".split()


def prompt(seed: int) -> str:
    rng = random.Random(seed)
    return f"{seed} " + " ".join(rng.choice(WORDS) for _ in range(120))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Engine:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def reused(self, text: str, slot: int) -> float:
        """Share of the prompt that a request pinned to the slot had not to read."""
        body: dict[str, Any] = {"prompt": text, "n_predict": 1, "id_slot": slot, "temperature": 0}
        async with self._session.post(f"{self._url}/completion", json=body) as response:
            timings = (await response.json())["timings"]
        return timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"])


async def engine(watch: Watch, smollm2: Path, session: aiohttp.ClientSession, ram_mib: int | None) -> Engine:
    options = LlamacppSection(binary="embedded", threads=1, cache_ram_mib=ram_mib)
    model = ModelSection(
        name="smol", engine="llamacpp", path=str(smollm2), context=512, parallel=2, llamacpp=options
    )
    view = await (await watch(model)).until_healthy()
    assert view.url is not None
    return Engine(view.url, session)


async def test_a_replaced_prompt_comes_back_from_ram_into_any_slot_it_is_pinned_to(
    watch: Watch, smollm2: Path, session: aiohttp.ClientSession
) -> None:
    llama = await engine(watch, smollm2, session, None)
    one, two = prompt(1), prompt(2)
    assert await llama.reused(one, 0) < 0.1
    assert await llama.reused(two, 0) < 0.1
    assert await llama.reused(one + " more", 0) > 0.9
    assert await llama.reused(two + " more", 1) > 0.9


async def test_without_a_ram_cache_a_replaced_prompt_is_gone(
    watch: Watch, smollm2: Path, session: aiohttp.ClientSession
) -> None:
    llama = await engine(watch, smollm2, session, 0)
    one, two = prompt(1), prompt(2)
    await llama.reused(one, 0)
    await llama.reused(two, 0)
    assert await llama.reused(one + " more", 0) < 0.1
