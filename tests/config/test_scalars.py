"""Durations, sizes and numbers as people write them, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.config import scalars
from viiwork.config.model import Seconds
from viiwork.config.scalars import NotThat


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("0s", 0),
        ("60s", 60),
        ("1m30s", 90),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("1h1m1s1ms1us", 3661.001001),
        ("90m", 5400),
        ("5µs", 5e-06),
        ("1s500ms", 1.5),
        ("720h", 2592000),
    ],
)
def test_a_duration_reads_as_go_reads_it(text: str, seconds: float):
    assert scalars.parse_duration(text) == Seconds(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "60",
        "1.5",
        "-1s",
        "+1s",
        "1:30",
        "12:30:00",
        "1 s",
        "s",
        "1S",
        "1d",
        "1e3s",
        "1_0s",
        "s1",
        ".5s",
        "1.s",
        "721h",
        "0.1us",
        "9" * 400 + "s",
        "1s" * 1 + "x",
        "١s",
        "00",
    ],
)
def test_what_is_no_duration_is_refused(text: str):
    with pytest.raises(NotThat):
        scalars.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("8GiB", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
    ],
)
def test_a_size_reads_in_binary_units(text: str, n_bytes: int):
    assert scalars.parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    ["", "8GB", "8G", "8gib", "8 GiB", "-1", "0x10", "1e9", "1_000", "1.5B", "0.3KiB", "2048TiB", "9" * 400],
)
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(NotThat):
        scalars.parse_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "010",
        "-01",
        "1_000",
        "0x10",
        "0b1",
        "1e3",
        "8086.0",
        "+1",
        " 1",
        "1 ",
        "12:30",
        "--1",
        "9" * 20,
        "١",
    ],
)
def test_what_is_not_plain_digits_is_no_whole_number(text: str):
    with pytest.raises(NotThat):
        scalars.parse_integer(text)


@given(st.integers(-(10**17), 10**17))
def test_plain_digits_are_the_number_they_show(value: int):
    assert scalars.parse_integer(str(value)) == value


@given(st.integers(0, 30 * 86_400 * 1_000_000))
def test_a_printed_duration_reads_back_exactly(n_us: int):
    value = Seconds(n_us / 1_000_000)
    assert scalars.parse_duration(scalars.format_duration(value)) == value


@given(st.integers(0, 1 << 50))
def test_a_printed_size_reads_back_exactly(n_bytes: int):
    assert scalars.parse_size(scalars.format_size(n_bytes)) == n_bytes


@given(st.text(max_size=30))
def test_any_text_is_a_value_or_refused(text: str):
    for parse in (scalars.parse_integer, scalars.parse_decimal, scalars.parse_duration, scalars.parse_size):
        try:
            parse(text)
        except NotThat as error:
            assert str(error).isprintable()
