from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.errors import RequestError
from viiwork.limits import WAIT_MAX_MS
from viiwork.wire.placement import ANYWHERE, Placement, placement, wait_ms


@pytest.mark.parametrize(
    "query", ["", "beta=true", "host=", "host=mesh", "host=%20", "prefer=", "prefer=,mesh,"]
)
def test_no_wish_is_no_wish(query: str):
    assert placement(query, ()) == ANYWHERE


def test_one_host_may_be_named_and_several_preferred():
    assert placement("host=rig-1.local", ()) == Placement("rig-1.local")
    assert placement("x=1&prefer=a,b%2Cc,,mesh,%20a", ()) == Placement(None, ("a", "b", "c"))
    assert placement("host=%5Bfe80::1%5D", ()) == Placement("[fe80::1]")


def test_the_parameter_beats_the_header_and_a_host_beats_both():
    assert placement("", ("b, c", "d")) == Placement(None, ("b", "c", "d"))
    assert placement("prefer=a", ("b",)) == Placement(None, ("a",))
    assert placement("prefer=a&host=z", ("b",)) == Placement("z")


@pytest.mark.parametrize(
    ("query", "header", "expected"),
    [
        ("host=a%20b", (), r"\?host= expects names of nodes .*'a b'"),
        ("host=b%C3%BCro", (), "names of nodes"),
        ("host=" + "x" * 254, (), "longer than 253"),
        ("host=a&host=b", (), "more than once"),
        ("prefer=a,b/c", (), r"\?prefer= expects"),
        ("prefer=" + ",".join(f"n{n}" for n in range(9)), (), "names 9 hosts; 8 are the most"),
        ("", ("a b",), "X-Viiwork-Prefer expects"),
        ("host=a", ("a/b",), "X-Viiwork-Prefer expects"),
        ("host=a&prefer=" + ",".join(f"n{n}" for n in range(9)), (), "names 9 hosts"),
    ],
)
def test_a_malformed_wish_is_refused_in_one_line_that_says_where(query, header, expected):
    with pytest.raises(RequestError, match=expected) as caught:
        placement(query, header)
    assert "\n" not in str(caught.value) and caught.value.http_status == 400


@given(st.text(max_size=80), st.lists(st.text(max_size=40), max_size=3))
def test_any_query_and_header_give_a_wish_or_a_clear_refusal(query, headers):
    try:
        found = placement(query, headers)
    except RequestError as error:
        assert str(error).isprintable()
    else:
        assert found.pin is None or found.pin.isascii()
        assert len(found.prefer) <= 8 and all(name.isascii() for name in found.prefer)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("250", 250),
        (" 7 ", 7),
        ("", 0),
        ("-1", 0),
        ("1.5", 0),
        ("²", 0),
        ("9" * 15, WAIT_MAX_MS),
        ("9" * 400, 0),
    ],
)
def test_how_long_a_forward_may_wait_is_a_plain_number_of_milliseconds(value: str, expected: int):
    assert wait_ms(value) == expected
