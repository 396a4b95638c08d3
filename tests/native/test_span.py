from __future__ import annotations

import pytest

from viiwork.native.span import offset_in


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 1), (3, 7), (9, 10)])
def test_a_view_is_found_where_it_begins(start, stop):
    whole = b"0123456789"
    assert offset_in(whole, memoryview(whole)[start:stop]) == start


def test_equal_bytes_elsewhere_are_no_view():
    whole, other = bytes(bytearray(b"0123456789")), bytes(bytearray(b"0123456789"))
    assert offset_in(whole, memoryview(other)[3:7]) == -1
    assert offset_in(memoryview(whole)[:5], memoryview(whole)[3:7]) == -1
    assert offset_in(memoryview(whole)[5:], memoryview(whole)[3:7]) == -1
    assert offset_in(b"", whole) == offset_in(whole, b"") == -1
