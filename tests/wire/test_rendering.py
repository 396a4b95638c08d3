from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.savefiles import DENSE, FORMS, HYBRID, HYBRID_SWA, RECURRENT, SWA, State, make
from tests.fakes.statestore import Store, info_of, store_of
from viiwork.errors import SaveFileError
from viiwork.wire.plan import StoreRows, StoreStrips, plan_bytes
from viiwork.wire.rendering import longest, most_useful, render_plan
from viiwork.wire.savefile import layout_of
from viiwork.wire.state import Layout, segments_of

LAYOUTS = {
    "same": {},
    "other slot": {"slot": 1},
    "one slot": {"n_stream": 1},
    "four slots": {"n_stream": 4, "slot": 3},
    "unified": {"n_stream": 1, "slot": 5},
    "the most": {"n_stream": 256, "slot": 255},
    "fa off": {"v_trans": True},
    "fa off, unified": {"v_trans": True, "n_stream": 1, "slot": 2},
}


def can_be(state: State, layout: dict[str, Any]) -> bool:
    quantised = state.type not in (0, 1, 30)
    alone = not state.attention  # has no streams, so nothing of the layout is in the file
    return not (layout.get("v_trans") and quantised) and not (alone and layout)


def target_of(state: State, **changes: Any) -> Layout:
    info = info_of(make(state))
    layout = layout_of(info, slot=state.slot, max_tokens=1000)
    return msgspec.structs.replace(layout, **{"checkpoints": 32, **changes})


PAIRS = [
    pytest.param(state, source, target, id=f"{form}: {a} to {b}")
    for form, state in FORMS.items()
    for a, source in LAYOUTS.items()
    for b, target in LAYOUTS.items()
    if can_be(state, source) and can_be(state, target) and (a == "same" or b in ("same", "fa off, unified"))
]


@pytest.mark.parametrize(("state", "source", "target"), PAIRS)
def test_a_rendered_file_is_what_the_target_engine_would_have_written(
    state: State, source: dict[str, Any], target: dict[str, Any]
) -> None:
    wanted = state.at(**target)
    assert store_of(make(state.at(**source))).render(target_of(wanted)) == make(wanted)


@pytest.mark.parametrize("state", [DENSE, DENSE.at(v_trans=True), SWA, SWA.at(v_trans=True), HYBRID])
def test_cells_in_any_order_come_out_by_position(state: State) -> None:
    # Cells of checkpoints are kept as they are; only the store sorts.
    plain = state.at(checkpoints=())
    assert store_of(make(plain.at(turn=7))).render(target_of(plain)) == make(plain)
    turned = info_of(store_of(make(state.at(turn=7))).render(target_of(state)))
    assert [point.n_tokens for point in turned.checkpoints] == list(state.checkpoints)


@pytest.mark.parametrize("state", [DENSE, DENSE.at(v_trans=True), State(type=8, row=68), State(ext=True)])
@pytest.mark.parametrize("n", [1, 17, 39, 40])
def test_a_prefix_is_the_file_of_the_shorter_session(state: State, n: int) -> None:
    assert store_of(make(state)).render(target_of(state), n) == make(state.at(n=n))


def test_a_hybrid_is_cut_only_where_its_recurrent_state_was_kept() -> None:
    state = HYBRID.at(checkpoints=())
    store = store_of(make(state.at(n=25)))
    store.add(make(state), keep=25)
    target = target_of(state)
    assert store.render(target) == make(state)
    assert store.render(target, 25) == make(state.at(n=25))
    assert reason(store, target, 24) == "not_held"
    assert [longest(store.stored, target, n) for n in (1000, 40, 39, 25, 24, 0)] == [40, 40, 25, 25, 0, 0]


def test_a_purely_recurrent_state_is_its_blob() -> None:
    store = store_of(make(RECURRENT.at(n=25)))
    store.add(make(RECURRENT), keep=25)
    assert store.render(target_of(RECURRENT), 25) == make(RECURRENT.at(n=25))


def test_a_dense_state_can_be_cut_anywhere_the_slot_holds() -> None:
    stored, target = store_of(make(DENSE)).stored, target_of(DENSE, max_tokens=30)
    assert [longest(stored, target, n) for n in (1000, 30, 29, 1, 0)] == [30, 30, 29, 1, 0]


@pytest.mark.parametrize(("keep_most", "kept"), [(0, ()), (1, (37,)), (2, (20, 37)), (9, (20, 37))])
def test_the_newest_checkpoints_are_put_in(keep_most: int, kept: tuple[int, ...]) -> None:
    out = store_of(make(SWA)).render(target_of(SWA, checkpoints=keep_most))
    assert out == make(SWA.at(checkpoints=kept))


def test_a_checkpoint_beyond_the_cut_stays_out() -> None:
    store = store_of(make(HYBRID.at(n=37, checkpoints=(12, 37))))
    store.add(make(HYBRID.at(n=37 + 3, checkpoints=())), keep=37)
    assert store.render(target_of(HYBRID), 37) == make(HYBRID.at(n=37, checkpoints=(12, 37)))


def test_rows_of_older_saves_make_the_window_deeper() -> None:
    state = SWA.at(checkpoints=())
    store = store_of(make(state.at(n=30)))
    store.add(make(state), keep=30)
    assert store.stored.rows[1].lo == 14 and store.stored.rows[1].needed == 24
    assert store.render(target_of(state)) == make(state)
    assert store.render(target_of(state, swa_rows=22)) == make(state.at(window=22))
    assert store.render(target_of(state, swa_rows=999)) == make(state.at(window=26))
    assert store.render(target_of(state, swa_rows=3)) == make(state)  # never less than the engine saved


def test_a_window_is_cut_only_where_the_rows_before_the_cut_are_held() -> None:
    state = SWA.at(checkpoints=())
    store = store_of(make(state.at(n=30)))
    store.add(make(state), keep=30)
    deep = target_of(state, swa_rows=20)
    assert store.render(deep, 35) == make(state.at(n=35, window=20))
    assert reason(store, deep, 33) == "not_held"  # rows from 14 on are held, 13 would be needed
    assert reason(store, target_of(state), 35) == "not_held"  # how many are enough is not known
    assert [longest(store.stored, deep, n) for n in (40, 39, 34, 33)] == [40, 39, 34, 0]


def test_a_window_at_the_engines_edge_gets_a_cell_of_zeros_before_it() -> None:
    state = SWA.at(checkpoints=())
    store, target = store_of(make(state)), target_of(state, swa_pad=True)
    made = store.render(target)
    window = info_of(made).caches[1]
    assert (window.lo, window.cells) == (23, 17)
    padded = store_of(made)
    values = {segment.index for segment in segments_of(target.shape) if segment.cache == 1}
    for segment in values:
        assert not any(padded.rows.pop((segment, 23)))
    assert padded.rows == store.rows


@pytest.mark.parametrize("state", [SWA.at(n=10), SWA.at(v_trans=True), DENSE, HYBRID])
def test_no_other_cache_gets_one(state: State) -> None:
    state = state.at(checkpoints=())
    assert store_of(make(state)).render(target_of(state, swa_pad=True)) == make(state)


def test_a_deeper_window_gets_none() -> None:
    state = SWA.at(checkpoints=())
    store = store_of(make(state.at(n=30)))
    store.add(make(state), keep=30)
    deep = target_of(state, swa_rows=22)
    assert store.render(msgspec.structs.replace(deep, swa_pad=True)) == store.render(deep)


def test_a_hybrid_is_rendered_whole_when_a_checkpoint_in_it_reaches_further_than_a_kept_state() -> None:
    state = HYBRID.at(checkpoints=(20, 37))
    store = store_of(make(state.at(n=25, checkpoints=(20,))))
    store.add(make(state), keep=25)
    both = target_of(state, checkpoints=2)
    assert [most_useful(store.stored, both, n) for n in (40, 39, 37)] == [40, 40, 40]
    assert [most_useful(store.stored, both, n) for n in (36, 25)] == [25, 25]  # 20 is all a checkpoint offers
    assert [most_useful(store.stored, both, n) for n in (24, 20, 19)] == [40, 40, 0]
    none = target_of(state, checkpoints=0)
    assert [most_useful(store.stored, none, n) for n in (40, 39, 25, 24)] == [40, 25, 25, 0]


def test_a_window_is_rendered_whole_when_it_is_deep_enough_for_the_engine_to_go_back_in() -> None:
    state = SWA.at(checkpoints=())
    store = store_of(make(state.at(n=30)))
    store.add(make(state), keep=30)
    deep = target_of(state, swa_rows=25)  # rows 15 to 39, of which each token looks 16 back
    assert [most_useful(store.stored, deep, n) for n in (40, 39, 32, 31)] == [40, 39, 40, 0]


def test_a_dense_state_is_rendered_as_far_as_it_is_of_use() -> None:
    stored, target = store_of(make(DENSE)).stored, target_of(DENSE, max_tokens=30)
    assert [most_useful(stored, target, n) for n in (40, 30, 29, 0)] == [30, 30, 29, 0]


def test_a_window_that_holds_everything_is_cut_anywhere() -> None:
    state = State(n=10, window=16)
    store = store_of(make(state))
    assert store.render(target_of(state), 4) == make(state.at(n=4))


@pytest.mark.parametrize("state", [SWA, HYBRID_SWA])
def test_a_window_that_moved_past_what_was_kept_leaves_no_gap(state: State) -> None:
    state = state.at(checkpoints=())
    store = store_of(make(state.at(n=12)))
    store.add(make(state), keep=12)
    assert store.stored.rows[1].lo == 24
    assert store.render(target_of(state, swa_rows=999)) == make(state)


def test_a_fork_takes_the_window_of_the_other_branch_whole() -> None:
    one, other = SWA.at(checkpoints=()), SWA.at(checkpoints=(), n=35)
    store = store_of(make(one))
    store.add(make(other), keep=30)
    assert store.stored.rows[1].lo == 19  # rows 24 to 29 were held, 19 to 23 were not
    assert store.render(target_of(other)) == make(other)


def reason(store: Store, target: Layout, n: int = 0) -> str:
    with pytest.raises(SaveFileError) as caught:
        store.render(target, n)
    return caught.value.reason


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"max_tokens": 39}, "too_long"),
        ({"n_vocab": 10}, "layout"),
        ({"slot": 2}, "layout"),
        ({"slot": -1}, "layout"),
        ({"n_stream": 1, "slot": 256}, "layout"),
        ({"shape": info_of(make(DENSE.at(n_layer=4))).shape}, "layout"),
        ({"shape": info_of(make(DENSE.at(rot=64))).shape}, "layout"),
        ({"shape": info_of(make(DENSE.at(type=30))).shape}, "layout"),
        ({"shape": info_of(make(DENSE.at(ext=True))).shape}, "layout"),
        ({"shape": info_of(make(SWA)).shape}, "layout"),
        ({"shape": info_of(make(HYBRID)).shape}, "layout"),
    ],
    ids=str,
)
def test_a_target_that_cannot_hold_the_state_is_refused(change: dict[str, Any], wanted: str) -> None:
    assert reason(store_of(make(DENSE)), target_of(DENSE, **change)) == wanted


def test_quantised_values_are_not_transposed() -> None:
    state = FORMS["q8_0"]
    assert reason(store_of(make(state)), target_of(state, v_trans=True)) == "layout"


@pytest.mark.parametrize("n", [-1, 41, 1000])
def test_tokens_that_are_not_held_are_not_rendered(n: int) -> None:
    assert reason(store_of(make(DENSE)), target_of(DENSE), n) == "not_held"


def test_a_token_list_of_another_length_is_refused() -> None:
    store, target = store_of(make(DENSE)), target_of(DENSE)
    for tokens in (b"", store.tokens[:-4], store.tokens[:-1]):
        with pytest.raises(SaveFileError):
            render_plan(store.stored, tokens, target)
    with pytest.raises(SaveFileError):
        render_plan(store.stored, struct.pack("<i", -1) * DENSE.n, target)


def test_missing_rows_are_not_rendered() -> None:
    store, target = store_of(make(SWA)), target_of(SWA)
    base, window = store.stored.rows
    for rows in (
        (msgspec.structs.replace(base, lo=1), window),
        (base, msgspec.structs.replace(window, lo=25)),
    ):
        with pytest.raises(SaveFileError, match="not held"):
            render_plan(msgspec.structs.replace(store.stored, rows=rows), store.tokens, target)


def test_rows_of_a_long_session_are_named_and_not_listed() -> None:
    # What a plan costs grows with tokens only by the token and the cell list.
    store = store_of(make(DENSE))
    n = 200_000
    stored = msgspec.structs.replace(store.stored, n_tokens=n)
    plan = render_plan(stored, bytes(4 * n), target_of(DENSE, max_tokens=n))
    assert len(plan) < 40
    assert plan_bytes(plan) == 12 + 4 * (n + 4) + 12 + 12 * n + 16 + 6 * (12 + 16 * n)


states = st.builds(
    State,
    n=st.integers(1, 30),
    window=st.sampled_from([0, 0, 4, 16]),
    recurrent=st.sampled_from([0, 0, 2]),
    ext=st.booleans(),
    n_layer=st.integers(1, 2),
    type=st.sampled_from([0, 1, 30]),
    row=st.sampled_from([4, 8]),
    n_stream=st.integers(2, 4),
    slot=st.integers(0, 1),
    v_trans=st.booleans(),
    turn=st.integers(0, 9),
)


@settings(max_examples=60, deadline=None)
@given(states, states, st.lists(st.integers(1, 30), max_size=3))
def test_what_is_rendered_reads_back_as_what_was_stored(
    state: State, other: State, earlier: list[int]
) -> None:
    """A session that grew, forked and shrank, rendered for a layout of its own."""
    first, *later = [*earlier, state.n]
    store = store_of(make(state.at(n=first)))
    for n in later:
        store.add(make(state.at(n=n)), keep=min(n, len(store.tokens) // 4))
    wanted = state.at(n_stream=other.n_stream, slot=other.slot, v_trans=other.v_trans, turn=0)
    target = target_of(wanted, swa_rows=other.n)
    out = store.render(target)
    back = store_of(out)
    assert back.tokens == store.tokens
    assert back.recurrent == {n: blob for n, blob in store.recurrent.items() if n == state.n}
    assert back.rows.items() <= store.rows.items()
    assert back.render(target) == out
    plan = render_plan(store.stored, store.tokens, target)
    for part in plan:
        if isinstance(part, StoreRows | StoreStrips):
            assert all((part.segment, pos) in store.rows for pos in range(part.pos, part.pos + part.n))
