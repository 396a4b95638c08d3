"""Only what a peer does not hold travels, and what it renders is what the sender's engine wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from viiwork.errors import KvError
from viiwork.wire.replica import Mark

LAYERS, ROW = 4, 1024
TOKEN_BYTES = 2 * LAYERS * ROW
SHAPE = {"n_layer": LAYERS, "row": ROW}


class Pair:
    """One worker that sends to itself, and the turns of a session."""

    def __init__(self, kit: Any, worker: Any, tmp_path: Path) -> None:
        self.kit, self.worker, self.tmp_path = kit, worker, tmp_path
        self.generation = 0

    async def push(self, data: bytes, *, keep: int | None = None, **job: Any) -> tuple[Any, Any]:
        """Send a newer state, of which rows below `keep` are those of the one before."""
        before, self.generation = self.generation, self.generation + 1
        path = self.tmp_path / "state.bin"
        path.write_bytes(data)
        known = (Mark(generation=before, source="a", keep=keep),) if keep is not None else ()
        near, far = self.kit.tcp_pair()
        job = {"generation": self.generation, "known": known, **job}
        return await asyncio.gather(
            self.worker.send(near, self.kit.send_job(path, **job)),
            self.worker.receive(far, self.kit.grant_for(data)),
        )

    async def rendered(self, replica: str, data: bytes, **target: Any) -> tuple[bytes, Any]:
        out = self.tmp_path / "out.bin"
        out.unlink(missing_ok=True)
        done = await self.worker.render(replica, self.kit.target_for(data, **target), out)
        return out.read_bytes(), done


@pytest.fixture
async def pair(kit: Any, workers: Any, tmp_path: Path) -> Pair:
    return Pair(kit, await workers("b"), tmp_path)


@pytest.mark.parametrize("encrypt", [False, True])
async def test_appended_tokens_cost_their_own_bytes_and_little_more(
    kit: Any, pair: Pair, encrypt: bool
) -> None:
    n = 1000
    await pair.push(kit.make_turn(n, **SHAPE))
    for added in (1, 7, 255, 256, 257, 1000):
        data = kit.make_turn(n + added, **SHAPE)
        sent, received = await pair.push(data, keep=n, encrypt=encrypt)
        assert sent.kept == received.kept == n
        assert sent.raw_bytes == added * (TOKEN_BYTES + 4)
        assert sent.wire_bytes <= 1.03 * added * TOKEN_BYTES + 64 * 1024
        n += added
        made, done = await pair.rendered(received.replica, data)
        assert made == data and done.n_tokens == n


async def test_a_session_that_shrinks_forks_and_grows_again_stays_right_and_cheap(
    kit: Any, pair: Pair
) -> None:
    turns: list[tuple[int, tuple[tuple[int, int], ...], int]] = [
        (900, ((0, 1),), 0),
        (1300, ((0, 1), (850, 2)), 850),  # the last answer was edited
        (1000, ((0, 1), (850, 2)), 1000),  # cut back
        (1000, ((0, 1), (850, 2)), 1000),  # the same again
        (1100, ((0, 1), (300, 3)), 300),  # compacted early on
        (1101, ((0, 1), (300, 3)), 1100),
        (400, ((0, 4),), 0),  # something else altogether
    ]
    held = 0
    for n, branches, keep in turns:
        data = kit.make_turn(n, branches, **SHAPE)
        sent, received = await pair.push(data, keep=keep)
        assert sent.kept == min(keep, held, n)
        assert sent.raw_bytes == (n - sent.kept) * (TOKEN_BYTES + 4)
        made, _ = await pair.rendered(received.replica, data)
        assert made == data
        held = n
    assert (await pair.worker.store_stats()).replicas == 1


async def test_a_mark_never_keeps_rows_of_other_tokens(kit: Any, pair: Pair) -> None:
    await pair.push(kit.make_turn(700, **SHAPE))
    data = kit.make_turn(900, ((0, 1), (321, 2)), **SHAPE)
    sent, received = await pair.push(data, keep=700)  # a watermark that forgot the edit
    assert sent.kept == 321
    assert (await pair.rendered(received.replica, data))[0] == data


async def test_without_a_lineage_only_groups_that_differ_travel(kit: Any, pair: Pair) -> None:
    await pair.push(kit.make_turn(1000, **SHAPE))
    same = kit.make_turn(1200, **SHAPE)
    sent, received = await pair.push(same)
    assert 1000 - 256 < sent.kept <= 1000
    assert (await pair.rendered(received.replica, same))[0] == same
    anew = kit.make_turn(1300, seed_rows=9, **SHAPE)  # the same tokens, read anew by another engine
    sent, received = await pair.push(anew)
    assert sent.kept == 0
    assert (await pair.rendered(received.replica, anew))[0] == anew


async def test_a_false_lineage_is_noticed_where_it_is_looked_at_and_nothing_is_kept(
    kit: Any, pair: Pair
) -> None:
    await pair.push(kit.make_turn(1000, **SHAPE))
    lie = kit.make_turn(1100, seed_rows=9, **SHAPE)
    with pytest.raises(KvError) as caught:
        await pair.push(lie, keep=1000)
    assert caught.value.reason == "corrupt"
    while (stats := await pair.worker.store_stats()).incoming:
        await asyncio.sleep(0.01)
    assert (stats.replicas, stats.unfinished, stats.replica_bytes) == (0, 0, 0)
    sent, received = await pair.push(lie)
    assert sent.kept == 0
    assert (await pair.rendered(received.replica, lie))[0] == lie


@pytest.mark.parametrize("source_trans", [False, True])
@pytest.mark.parametrize("target_trans", [False, True])
async def test_values_are_turned_for_an_engine_that_keeps_them_the_other_way(
    kit: Any, pair: Pair, source_trans: bool, target_trans: bool
) -> None:
    shape = {"n_layer": 3, "row": 64}
    await pair.push(kit.make_turn(300, v_trans=source_trans, **shape))
    data = kit.make_turn(700, v_trans=source_trans, n_stream=2, stream=1, **shape)
    _, received = await pair.push(data, keep=300)
    made, _ = await pair.rendered(received.replica, data, v_trans=target_trans, n_stream=4, slot=3)
    assert made == kit.make_turn(700, v_trans=target_trans, n_stream=4, stream=3, **shape)


@pytest.mark.parametrize("v_trans", [False, True])
async def test_a_prefix_can_be_rendered(kit: Any, pair: Pair, v_trans: bool) -> None:
    shape = {"n_layer": 3, "row": 64}
    data = kit.make_turn(700, **shape)
    _, received = await pair.push(data)
    out = pair.tmp_path / "cut.bin"
    target = kit.target_for(data, v_trans=v_trans)
    done = await pair.worker.render(received.replica, target, out, at_most=301)
    assert done.n_tokens == 301
    assert out.read_bytes() == kit.make_turn(301, v_trans=v_trans, **shape)


async def test_a_save_of_this_node_is_kept_and_comes_home(kit: Any, pair: Pair) -> None:
    path = pair.tmp_path / "own.bin"
    path.write_bytes(kit.make_turn(500, **SHAPE))
    first = await pair.worker.keep(kit.state_file(path, generation=1))
    data = kit.make_turn(600, **SHAPE)
    path.write_bytes(data)
    known = (Mark(generation=1, source="a", keep=500),)
    second = await pair.worker.keep(kit.state_file(path, generation=2, known=known))
    assert second.kept == 500 and second.dropped == (first.replica,)
    assert second.raw_bytes == 100 * (TOKEN_BYTES + 4)
    assert (await pair.rendered(second.replica, data))[0] == data


async def test_rows_that_repeat_travel_compressed_and_noise_travels_as_it_is(kit: Any, pair: Pair) -> None:
    noise = kit.make_turn(500, **SHAPE)
    sent, _ = await pair.push(noise, compress="on")
    assert sent.wire_bytes >= sent.raw_bytes
    calm = bytearray(kit.make_turn(900, **SHAPE))
    info = kit.info_of(bytes(calm))
    for offset in info.caches[0].data:
        calm[offset : offset + 900 * ROW] = bytes(range(0, 256, 2)) * (900 * ROW // 128)
    sent, received = await pair.push(bytes(calm), compress="on")
    assert sent.wire_bytes < sent.raw_bytes / 4
    assert (await pair.rendered(received.replica, bytes(calm)))[0] == bytes(calm)
