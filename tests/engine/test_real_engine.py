"""The real engine, embedded, with the demo model: serve, save and restore a slot, crash and come back."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from viiwork.config.model import LlamacppSection, ModelSection
from viiwork.engine.slots import SlotsClient
from viiwork.errors import KvError

from .conftest import Watch, Watched

pytestmark = pytest.mark.engine

TEXT = "Once upon a time there was a small engine that could count to ten: one, two, three"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def complete(session: aiohttp.ClientSession, url: str, slot: int, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 4, "id_slot": slot, "temperature": 0}
    async with session.post(f"{url}/completion", json=body) as response:
        assert response.status == 200
        return await response.json()


async def started(watch: Watch, smollm2: Path, **fields: Any) -> Watched:
    model = ModelSection(
        name="smol",
        engine="llamacpp",
        path=str(smollm2),
        context=256,
        parallel=2,
        llamacpp=LlamacppSection(binary="embedded", threads=1, cache_ram_mib=0),
        **fields,
    )
    return await watch(model)


async def test_real_engine_serves_moves_a_slot_and_comes_back_after_a_kill(
    watch: Watch, smollm2: Path, session: aiohttp.ClientSession
) -> None:
    watched = await started(watch, smollm2)
    view = await watched.until_healthy()
    assert (view.n_slots, view.ctx, view.embedded, view.busy) == (2, 256, True, 0)
    client = SlotsClient(view.url, session, view.n_slots)
    assert [slot.n_prompt_tokens is not None for slot in await client.slots()] == [True, True]
    props = await client.props()
    assert (props.total_slots, props.n_ctx, props.is_sleeping) == (2, 256, False)
    assert props.model_path == str(smollm2)

    cold = await complete(session, view.url, 0, TEXT)
    done = await client.save(0, "turn-1.bin", 10.0)
    assert (view.save_dir / "turn-1.bin").stat().st_size == done.n_written
    assert done.n_saved == cold["timings"]["prompt_n"] + cold["timings"]["cache_n"] + 3
    restored = await client.restore(1, "turn-1.bin", 10.0)
    assert (restored.n_restored, restored.n_read) == (done.n_saved, done.n_written)
    warm = await complete(session, view.url, 1, TEXT + cold["content"])
    assert warm["timings"]["cache_n"] >= done.n_saved - 1
    assert await client.erase(1) > 0

    with pytest.raises(KvError) as caught:
        await client.restore(1, "missing.bin", 10.0)
    assert caught.value.reason == "restore_refused"

    os.kill(view.pid, signal.SIGKILL)
    again = await watched.until_healthy(epoch=2)
    assert again.url != view.url or again.pid != view.pid
    assert not list(again.save_dir.iterdir())
    assert (await complete(session, again.url, 0, TEXT))["content"] == cold["content"]


async def test_argument_the_embedded_engine_does_not_know_is_a_usage_error(
    watch: Watch, smollm2: Path
) -> None:
    watched = await started(watch, smollm2, args=("--rope-scaling", "yarn"))
    view = await watched.until(lambda view: view.status == "dead")
    assert view.reason == "embedded engine: error: unrecognized arguments: --rope-scaling yarn"
    assert view.epoch == 1


async def test_operator_arguments_win(watch: Watch, smollm2: Path) -> None:
    watched = await started(watch, smollm2, args=("--parallel", "3", "--ctx-size", "768"))
    view = await watched.until_healthy()
    assert (view.n_slots, view.ctx) == (3, 256)


async def test_file_that_is_no_model_is_reported_in_the_engines_words(watch: Watch, tmp_path: Path) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(b"GGUF" + bytes(200))
    watched = await started(watch, path)
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert "bad GGUF version: 0" in respawn.reason
