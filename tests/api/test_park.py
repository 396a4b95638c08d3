from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.api.park import Park, wanted_models
from viiwork.api.routes import ControlRoute
from viiwork.errors import RequestError


class FakeParking:
    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[str] | None, bool]] = []

    def park(self, names: Sequence[str] | None, parked: bool) -> dict[str, Any]:
        self.asked.append((names, parked))
        return {"node": "a", "models": []}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b"", None),
        (b" \r\n", None),
        (b"{}", None),
        (b'{"models": ["a", "b"]}', ["a", "b"]),
        (b'{"models": []}', []),
        (b'{"models": ["a"], "why": "test"}', ["a"]),
    ],
)
def test_nothing_means_all_and_a_list_means_its_names(body: bytes, wanted: list[str] | None):
    assert wanted_models(body) == wanted


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "x"}',
        b'{"model": ["x"]}',
        b"null",
        b"[]",
        b'["a"]',
        b'"a"',
        b"0",
        b"false",
        b'{"models": null}',
        b'{"models": "a"}',
        b'{"models": [1]}',
        b'{"models": ["a", null]}',
        b"{",
        b"\xff",
        b'{"models": ["\xff"]}',
        b"[" * 10_000,
    ],
)
def test_anything_else_is_refused_and_never_taken_for_all(body: bytes):
    with pytest.raises(RequestError, match="the body must be"):
        wanted_models(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["models", "model", "a"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_only_an_empty_object_means_all(value: Any):
    try:
        wanted = wanted_models(json.dumps(value).encode())
    except RequestError:
        return
    assert (wanted is None) == (value == {})
    assert wanted is None or wanted == value["models"]


async def test_both_routes_are_control_writes_and_say_which_way():
    parking = FakeParking()
    down, up = Park(parking).routes()
    for route, parked in ((down, True), (up, False)):
        assert isinstance(route, ControlRoute) and route.methods == ("POST",)
        answer = await route.handler(None, route.path, b'{"models": ["m"]}')  # type: ignore[arg-type]
        assert answer.status == 200 and parking.asked[-1] == (["m"], parked)
    assert (down.path, up.path) == ("/v1/models/down", "/v1/models/up")
