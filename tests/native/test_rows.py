"""The compiled row kernels and their plain twins answer alike."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.native import rows


class Twin:
    """The same contract in plain Python, a byte or an element at a time."""

    @staticmethod
    def _checked(ranges: Any, there: int) -> list[tuple[int, int]]:
        ranges = list(ranges)
        if any(offset < 0 or size < 0 or offset + size >= 1 << 63 for offset, size in ranges):
            raise ValueError("not a range")
        if sum(size for _, size in ranges) > there:
            raise ValueError("too small")
        return ranges

    @classmethod
    def gather(cls, fd: int, ranges: Any, into: Any) -> int:
        at = 0
        for offset, size in cls._checked(ranges, len(into)):
            data = os.pread(fd, size, offset)
            if len(data) < size:
                raise OSError(errno.ENODATA, "ends early")
            into[at : at + size] = data
            at += size
        return at

    @classmethod
    def scatter(cls, fd: int, data: Any, ranges: Any) -> int:
        at = 0
        for offset, size in cls._checked(ranges, len(data)):
            os.pwrite(fd, data[at : at + size], offset)
            at += size
        return at

    @staticmethod
    def _strips(offset: int, stride: int, strip: int, n: int) -> list[tuple[int, int]]:
        if n > 1 and stride < strip:
            raise ValueError("strips overlap")
        return [(offset + i * stride, strip) for i in range(n)]

    @classmethod
    def gather_strips(cls, fd: int, offset: int, stride: int, strip: int, n: int, into: Any) -> None:
        cls.gather(fd, cls._strips(offset, stride, strip, n), into)

    @classmethod
    def scatter_strips(cls, fd: int, data: Any, offset: int, stride: int, strip: int, n: int) -> None:
        cls.scatter(fd, data, cls._strips(offset, stride, strip, n))

    @staticmethod
    def transpose(
        src: Any, n_rows: int, n_columns: int, elem: int, dst: Any, src_stride: int = 0, dst_stride: int = 0
    ) -> None:
        src_stride, dst_stride = src_stride or n_columns * elem, dst_stride or n_rows * elem
        for r in range(n_rows):
            for c in range(n_columns):
                at, to = r * src_stride + c * elem, c * dst_stride + r * elem
                dst[to : to + elem] = src[at : at + elem]

    @staticmethod
    def split_planes(src: Any, dst: Any, width: int) -> None:
        dst[:] = b"".join(bytes(src[plane::width]) for plane in range(width))

    @staticmethod
    def merge_planes(src: Any, dst: Any, width: int) -> None:
        n = len(src) // width
        for plane in range(width):
            dst[plane::width] = src[plane * n : (plane + 1) * n]


COMPILED: Any = SimpleNamespace(
    **{name: getattr(rows, name) for name in dir(rows) if not name.startswith("_")}
)


@pytest.fixture(params=["compiled", "plain"])
def impl(request: pytest.FixtureRequest) -> Any:
    return COMPILED if request.param == "compiled" else Twin


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """An open file and what is in it."""
    data = os.urandom(300_001)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    yield fd, data
    os.close(fd)


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 20, 0)


RANGES = [
    [],
    [(0, 0), (7, 0)],
    [(5, 100)],
    [(0, 10), (10, 20), (30, 5)],
    [(100, 7), (50, 60), (100, 7), (300_000, 1)],
]


@pytest.mark.parametrize("ranges", RANGES, ids=str)
def test_ranges_come_together_in_the_order_given(impl: Any, file: Any, ranges: Any) -> None:
    fd, data = file
    into = bytearray(b"." * 500)
    wanted = b"".join(data[offset : offset + size] for offset, size in ranges)
    assert impl.gather(fd, ranges, into) == len(wanted)
    assert into == wanted + b"." * (500 - len(wanted))


@pytest.mark.parametrize("ranges", RANGES, ids=str)
def test_ranges_are_written_in_the_order_given(impl: Any, file: Any, ranges: Any) -> None:
    fd, before = file
    data, wanted, at = os.urandom(500), bytearray(before), 0
    for offset, size in ranges:
        wanted[offset : offset + size] = data[at : at + size]
        at += size
    assert impl.scatter(fd, data, ranges) == at
    assert content(fd) == wanted


def test_a_range_beyond_the_end_of_the_file_is_no_data(impl: Any, file: Any) -> None:
    with pytest.raises(OSError) as caught:
        impl.gather(file[0], [(0, 5), (300_000, 2)], bytearray(10))
    assert caught.value.errno == errno.ENODATA


@pytest.mark.parametrize("ranges", [[(0, 11)], [(0, 6), (0, 5)], [(-1, 2)], [(0, -1)], [((1 << 63) - 1, 2)]])
def test_ranges_that_do_not_fit_move_nothing(impl: Any, file: Any, ranges: Any) -> None:
    fd, before = file
    into = bytearray(10)
    with pytest.raises(ValueError):
        impl.gather(fd, ranges, into)
    with pytest.raises(ValueError):
        impl.scatter(fd, b"x" * 10, ranges)
    assert into == bytes(10) and content(fd) == before


@pytest.mark.parametrize("bad", [None, 3, [(1,)], [(1, 2, 3)], [1], [("0", 1)]], ids=str)
def test_what_is_no_list_of_pairs_is_refused(file: Any, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        rows.gather(file[0], bad, bytearray(10))


@pytest.mark.parametrize(
    ("offset", "stride", "strip", "n"),
    [(0, 10, 10, 5), (3, 100, 7, 64), (9, 8, 8, 1), (0, 5, 0, 3), (0, 5, 5, 0)],
)
def test_strips_are_read_and_written_back(
    impl: Any, file: Any, offset: int, stride: int, strip: int, n: int
) -> None:
    fd, before = file
    into = bytearray(strip * n)
    impl.gather_strips(fd, offset, stride, strip, n, into)
    assert into == b"".join(before[offset + i * stride :][:strip] for i in range(n))
    data, wanted = os.urandom(strip * n), bytearray(before)
    for i in range(n):
        wanted[offset + i * stride : offset + i * stride + strip] = data[i * strip : (i + 1) * strip]
    impl.scatter_strips(fd, data, offset, stride, strip, n)
    assert content(fd) == wanted


@pytest.mark.parametrize(
    ("offset", "stride", "strip", "n"),
    [(0, 4, 5, 2), (0, 5, 5, 3), (-1, 5, 5, 1), (0, -5, 5, 1), (1 << 62, 1 << 61, 1, 3), (0, 1, 1 << 62, 8)],
)
def test_strips_that_cannot_be_move_nothing(file: Any, offset: int, stride: int, strip: int, n: int) -> None:
    fd, before = file
    with pytest.raises(ValueError):
        rows.gather_strips(fd, offset, stride, strip, n, bytearray(10))
    with pytest.raises(ValueError):
        rows.scatter_strips(fd, b"x" * 10, offset, stride, strip, n)
    assert content(fd) == before


@pytest.mark.parametrize("elem", [1, 2, 4])
@pytest.mark.parametrize(
    ("n_rows", "n_columns"), [(0, 0), (0, 5), (1, 1), (1, 200), (63, 65), (64, 64), (130, 3), (129, 257)]
)
def test_transposing_twice_is_what_was_there(impl: Any, n_rows: int, n_columns: int, elem: int) -> None:
    src = random.Random(1).randbytes(n_rows * n_columns * elem)
    across, back = bytearray(len(src)), bytearray(len(src))
    impl.transpose(src, n_rows, n_columns, elem, across)
    assert [across[:elem], across[-elem:]] == [src[:elem], src[-elem:]]
    if n_rows > 1 and n_columns:
        assert across[elem : 2 * elem] == src[n_columns * elem :][:elem]
    impl.transpose(across, n_columns, n_rows, elem, back)
    assert back == src


@given(
    st.integers(0, 140), st.integers(0, 140), st.sampled_from([1, 2, 4]), st.integers(0, 9), st.integers(0, 9)
)
@settings(max_examples=60, deadline=None)
def test_strips_with_gaps_are_transposed_and_the_gaps_left_alone(
    n_rows: int, n_columns: int, elem: int, src_gap: int, dst_gap: int
) -> None:
    src_stride, dst_stride = n_columns * elem + src_gap, n_rows * elem + dst_gap
    src = random.Random(n_rows).randbytes(n_rows * src_stride)
    plain, compiled = (bytearray(b"." * (n_columns * dst_stride)) for _ in range(2))
    Twin.transpose(src, n_rows, n_columns, elem, plain, src_stride, dst_stride)
    rows.transpose(src, n_rows, n_columns, elem, compiled, src_stride, dst_stride)
    assert compiled == plain


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ((2, 3, 3), (18, 18)),
        ((2, 3, 2), (11, 12)),
        ((2, 3, 2), (12, 11)),
        ((2, 3, 2, 5), (100, 100)),
        ((2, 3, 2, 0, 3), (100, 100)),
        ((1 << 40, 1 << 40, 2), (100, 100)),
        ((3, 3, 2, 1 << 62), (100, 100)),
    ],
    ids=str,
)
def test_a_matrix_that_does_not_fit_is_refused(args: tuple[int, ...], sizes: tuple[int, int]) -> None:
    src, dst = bytes(sizes[0]), bytearray(b"." * sizes[1])
    n_rows, n_columns, elem, *strides = args
    with pytest.raises(ValueError):
        rows.transpose(src, n_rows, n_columns, elem, dst, *strides)
    assert dst == b"." * sizes[1]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 100_003])
def test_planes_split_and_merge_to_what_was_there(impl: Any, n: int, width: int) -> None:
    src = random.Random(n).randbytes(n * width)
    planes, back = bytearray(len(src)), bytearray(len(src))
    impl.split_planes(src, planes, width)
    assert planes == b"".join(src[plane::width] for plane in range(width))
    impl.merge_planes(planes, back, width)
    assert back == src


@pytest.mark.parametrize(("src", "dst", "width"), [(9, 9, 2), (8, 10, 2), (8, 8, 3), (8, 8, 0), (6, 6, 4)])
def test_what_is_not_whole_elements_has_no_planes(src: int, dst: int, width: int) -> None:
    for kernel in (rows.split_planes, rows.merge_planes):
        with pytest.raises(ValueError):
            kernel(bytes(src), bytearray(dst), width)


def test_source_and_target_may_not_overlap() -> None:
    whole = memoryview(bytearray(64))
    rows.split_planes(whole[:32], whole[32:], 2)
    with pytest.raises(ValueError, match="overlap"):
        rows.split_planes(whole[:32], whole[31:63], 2)
    with pytest.raises(ValueError, match="overlap"):
        rows.merge_planes(whole, whole, 4)
    with pytest.raises(ValueError, match="overlap"):
        rows.transpose(whole[:32], 4, 4, 2, whole[8:40])


def test_a_read_only_buffer_is_never_written(file: Any) -> None:
    with pytest.raises((BufferError, ValueError)):
        rows.gather(file[0], [(0, 3)], b"frozen")
    with pytest.raises((BufferError, ValueError)):
        rows.split_planes(bytes(4), bytes(4), 2)
