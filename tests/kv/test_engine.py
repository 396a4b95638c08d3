"""A real engine's state, moved by real workers, restored into another engine with other slots."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.real_engine import CTX, Build, Engine, real_engine
from viiwork.wire.replica import Mark
from viiwork.wire.state import Layout

pytestmark = pytest.mark.engine

PROMPT = "The river town kept a ledger of every flood. " * 15


async def layout_of(target: Engine, worker: Any, slot: int) -> Layout:
    """What a node learns from one probe save."""
    await target.turn("probe", 0, 1)
    path, _ = await target.save_as(0, "probe.bin")
    info = await worker.inspect(path)
    return Layout(shape=info.shape, n_stream=info.n_stream, slot=slot, v_trans=info.v_trans, max_tokens=CTX)


async def test_a_session_moved_to_an_engine_with_other_slots_goes_on_with_the_same_tokens(
    smollm2: Path, tmp_path: Path, workers: Any, kit: Any
) -> None:
    a, b = await workers("a"), await workers("b")
    async with (
        real_engine(smollm2, tmp_path / "ea", Build(slots=2)) as source,
        real_engine(smollm2, tmp_path / "eb", Build(slots=4)) as target,
    ):
        first = await source.turn(PROMPT, 1)
        path, saved = await source.save_as(1, "turn1.bin")
        layout = await layout_of(target, b, slot=3)
        near, far = kit.tcp_pair()
        sent, received = await asyncio.gather(
            a.send(near, kit.send_job(path, n_written=saved["n_written"], n_saved=saved["n_saved"])),
            b.receive(far, kit.grant_for(path.read_bytes())),
        )
        out = target.folder / "import.bin"
        rendered = await b.render(received.replica, layout, out)
        restored = await target.post("/slots/3?action=restore", {"filename": out.name})
        assert restored["n_restored"] == sent.info.n_tokens == saved["n_saved"]
        assert restored["n_read"] == rendered.total_bytes
        second = PROMPT + first["content"] + " And then the mayor said:"
        warm = await target.turn(second, 3)
        here = await source.turn(second, 1)
        assert warm["timings"]["cache_n"] == saved["n_saved"]
        assert warm["tokens"] == here["tokens"]


@pytest.mark.parametrize("quantised", [False, True])
async def test_other_cache_layouts_restore_into_another_slot(
    smollm2: Path, tmp_path: Path, workers: Any, kit: Any, quantised: bool
) -> None:
    worker = await workers("a")
    async with real_engine(
        smollm2, tmp_path / "e", Build(slots=2, quantised=quantised, transposed=not quantised)
    ) as one:
        text = PROMPT[:200]
        await one.turn(text, 0, 2)
        path, saved = await one.save_as(0, "turn.bin")
        info = await worker.inspect(path)
        near, far = kit.tcp_pair()
        _, received = await asyncio.gather(
            worker.send(near, kit.send_job(path)), worker.receive(far, kit.grant_for(path.read_bytes()))
        )
        layout = Layout(
            shape=info.shape, n_stream=info.n_stream, slot=1, v_trans=info.v_trans, max_tokens=CTX
        )
        await worker.render(received.replica, layout, one.folder / "import.bin")
        restored = await one.post("/slots/1?action=restore", {"filename": "import.bin"})
        assert restored["n_restored"] == saved["n_saved"] == info.n_tokens
        again = await one.turn(text + " More.", 1, 1)
        assert again["timings"]["cache_n"] >= info.n_tokens - 2  # what was generated is not in this prompt


@pytest.mark.parametrize("off_here", [True, False])
async def test_flash_attention_may_be_on_at_one_end_and_off_at_the_other(
    smollm2: Path, tmp_path: Path, workers: Any, kit: Any, off_here: bool
) -> None:
    a = b = await workers("b")
    async with (
        real_engine(smollm2, tmp_path / "ea", Build(slots=1, transposed=off_here)) as source,
        real_engine(smollm2, tmp_path / "eb", Build(slots=2, transposed=not off_here)) as target,
    ):
        text = PROMPT[:300]
        await source.turn(text, 0, 2)
        path, saved = await source.save_as(0, "turn1.bin")
        layout = await layout_of(target, b, slot=1)
        assert layout.v_trans != (await a.inspect(path)).v_trans
        near, far = kit.tcp_pair()
        grant = kit.grant_for((target.folder / "probe.bin").read_bytes())
        _, received = await asyncio.gather(a.send(near, kit.send_job(path)), b.receive(far, grant))
        await b.render(received.replica, layout, target.folder / "import.bin")
        restored = await target.post("/slots/1?action=restore", {"filename": "import.bin"})
        assert restored["n_restored"] == saved["n_saved"]
        again = await target.turn(text + " More.", 1, 1)
        assert again["timings"]["cache_n"] >= saved["n_saved"] - 2


async def test_a_second_turn_sends_its_new_rows_alone_and_is_restored_as_well(
    smollm2: Path, tmp_path: Path, workers: Any, kit: Any
) -> None:
    a, b = await workers("a"), await workers("b")
    async with (
        real_engine(smollm2, tmp_path / "ea", Build(slots=2)) as source,
        real_engine(smollm2, tmp_path / "eb", Build(slots=4)) as target,
    ):
        first = await source.turn(PROMPT, 1)
        path, saved = await source.save_as(1, "turn1.bin")
        layout = await layout_of(target, b, slot=2)
        grant = kit.grant_for(path.read_bytes())
        near, far = kit.tcp_pair()
        await asyncio.gather(a.send(near, kit.send_job(path)), b.receive(far, grant))
        second = PROMPT + first["content"] + " And then the mayor said:"
        turn = await source.turn(second, 1)
        path, after = await source.save_as(1, "turn2.bin")
        mark = Mark(generation=1, source="a", keep=turn["timings"]["cache_n"])
        near, far = kit.tcp_pair()
        job = kit.send_job(path, generation=2, known=(mark,))
        sent, received = await asyncio.gather(a.send(near, job), b.receive(far, grant))
        added = after["n_saved"] - turn["timings"]["cache_n"]
        assert sent.kept == turn["timings"]["cache_n"] <= saved["n_saved"]
        assert sent.wire_bytes <= 1.03 * added * layout.shape.token_bytes + 64 * 1024
        await b.render(received.replica, layout, target.folder / "import.bin")
        await target.post("/slots/2?action=restore", {"filename": "import.bin"})
        third = second + turn["content"] + " At last,"
        warm, here = await target.turn(third, 2), await source.turn(third, 1)
        assert warm["timings"]["cache_n"] == after["n_saved"]
        assert warm["tokens"] == here["tokens"]
