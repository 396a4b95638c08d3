from __future__ import annotations

import importlib.util
import random
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.errors import SaveFileError
from viiwork.wire.whole_file import Layout, Literal, SaveInfo, Span, parse, plan_bytes, render_plan


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"viiwork_test_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
oracle = load(HERE / "whole_file_oracle.py")
saves = load(HERE.parent / "kv" / "saves.py")
make_save = saves.make_save


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


def reason_of(data: bytes, **options: Any) -> str:
    with pytest.raises(SaveFileError) as caught:
        check(data, **options)
    return caught.value.reason


def rendered(data: bytes, target: Layout) -> bytes:
    plan = render_plan(check(data), target, Reads(data))
    parts = [part.data if isinstance(part, Literal) else data[part.offset :][: part.size] for part in plan]
    out = b"".join(parts)
    assert plan_bytes(plan) == len(out)
    return out


SHAPES = [
    {},
    {"n_stream": 1, "stream": 0},
    {"n_stream": 8, "stream": 7},
    {"v_trans": True},
    {"has_v": False},
    {"type_": 8, "row": 68, "rot": 64},
    {"type_": 2, "row": 36},
    {"type_": 30, "row": 128, "n_layer": 1},
    {"n_tokens": 1},
    {"tail": saves.APPENDIX},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_facts_agree_with_the_reference_reader(shape: dict[str, Any]) -> None:
    data = make_save(**shape)
    info = check(data)
    tail = len(shape.get("tail", b""))
    (law,) = oracle.read_dense(data[: len(data) - tail])
    (stream,) = law["streams"]
    assert info.n_tokens == len(law["tokens"]) == stream["cells"]
    assert (info.n_stream, info.stream) == (law["n_stream"], stream["stream"])
    assert (info.state_offset, info.data_offset) == (law["state"], stream["data"])
    assert info.shape.v_trans == stream["v_trans"]
    assert (info.shape.n_rot_k, info.shape.n_rot_v) == stream["rot"]
    assert [(p.type, p.row_bytes) for p in info.shape.k] == stream["k"]
    assert [(p.type, p.row_bytes) for p in info.shape.v] == stream["v"]
    assert info.tokens_digest == blake3(struct.pack(f"<{info.n_tokens}i", *law["tokens"])).digest()
    assert info.max_token == max(law["tokens"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("n_stream", "slot"), [(1, 0), (1, 3), (2, 0), (2, 1), (4, 2), (256, 255)])
def test_a_rendered_file_is_what_the_target_engine_would_have_written(
    shape: dict[str, Any], n_stream: int, slot: int
) -> None:
    data = make_save(**shape)
    target = Layout(shape=check(data).shape, n_stream=n_stream, slot=slot, max_tokens=100)
    stream = slot if n_stream > 1 else 0
    wanted = make_save(**{**shape, "n_stream": n_stream, "stream": stream, "seq_id": slot, "tail": b""})
    assert rendered(data, target) == wanted


def test_a_file_for_the_same_slot_is_copied_and_not_rewritten() -> None:
    data = make_save()
    target = Layout(shape=check(data).shape, n_stream=2, slot=0, max_tokens=100)
    plan = render_plan(check(data), target, Reads(data))
    assert sum(part.size for part in plan if isinstance(part, Span)) > len(data) - 40


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": 39}, "too_long"),
        ({"n_vocab": 10}, "layout"),
        ({"slot": 4}, "layout"),
        ({"slot": -1}, "layout"),
        ({"shape": check(make_save(v_trans=True)).shape}, "layout"),
        ({"shape": check(make_save(n_layer=4)).shape}, "layout"),
        ({"shape": check(make_save(rot=64)).shape}, "layout"),
        ({"shape": check(make_save(type_=30)).shape}, "layout"),
    ],
    ids=str,
)
def test_a_target_that_cannot_hold_the_state_is_refused(change: dict[str, Any], reason: str) -> None:
    data = make_save()
    values: dict[str, Any] = {"shape": check(data).shape, "n_stream": 4, "slot": 1, "max_tokens": 100}
    with pytest.raises(SaveFileError) as caught:
        rendered(data, Layout(**{**values, **change}))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "bad_file"),
        (b"GGUF" + bytes(100), "bad_file"),
        (make_save(version=3), "not_portable"),
        (make_save(tail=b"\0"), "bad_file"),
        (make_save(tail=struct.pack("<3I", 0x504B4353, 1, 1) + bytes(16)), "bad_file"),
        (make_save(tail=struct.pack("<3I", 0x504B4353, 2, 0)), "bad_file"),
        (make_save(4, cells=0), "bad_file"),
        (make_save(4, cells=3), "bad_file"),
        (make_save(4, cells=5), "bad_file"),
        (make_save(4, positions=[0, 1, 2, 2]), "bad_file"),
        (make_save(4, positions=[1, 2, 3, 4]), "bad_file"),
        (make_save(4, positions=[0, 1, 2, -3]), "bad_file"),
        (make_save(4, seq_id=-1), "bad_file"),
        (make_save(4, tokens=[1, 2, -1, 3]), "not_portable"),
        (make_save(type_=12), "bad_file"),
        (make_save(type_=8, row=64), "bad_file"),
    ],
    ids=range(16),
)
def test_what_could_harm_an_engine_is_refused(data: bytes, reason: str) -> None:
    assert reason_of(data) == reason


def test_rows_in_another_order_than_their_positions_are_fine() -> None:
    order = list(range(40))
    random.Random(3).shuffle(order)
    assert check(make_save(positions=order)).n_tokens == 40


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    data = make_save(tokens=[5, 6, 7, 8], n_tokens=4)
    assert check(data, n_vocab=9).max_token == 8
    assert reason_of(data, n_vocab=8) == "bad_file"


def test_cells_of_two_sequences_are_refused() -> None:
    data = bytearray(make_save(4))
    meta = check(bytes(data)).meta_offset
    struct.pack_into("<i", data, meta + 12 + 8, 1)
    assert reason_of(bytes(data)) == "bad_file"


def recurrent(cells: int = 1, rows: int = 4) -> bytes:
    out = struct.pack("<I", cells) + struct.pack("<iI", 39, 0) * cells + struct.pack("<II", 0, 6)
    return out + b"".join(struct.pack("<iQ", 0, 64) + bytes(64 * cells) for _ in range(rows))


def after_tokens(data: bytes) -> bytes:
    return data[check(data).state_offset :]


def test_other_memory_kinds_are_known_and_not_moved() -> None:
    data = make_save()
    for name, whole in (
        ("swa", data + after_tokens(make_save(20, seed=2))),
        ("hybrid", data + recurrent()),
        ("hybrid-swa", data + after_tokens(make_save(20, seed=2)) + recurrent()),
        ("recurrent", data[: check(data).state_offset] + recurrent()),
    ):
        with pytest.raises(SaveFileError, match=name) as caught:
            check(whole)
        assert caught.value.reason == "not_portable"


def test_a_huge_claim_is_refused_before_anything_is_read() -> None:
    head = struct.pack("<3I", 0x67677371, 4, 0xFFFFFFFF)
    reads = Reads(head + bytes(100))
    with pytest.raises(SaveFileError):
        parse(reads, len(reads.data))
    assert reads.bytes_read == 12
    data = bytearray(make_save())
    struct.pack_into("<I", data, check(bytes(data)).state_offset + 4, 0x7FFFFFFF)
    reads = Reads(bytes(data))
    with pytest.raises(SaveFileError):
        parse(reads, len(data))
    assert reads.largest < 1000


def test_rows_are_never_read() -> None:
    data = make_save(200, n_layer=8, row=4096)
    reads = Reads(data)
    parse(reads, len(data))
    assert reads.bytes_read < len(data) / 50


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_agrees_with_the_reference_reader(data: st.DataObject) -> None:
    whole = bytearray(make_save(6, n_layer=2, row=8, n_stream=3, stream=1))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "word", "cut", "insert"]))
        at = data.draw(st.integers(0, max(0, len(whole) - 4)))
        if kind == "flip":
            whole[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "word":
            whole[at : at + 4] = struct.pack(
                "<I", data.draw(st.sampled_from([0, 1, 2, 255, 1 << 31, 2**32 - 1]))
            )
        elif kind == "cut":
            del whole[at:]
        else:
            whole[at:at] = data.draw(st.binary(max_size=24))
    mutated = bytes(whole)
    try:
        info = check(mutated)
    except SaveFileError:
        return
    (law,) = oracle.read_dense(mutated)
    assert not law["ext"]
    (stream,) = law["streams"]
    assert sorted(stream["positions"]) == list(range(info.n_tokens))
    assert len(law["tokens"]) == info.n_tokens and min(law["tokens"]) >= 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_after_a_good_header_are_an_error_or_a_state(tail: bytes) -> None:
    start = make_save(2, n_layer=1, row=2)
    data = start[: check(start).state_offset] + tail
    try:
        check(data)
    except SaveFileError as error:
        assert error.reason in ("bad_file", "not_portable")
