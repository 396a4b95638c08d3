"""GGUF files: real, split, truncated, hostile."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from viiwork.errors import ModelFileError
from viiwork.host.gguf import Fingerprints, model_fingerprint, read_header, shards, weights_bytes


def write_model(path: Path, seed: int = 0, tokens: int = 100) -> Path:
    """A small well-formed model file, written by the reference library."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(tokens)])
    writer.add_array("tokenizer.ggml.scores", [float(n) for n in range(tokens)])
    random = numpy.random.default_rng(seed)
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        writer.add_tensor(name, random.standard_normal((64, 33), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf")


def test_header_of_a_real_model_is_read_to_its_end(smollm2: Path) -> None:
    with smollm2.open("rb") as file:
        header = read_header(file)
    assert (header.n_tensors, header.tensor_starts[0]) == (272, 1785664)
    assert max(header.tensor_starts) < smollm2.stat().st_size


def test_header_agrees_with_the_reference_reader(model: Path) -> None:
    reference = gguf.GGUFReader(model)
    with model.open("rb") as file:
        header = read_header(file)
    assert header.tensor_starts == tuple(int(tensor.data_offset) for tensor in reference.tensors)
    assert header.n_tensors == len(reference.tensors)


def test_header_with_another_alignment_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    for name in "ab":
        writer.add_tensor(name, numpy.ones(5, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = gguf.GGUFReader(tmp_path / "a.gguf")
    with (tmp_path / "a.gguf").open("rb") as file:
        assert read_header(file).tensor_starts == tuple(int(t.data_offset) for t in reference.tensors)


def test_fingerprint_is_that_of_the_content_and_not_of_the_place(tmp_path: Path, model: Path) -> None:
    (tmp_path / "copy").mkdir()
    copy = write_model(tmp_path / "copy" / "other-name.gguf")
    assert model_fingerprint(copy) == model_fingerprint(model)
    assert len(model_fingerprint(model)) == 32


def test_other_weights_or_another_vocabulary_make_another_fingerprint(tmp_path: Path, model: Path) -> None:
    found = {
        model_fingerprint(model),
        model_fingerprint(write_model(tmp_path / "weights.gguf", seed=1)),
        model_fingerprint(write_model(tmp_path / "vocabulary.gguf", tokens=101)),
    }
    assert len(found) == 3


def test_fingerprint_is_computed_once_for_each_version_of_a_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, computed = Fingerprints(), []

    def count(path: Path) -> str:
        computed.append(path)
        return model_fingerprint(path)

    monkeypatch.setattr("viiwork.host.gguf.model_fingerprint", count)
    first = known.fingerprint(model)
    assert known.fingerprint(model) == first and len(computed) == 1
    write_model(model, seed=5)
    assert known.fingerprint(model) != first and len(computed) == 2


def split(tmp_path: Path, count: int = 3) -> list[Path]:
    return [write_model(tmp_path / f"m-{n:05}-of-{count:05}.gguf", seed=n) for n in range(1, count + 1)]


def test_split_model_is_all_its_shards(tmp_path: Path) -> None:
    files = split(tmp_path)
    assert shards(files[0]) == files
    assert weights_bytes(files[0]) == sum(file.stat().st_size for file in files)
    before = model_fingerprint(files[0])
    write_model(files[2], seed=9)
    assert model_fingerprint(files[0]) != before


def test_a_shard_without_tensors_counts_by_its_header(tmp_path: Path) -> None:
    first, *_ = files = split(tmp_path)
    found = set()
    for name in (b"a", b"b"):
        named = struct.pack("<Q12sIQ1s", 12, b"general.name", 8, 1, name)
        first.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + named)
        found.add(model_fingerprint(files[0]))
    assert len(found) == 2


def test_shards_may_be_links_into_another_folder(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for file in split(tmp_path, 2):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(tmp_path / "blobs" / file.name)
    assert weights_bytes(tmp_path / "m-00001-of-00002.gguf") > 2 * 64 * 33 * 4


def test_missing_shard_is_named(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[1].unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf"):
        shards(files[0])


@pytest.mark.parametrize("name", ["best-of-breed.gguf", "m-1-of-2.gguf", "00001-of-00001.gguf"])
def test_names_that_only_look_split_are_one_file(tmp_path: Path, name: str) -> None:
    assert shards(write_model(tmp_path / name)) == [tmp_path / name]


@pytest.mark.parametrize("name", ["m-00000-of-00001.gguf", "m-00003-of-00002.gguf"])
def test_shard_numbered_outside_its_set_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match="numbered outside"):
        shards(write_model(tmp_path / name))


def test_directories_pipes_and_nothing_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf", tmp_path / "nothing.gguf"):
        with pytest.raises(ModelFileError):
            model_fingerprint(path)


def damaged(change: Callable[[bytearray], object]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        changed = bytearray(data)
        change(changed)
        return bytes(changed)

    return apply


def put(offset: int, form: str, value: int) -> Callable[[bytes], bytes]:
    return damaged(lambda data: struct.pack_into(form, data, offset, value))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"", "ends before byte 4"),
        (lambda data: data[:20], "ends before"),
        (lambda data: data[:300], "ends"),
        (lambda data: data[:-9000], "truncated"),
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (put(4, "<I", 1), "version 1"),
        (put(4, ">I", 3), "version"),
        (put(8, "<Q", 2**63), "claims"),
        (put(16, "<Q", 2**40), "claims"),
        (put(24, "<Q", 2**62), "a string of"),
        (put(52, "<I", 99), "unknown type 99"),
    ],
)
def test_damaged_file_is_refused_with_the_reason(
    model: Path, damage: Callable[[bytes], bytes], said: str
) -> None:
    model.write_bytes(damage(model.read_bytes()))
    with pytest.raises(ModelFileError, match=said):
        model_fingerprint(model)


def hostile(pairs: bytes, n_keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, n_keys) + pairs


@pytest.mark.parametrize(
    "pairs",
    [
        struct.pack("<Q1sIIQ", 1, b"k", 9, 0, 2**60),
        struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**40),
        struct.pack("<Q1sIIQQ", 1, b"k", 9, 8, 3, 2**63),
        struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 50,
        struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1 << 18) + bytes(1 << 19),
        struct.pack("<Q17sII", 17, b"general.alignment", 4, 3),
        struct.pack("<Q17sIB", 17, b"general.alignment", 0, 32),
    ],
    ids=[
        "huge array",
        "many strings",
        "huge string",
        "deep nesting",
        "wide nesting",
        "alignment 3",
        "u8 alignment",
    ],
)
def test_hostile_header_is_refused_in_little_memory(tmp_path: Path, pairs: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(hostile(pairs))
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError):
            model_fingerprint(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage_is_either_harmless_or_refused(
    model: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(model.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    victim = tmp_path / "victim.gguf"
    victim.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        model_fingerprint(victim)
    except ModelFileError as error:
        assert "\n" not in str(error)


def test_reader_needs_a_real_file() -> None:
    with pytest.raises(io.UnsupportedOperation):
        read_header(io.BytesIO(b"GGUF"))
