"""GGUF model files: which files belong to a model, how large they are, and a name made from their content.

The header is read by a small reader of our own: the `gguf` package maps the file (a truncated one is then a
SIGBUS) and builds Python objects for every token of the vocabulary. Here values are skipped, every length is
checked against a limit before it is believed, and memory stays below one string.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from viiwork.errors import ModelFileError
from viiwork.limits import GGUF_HEADER_MAX_BYTES, GGUF_SHARDS_MAX, GGUF_STRING_MAX_BYTES, GGUF_TENSORS_MAX

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_KEYS_MAX = 65_536
_DIMS_MAX = 8
_NESTING_MAX = 4
_NESTED_MAX = 4096  # no known key nests arrays at all
_ALIGNMENT_KEY = b"general.alignment"
_DEFAULT_ALIGNMENT = 32
_WINDOW_KEY = b".attention.sliding_window"  # behind the name of the architecture
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_SAMPLE_BYTES = 4096  # of the start and of the middle of each tensor
_SAMPLES_MAX = 4096  # tensors sampled a file, evenly spread; 32 MiB read at worst


@dataclass(frozen=True, slots=True)
class Header:
    """Where a file's header ends and its tensors begin."""

    version: int
    n_tensors: int
    header_bytes: int  # metadata and tensor table, without the padding behind them
    tensor_starts: tuple[int, ...]  # absolute file offsets, in the order of the table
    window: int  # tokens its sliding layers look back, 0 = it names none


def shards(path: Path) -> list[Path]:
    """All files of the model `path` is part of, in order. Raises `ModelFileError` naming a missing one."""
    if path.is_dir():
        raise ModelFileError(f"{path} is a directory, expected a .gguf file")
    match = _SHARD.match(path.name)
    files = [path]
    if match is not None:
        count = int(match["count"])
        if not 1 <= int(match["number"]) <= count <= GGUF_SHARDS_MAX:
            raise ModelFileError(f"{path.name} is numbered outside its own set")
        files = [path.with_name(f"{match['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(f"no file {path.with_name(missing[0])}{more}")
    return files


def weights_bytes(path: Path) -> int:
    """Size of the whole model, all shards together. Raises `ModelFileError`."""
    try:
        return sum(file.stat().st_size for file in shards(path))
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from error


def read_header(file: BinaryIO, name: str = "file") -> Header:
    """Parse the header of an open file positioned at its start. Raises `ModelFileError`."""
    try:
        return _Reader(file, os.fstat(file.fileno()).st_size).header()
    except _Malformed as error:
        raise ModelFileError(f"{name} is not a usable GGUF file: {error}") from None


def sliding_window(path: Path) -> int:
    """Tokens the model's sliding layers look back, 0 = it names none. Blocks. Raises `ModelFileError`."""
    try:
        with shards(path)[0].open("rb") as file:
            return read_header(file, path.name).window
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from error


class Fingerprints:
    """Names of models by content, computed once for each version of a file. Methods block; use a thread."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[tuple[int, int, int, int], ...], str]] = {}

    def fingerprint(self, path: Path) -> str:
        """The same hex name on every machine that has the same files. Raises `ModelFileError`."""
        files = shards(path)
        try:
            versions = tuple(_version(file) for file in files)
            known = self._known.get(path)
            if known is not None and known[0] == versions:
                return known[1]
            found = model_fingerprint(path)
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror}") from error
        self._known[path] = (versions, found)
        return found


def model_fingerprint(path: Path) -> str:
    """BLAKE3 over every shard's size, header, tensor table and samples of each tensor; 32 hex digits.

    Samples, not all bytes: a 100 GB model would take minutes. It tells models, quantisations and fine-tunes
    apart; it is no defence against somebody who makes a file to deceive. Blocks. Raises `ModelFileError`.
    """
    digest = blake3(b"viiwork model fingerprint 1")
    try:
        for file in shards(path):
            with file.open("rb") as opened:
                _digest_file(digest, opened, file.name)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from error
    return digest.hexdigest(16)


def _digest_file(digest: blake3, file: BinaryIO, name: str) -> None:
    header = read_header(file, name)
    size = os.fstat(file.fileno()).st_size
    digest.update(struct.pack("<QQ", size, header.header_bytes))
    file.seek(0)
    left = header.header_bytes
    while left > 0:
        part = file.read(min(left, 1 << 20))
        if not part:
            raise ModelFileError(f"{name} became shorter while it was read")
        digest.update(part)
        left -= len(part)
    starts = sorted(header.tensor_starts)
    step = max(1, -(-len(starts) // _SAMPLES_MAX))
    ends = [*starts[1:], size]  # a shard may hold the model's facts and not one tensor
    for start, end in list(zip(starts, ends, strict=False))[::step]:
        for offset in (start, start + (end - start) // 2):
            digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, max(0, end - offset)), offset))


def _version(file: Path) -> tuple[int, int, int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


class _Malformed(Exception):
    """What is wrong with the file."""


class _Reader:
    """Walks one header. Nothing is allocated by a length the file claims before it was checked."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._end = min(size, GGUF_HEADER_MAX_BYTES)
        self._size = size
        self._at = 0
        self._alignment = _DEFAULT_ALIGNMENT
        self._window = 0

    def header(self) -> Header:
        if self._bytes(4) != MAGIC:
            raise _Malformed("it does not begin with GGUF")
        version = self._u32()
        if version not in _VERSIONS:
            raise _Malformed(f"version {version}, expected one of {_VERSIONS}")
        n_tensors, n_keys = self._u64(), self._u64()
        if n_tensors > GGUF_TENSORS_MAX or n_keys > _KEYS_MAX:
            raise _Malformed(f"it claims {n_tensors} tensors and {n_keys} keys")
        for _ in range(n_keys):
            self._pair()
        offsets = [self._tensor() for _ in range(n_tensors)]
        data = -(-self._at // self._alignment) * self._alignment
        if offsets and data + max(offsets) >= self._size:
            raise _Malformed(f"it is truncated: {self._size} bytes, a tensor begins at {data + max(offsets)}")
        return Header(version, n_tensors, self._at, tuple(data + offset for offset in offsets), self._window)

    def _pair(self) -> None:
        key = self._string()
        kind = self._u32()
        if key.endswith(_WINDOW_KEY) and kind == 4:
            self._window = self._u32()
            return
        if key != _ALIGNMENT_KEY:
            self._skip_value(kind, 0)
            return
        if kind != 4:
            raise _Malformed("its alignment is not a u32")
        self._alignment = self._u32()
        if not 1 <= self._alignment <= 1 << 20 or self._alignment & (self._alignment - 1):
            raise _Malformed(f"alignment {self._alignment}")

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self._skip(self._length())
        elif kind == _ARRAY and depth < _NESTING_MAX:
            self._skip_array(depth)
        else:
            raise _Malformed(f"a value of unknown type {kind}")

    def _skip_array(self, depth: int) -> None:
        kind, count = self._u32(), self._u64()
        if count > self._end - self._at:  # an element takes a byte at least
            raise _Malformed(f"an array claims {count} elements")
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind] * count)
        elif kind == _STRING:
            self._skip_strings(count)
        elif count > _NESTED_MAX:
            raise _Malformed(f"an array of {count} arrays")
        else:
            for _ in range(count):
                self._skip_value(kind, depth + 1)

    def _skip_strings(self, count: int) -> None:
        # The vocabulary: hundreds of thousands of short strings, so the loop keeps to locals.
        read, at, end = self._file.read, self._at, self._end
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            at += 8 + length
            if length > GGUF_STRING_MAX_BYTES or at > end:
                raise _Malformed(f"it ends, or is beyond belief, at a string of {length} bytes")
            read(length)
        self._at = at

    def _tensor(self) -> int:
        self._skip(self._length())
        n_dims = self._u32()
        if n_dims > _DIMS_MAX:
            raise _Malformed(f"a tensor of {n_dims} dimensions")
        self._skip(8 * n_dims + 4)
        return self._u64()

    def _length(self) -> int:
        length = self._u64()
        if length > GGUF_STRING_MAX_BYTES:
            raise _Malformed(f"a string of {length} bytes")
        return length

    def _string(self) -> bytes:
        return self._bytes(self._length())

    def _u32(self) -> int:
        return int.from_bytes(self._bytes(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._bytes(8), "little")

    def _bytes(self, count: int) -> bytes:
        self._advance(count)
        found = self._file.read(count)
        if len(found) != count:
            raise _Malformed(f"it ends at byte {self._at - count + len(found)}")
        return found

    def _skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(count, os.SEEK_CUR)

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > self._end:
            what = "it ends" if self._end == self._size else "its header does not end"
            raise _Malformed(f"{what} before byte {self._at}")
