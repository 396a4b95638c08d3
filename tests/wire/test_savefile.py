from __future__ import annotations

import struct
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.savefiles import (
    DENSE,
    FORMS,
    HYBRID,
    RECURRENT,
    SWA,
    State,
    appended,
    attention,
    make,
    partial,
    recurrent,
    sections,
    token_frame,
)
from tests.fakes.statestore import info_of, reader, store_of
from viiwork.errors import SaveFileError
from viiwork.wire.checkpoint import check_checkpoint
from viiwork.wire.rows import RowSpan, spans_of
from viiwork.wire.savefile import check_recurrent, layout_of, parse
from viiwork.wire.state import Run, SaveInfo, segments_of


class Reads:
    """A file that counts what is read of it and refuses reads past its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.bytes_read, self.largest = data, 0, 0

    def __call__(self, offset: int, size: int) -> bytes:
        assert min(offset, size) >= 0 and offset + size <= len(self.data)
        self.bytes_read += size
        self.largest = max(self.largest, size)
        return self.data[offset : offset + size]


def check(data: bytes, **options: Any) -> SaveInfo:
    return parse(Reads(data), len(data), **options)


def reason_of(data: bytes, match: str = ".", **options: Any) -> str:
    with pytest.raises(SaveFileError, match=match) as caught:
        check(data, **options)
    assert "\n" not in str(caught.value)
    return caught.value.reason


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"n_stream": 1, "slot": 3},
    {"n_stream": 8, "slot": 7},
    {"v_trans": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_layout_is_known(form: str, layout: dict[str, Any]) -> None:
    state = FORMS[form]
    if (layout.get("v_trans") and state.type in (2, 8)) or (layout and not state.attention):
        state, layout = state.at(), {}  # the form has no such layout
    state = state.at(**layout)
    data = make(state)
    info = check(data)
    kinds = {
        (False, False): "dense",
        (True, False): "swa",
        (False, True): "hybrid",
        (True, True): "hybrid-swa",
    }
    kind = kinds[bool(state.window), bool(state.recurrent)] if state.attention else "recurrent"
    assert (info.shape.kind, info.shape.ext) == (kind, state.ext)
    assert (info.n_stream, info.stream) == (state.n_stream, state.stream)
    assert info.v_trans == state.v_trans
    packed = struct.pack(f"<{state.n}i", *state.tokens)
    assert data[info.tokens_offset :][: len(packed)] == packed
    assert (info.n_tokens, info.max_token) == (state.n, max(state.tokens))
    assert info.tokens_digest == blake3(packed).digest()
    assert tuple(point.n_tokens for point in info.checkpoints) == state.checkpoints
    assert (info.total_bytes, info.payload_bytes) == (len(data), len(make(state.at(checkpoints=()))))
    windows = [(0, state.n)] * state.attention
    windows += [(max(0, state.n - state.window), state.n)] * bool(state.window)
    assert [(rows.lo, rows.hi) for rows in info.caches] == windows
    assert store_of(data).rows == {
        (segment.index, pos): state.stuff(f"{segment.name}/{pos}", state.row)
        for segment in segments_of(info.shape)
        for pos in range(info.caches[segment.cache].lo, state.n)
    }
    if state.recurrent:
        assert info.recurrent is not None
        assert data[info.recurrent.offset :][: info.recurrent.size] == recurrent(state, state.n)


def test_equal_states_have_equal_shapes_whatever_their_layout() -> None:
    for form in ("dense", "swa", "hybrid", "hybrid-swa", "keys only"):
        shapes = {check(make(FORMS[form].at(**layout))).shape for layout in LAYOUTS}
        assert len(shapes) == 1


def test_unlike_states_have_unlike_shapes() -> None:
    shapes = [check(make(state)).shape for state in FORMS.values() if state.n == 40]
    assert len(set(shapes)) == len(shapes) - 1  # a recurrent one with checkpoints is the one without


def test_a_long_context_is_a_run_and_not_a_list() -> None:
    info = check(make(DENSE.at(n=70_000, n_layer=1, row=2)))
    assert info.caches[0].runs == (Run(0, 0, 70_000),)
    info = check(make(DENSE.at(turn=7)))
    assert info.caches[0].runs == (Run(0, 33, 7), Run(7, 0, 33))


@pytest.mark.parametrize("state", [DENSE, DENSE.at(v_trans=True), SWA, SWA.at(v_trans=True, turn=5), HYBRID])
@pytest.mark.parametrize("k", [0, 1, 24, 30, 40])
def test_two_extractions_are_one(state: State, k: int) -> None:
    data = make(state)
    info = check(data)
    for segment in segments_of(info.shape):

        def named(lo: int, hi: int, at: Any = segment) -> list[tuple[int, int]]:
            """(pos, offset of its first byte) of every row."""
            found = []
            for span in spans_of(info, at, lo, hi):
                step = at.row_bytes if isinstance(span, RowSpan) else at.elem_bytes
                found += [(span.pos + i, span.offset + i * step) for i in range(span.n)]
            return found

        assert sorted(named(0, k) + named(k, 40)) == sorted(named(0, 40))
        assert [pos for pos, _ in named(0, 40)] == list(range(info.caches[segment.cache].lo, 40))


def test_a_probe_save_tells_the_layout() -> None:
    layout = layout_of(check(make(SWA.at(v_trans=True, n_stream=4))), slot=2, max_tokens=99, n_vocab=7)
    assert (layout.n_stream, layout.slot, layout.v_trans) == (4, 2, True)
    assert (layout.max_tokens, layout.n_vocab) == (99, 7)


def with_tail(tail: bytes, state: State = DENSE) -> bytes:
    return make(state) + tail


def with_cells(n: int) -> bytes:
    """As many tokens as ever, and another number of cells."""
    return token_frame(DENSE) + attention(DENSE, "base", range(n))


def patched(state: State, at: int, value: int) -> bytes:
    data = bytearray(make(state))
    struct.pack_into("<i", data, at, value)
    return bytes(data)


META = 12 + 4 * 44 + 8  # of DENSE and FORMS of as many tokens in slot 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF" + bytes(100),
        with_tail(b"\0"),
        with_tail(struct.pack("<2I", 0x504B4353, 1)),
        with_tail(struct.pack("<3I", 0x504B4353, 1, 1)),
        with_tail(struct.pack("<3I", 0x504B4353, 1, 1 << 31)),
        with_cells(39),
        with_cells(1),
        token_frame(DENSE) + struct.pack("<3I", 2, 0, 0),
        patched(DENSE, META, 1),
        patched(DENSE, META, -1),
        patched(DENSE, META + 4, 2),
        patched(DENSE, META + 8, 1),
        patched(DENSE.at(n_stream=1, slot=3), META - 4 + 8, -1),
        patched(DENSE, META + 12 * 40 + 16, 12),
        patched(DENSE, META + 12 * 40 + 20, 17),
        patched(DENSE, 20, 41),
        patched(DENSE, 24, -5),
        make(DENSE.at(type=8, row=64)),
        token_frame(DENSE) + sections(SWA.at(n=39)),
        token_frame(HYBRID) + attention(HYBRID, "base", range(40)) + recurrent(HYBRID, 39),
        patched(HYBRID, META + 16, 5),
    ],
    ids=range(22),
)
def test_damage_is_told_in_a_line(data: bytes) -> None:
    assert reason_of(data) == "bad_file"


def damaged_checkpoints() -> list[bytes]:
    head = make(SWA.at(checkpoints=())) + struct.pack("<3I", 0x504B4353, 1, 1)
    good = partial(SWA, 20)
    return [
        head + appended(SWA, 20, buffer=buffer)
        for buffer in (
            b"",
            good[:-1],
            good + b"\0",
            b"\0" + good[1:],
            partial(SWA, 21),
            partial(SWA.at(row=8), 20),
            partial(SWA.at(rot=64), 20),
            good + recurrent(HYBRID, 20),
        )
    ]


@pytest.mark.parametrize("data", damaged_checkpoints(), ids=range(8))
def test_a_damaged_checkpoint_damages_the_file(data: bytes) -> None:
    assert reason_of(data, "checkpoint") == "bad_file"


def test_a_checkpoint_beyond_the_tokens_or_of_a_dense_model_is_damage() -> None:
    tail = struct.pack("<3I", 0x504B4353, 1, 1)
    assert (
        reason_of(make(SWA.at(checkpoints=(), n=20)) + tail + appended(SWA, 30), "checkpoint") == "bad_file"
    )
    assert reason_of(make(DENSE) + tail + appended(SWA, 30), "checkpoint") == "bad_file"


def test_of_two_checkpoints_at_one_place_the_later_one_stands() -> None:
    data = make(SWA.at(checkpoints=())) + struct.pack("<3I", 0x504B4353, 1, 2)
    first = appended(SWA, 20)
    (point,) = check(data + first + first).checkpoints
    assert point.offset == len(data) + len(first) + 24


KEYS = DENSE.at(keys_only=True)
ONE_CHECKPOINT = struct.pack("<3I", 0x504B4353, 1, 1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (make(DENSE.at(version=3)), "version 3"),
        (make(DENSE.at(media=1)), "media"),
        (token_frame(DENSE) + struct.pack("<3I", 0x34565344, 1, 0), "deepseek4"),
        (token_frame(DENSE) + sections(DENSE) + attention(DENSE, "i", range(40), True), "indexer"),
        (token_frame(KEYS) + sections(KEYS) + sections(KEYS), "indexer"),
        (token_frame(KEYS) + sections(KEYS) * 3, "indexer"),
        (make(State(recurrent=2)) + attention(DENSE, "i", range(40), True), "indexer"),
        (make(State(recurrent=2)) + attention(DENSE, "i", range(40)), "indexer"),
        (with_tail(struct.pack("<3I", 0x504B4353, 2, 0)), "version"),
        (with_tail(ONE_CHECKPOINT + appended(HYBRID, 9, draft=b"d"), HYBRID.at(checkpoints=())), "draft"),
        (patched(DENSE, 12, 5), "token list"),
        (patched(HYBRID, META + 8, 7), "media"),
    ],
    ids=range(12),
)
def test_forms_that_are_not_moved_are_named(data: bytes, why: str) -> None:
    assert reason_of(data, why) == "not_portable"


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    highest = max(DENSE.tokens)
    assert check(make(DENSE), n_vocab=highest + 1).max_token == highest
    assert reason_of(make(DENSE), n_vocab=highest) == "bad_file"


def test_a_huge_claim_is_refused_before_anything_is_read() -> None:
    reads = Reads(struct.pack("<3I", 0x67677371, 4, 0xFFFFFFFF) + bytes(100))
    with pytest.raises(SaveFileError):
        parse(reads, len(reads.data))
    assert reads.bytes_read == 12
    for at in (META - 4, META + 12 * 40 + 4, META + 12 * 40 + 20):
        reads = Reads(patched(DENSE, at, 0x7FFFFFFF))
        with pytest.raises(SaveFileError):
            parse(reads, len(reads.data))
        assert reads.largest < 1000


def test_rows_are_never_read() -> None:
    data = make(HYBRID.at(n_layer=4, row=4096, recurrent=8))
    reads = Reads(data)
    parse(reads, len(data))
    assert reads.bytes_read < len(data) / 50


def test_a_fragmented_cell_list_costs_no_more_than_its_length() -> None:
    # Every other position first: as many runs as cells, which a crafted file may claim.
    n = 70_000
    frame = token_frame(DENSE.at(n=n))
    cells = b"".join(struct.pack("<3i", pos, 1, 0) for pos in [*range(0, n, 2), *range(1, n, 2)])
    rest = struct.pack("<4I", 0, 1, 0, 0) + (struct.pack("<iQ", 1, 2) + bytes(2 * n)) * 2
    assert reason_of(frame + struct.pack("<2I", 1, n) + cells + rest, "fragmented") == "not_portable"


@pytest.mark.parametrize("size", [0, 19, 150])
def test_a_received_recurrent_state_is_checked(size: int) -> None:
    shape, blob = check(make(HYBRID)).shape, recurrent(HYBRID, 30)
    assert check_recurrent(shape, reader(blob), len(blob)) == 30
    for wrong in (blob[:size], blob + b"\0", recurrent(HYBRID.at(recurrent=3), 30)):
        with pytest.raises(SaveFileError):
            check_recurrent(shape, Reads(wrong), len(wrong))


def test_a_received_checkpoint_is_checked() -> None:
    data = make(SWA)
    info = check(data)
    tokens, point = data[info.tokens_offset :][: 4 * info.n_tokens], info.checkpoints[0]
    raw = data[point.offset :][: point.size]
    known = check_checkpoint(info.shape, reader(raw), len(raw), tokens, 20, point.pos_min, 19)
    assert known.offset == 0 and known.caches == point.caches
    for n_tokens in (0, 19, 21, 41):
        with pytest.raises(SaveFileError):
            check_checkpoint(info.shape, Reads(raw), len(raw), tokens, n_tokens, 0, n_tokens - 1)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([DENSE, SWA, HYBRID, RECURRENT, FORMS["hybrid-swa"], DENSE.at(v_trans=True)]), st.data()
)
def test_a_damaged_file_is_an_error_or_renders_to_a_sound_one(state: State, data: st.DataObject) -> None:
    whole = bytearray(make(state))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "word", "cut", "insert"]))
        at = data.draw(st.integers(0, max(0, len(whole) - 4)))
        if kind == "flip":
            whole[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "word":
            words = st.sampled_from([0, 1, 2, 255, 1 << 31, 2**32 - 1])
            whole[at : at + 4] = struct.pack("<I", data.draw(words))
        elif kind == "cut":
            del whole[at:]
        else:
            whole[at:at] = data.draw(st.binary(max_size=24))
    try:
        info = check(bytes(whole))
    except SaveFileError as error:
        assert error.reason in ("bad_file", "not_portable")
        return
    store = store_of(bytes(whole))
    again = info_of(store.render(layout_of(info, slot=0, max_tokens=100)))
    assert again.n_tokens == info.n_tokens and again.shape == info.shape
    assert not again.caches or again.caches[0].cells == again.n_tokens


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_after_a_good_token_list_are_an_error_or_a_state(tail: bytes) -> None:
    try:
        check(token_frame(State(n=2)) + tail)
    except SaveFileError as error:
        assert error.reason in ("bad_file", "not_portable")
