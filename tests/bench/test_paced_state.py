"""A simulated engine's save-files against the reader and the renderer of the node."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest
import zstandard

from tests.fakes.statestore import store_of
from viiwork.bench.paced_state import RECURRENT_BYTES, TOKEN_BYTES, PacedModel, PacedStates
from viiwork.wire.savefile import layout_of, parse

TOKENS = array("i", [(7 * at) % 1000 for at in range(600)])


def info_of(path: Path):
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return parse(lambda offset, n: os.pread(file.fileno(), n, offset), size)


@pytest.mark.parametrize("scale", [1, 8, 32, 256])
def test_states_have_the_sizes_of_the_model_divided_by_the_scale(scale: int):
    shape = PacedModel(scale).shape
    assert shape.kind == "hybrid"
    assert shape.token_bytes == TOKEN_BYTES // scale
    assert shape.recurrent is not None
    recurrent = sum(plane.row_bytes for plane in shape.recurrent.rows)
    assert recurrent == pytest.approx(RECURRENT_BYTES / scale, rel=0.001)


def test_a_save_is_read_as_the_state_it_is(tmp_path: Path):
    states = PacedStates(PacedModel(64), 4)
    size = states.save(tmp_path / "s", TOKENS, 2)
    found = info_of(tmp_path / "s")
    assert found.shape == states.shape and found.n_tokens == 600
    assert (found.n_stream, found.stream, found.total_bytes) == (4, 2, size)


def test_a_file_the_node_renders_for_another_slot_is_what_that_slot_would_have_saved(tmp_path: Path):
    states = PacedStates(PacedModel(64), 4)
    states.save(tmp_path / "s", TOKENS, 2)
    data = (tmp_path / "s").read_bytes()
    target = layout_of(info_of(tmp_path / "s"), slot=0, max_tokens=4096)
    (tmp_path / "r").write_bytes(store_of(data).render(target))
    assert states.restore(tmp_path / "r", 0) == (TOKENS, len(data))
    states.save(tmp_path / "s0", TOKENS, 0)
    assert (tmp_path / "s0").read_bytes() == (tmp_path / "r").read_bytes()


def test_rows_of_a_longer_session_begin_with_those_of_the_shorter(tmp_path: Path):
    states = PacedStates(PacedModel(64), 1)
    for name, n in (("short", 300), ("long", 600)):
        states.save(tmp_path / name, TOKENS[:n], 0)
    short, long = (store_of((tmp_path / name).read_bytes()) for name in ("short", "long"))
    assert short.rows and all(long.rows[key] == row for key, row in short.rows.items())


def test_a_restore_refuses_what_differs_in_one_byte(tmp_path: Path):
    states = PacedStates(PacedModel(256), 2)
    states.save(tmp_path / "s", TOKENS, 0)
    data = bytearray((tmp_path / "s").read_bytes())
    for at in (30, len(data) // 3, len(data) - 1):
        wrong = bytearray(data)
        wrong[at] ^= 1
        (tmp_path / "w").write_bytes(wrong)
        with pytest.raises(ValueError):
            states.restore(tmp_path / "w", 0)
    for wrong in (data[:-1], data + b"x", data[:10], b""):
        (tmp_path / "w").write_bytes(wrong)
        with pytest.raises(ValueError):
            states.restore(tmp_path / "w", 0)
    with pytest.raises(ValueError):
        states.restore(tmp_path / "s", 1)  # another slot's


def test_a_state_packs_like_a_real_one(tmp_path: Path):
    states = PacedStates(PacedModel(32), 1)
    states.save(tmp_path / "s", TOKENS, 0)
    data = (tmp_path / "s").read_bytes()[60_000:][: 1 << 20]
    planes = data[0::2] + data[1::2]
    assert 1.12 < len(planes) / len(zstandard.compress(planes, 1)) < 1.30
