"""Every form of state moved by real workers, turn after turn, beside a store that is a dict of rows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.savefiles import FORMS, State, make
from tests.fakes.statestore import Store, info_of
from viiwork.errors import KvError
from viiwork.wire.replica import Mark


async def push(kit: Any, worker: Any, path: Path, data: bytes, generation: int, keep: int, **job: Any) -> Any:
    path.write_bytes(data)
    known = (Mark(generation=generation - 1, source="a", keep=keep),)
    near, far = kit.tcp_pair()
    sending = worker.send(near, kit.send_job(path, generation=generation, known=known, **job))
    return await asyncio.gather(sending, worker.receive(far, kit.grant_for(data)))


def points(n: int) -> tuple[int, ...]:
    return (n // 2, n - 1)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("form", FORMS)
async def test_turns_of_every_form_come_out_as_their_engine_wrote_them(
    kit: Any, workers: Any, tmp_path: Path, form: str, v_trans: bool
) -> None:
    state: State = FORMS[form]
    state = state.at(v_trans=v_trans and state.attention and state.type in (0, 1, 30))
    worker = await workers("b")
    marks = bool(state.window or state.recurrent)
    oracle = Store(info_of(make(state.at(checkpoints=()))).shape)
    before = 0
    for generation, n in enumerate((300, 301, 700, 1500, 900, 905), start=1):
        keep = min(before, n)
        turn = state.at(n=n, checkpoints=points(n) if marks else ())
        data = make(turn)
        oracle.add(data, keep=keep)
        sent, received = await push(kit, worker, tmp_path / "s", data, generation, keep, checkpoints=2)
        assert sent.kept == keep
        for target in (
            kit.target_for(data, checkpoints=2, v_trans=turn.v_trans),
            kit.target_for(data, checkpoints=1, v_trans=False, n_stream=4, slot=3),
        ):
            out = tmp_path / "out"
            done = await worker.render(received.replica, target, out)
            assert done.n_tokens == n
            assert out.read_bytes() == oracle.render(target)
            out.unlink()
        before = n


async def test_the_newest_recurrent_states_are_kept_and_one_is_where_a_state_can_be_cut(
    kit: Any, workers: Any, tmp_path: Path
) -> None:
    state = FORMS["hybrid"].at(checkpoints=())
    worker, before = await workers("b"), 0
    for generation, n in enumerate((100, 200, 300, 400), start=1):
        data = make(state.at(n=n))
        _, received = await push(kit, worker, tmp_path / "s", data, generation, before)
        before = n
    assert len(list((tmp_path / "store-b").glob("*.recurrent-*"))) == 3
    target = kit.target_for(data)
    for at_most, n in ((400, 400), (399, 300), (200, 200)):
        out = tmp_path / f"out-{at_most}"
        assert (await worker.render(received.replica, target, out, at_most=at_most)).n_tokens == n
        assert out.read_bytes() == make(state.at(n=n, n_stream=1))
    with pytest.raises(KvError) as caught:
        await worker.render(received.replica, target, tmp_path / "none", at_most=199)
    assert caught.value.reason == "not_held"


async def test_a_changed_blob_is_not_rendered(kit: Any, workers: Any, tmp_path: Path) -> None:
    worker, data = await workers("b"), make(FORMS["hybrid"].at(checkpoints=()))
    _, received = await push(kit, worker, tmp_path / "s", data, 1, 0)
    (blob,) = (tmp_path / "store-b").glob("*.recurrent-*")
    with blob.open("r+b") as file:
        file.seek(40)
        file.write(b"\0\0\0\1")
    with pytest.raises(KvError) as caught:
        await worker.render(received.replica, kit.target_for(data), tmp_path / "out")
    assert caught.value.reason == "corrupt"
    assert list((tmp_path / "store-b").iterdir()) == []
