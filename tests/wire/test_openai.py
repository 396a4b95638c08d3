"""What a request says about routing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.errors import RequestError
from viiwork.wire.openai import INFERENCE_PATHS, peek, pin

CHAT = "/v1/chat/completions"
relaxed = settings(deadline=None, max_examples=60)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def key_in(headers: dict[str, str]) -> str | None:
    return peek(CHAT, headers, b'{"model":"m"}').session_key


def writable(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("path", INFERENCE_PATHS)
def test_every_path_says_whether_it_needs_a_slot_and_may_be_pinned(path):
    seen = peek(path, {}, b'{"model":"m"}')
    without = path in ("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/apply-template")
    assert seen.needs_slot != without
    pinnable = {CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/infill"}
    assert seen.pinnable == (path in pinnable)


def test_several_answers_to_one_prompt_are_not_pinned_to_one_slot():
    assert peek(CHAT, {}, b'{"model":"m","n":1}').pinnable
    assert peek(CHAT, {}, b'{"model":"m","n":null}').pinnable
    assert not peek(CHAT, {}, b'{"model":"m","n":2}').pinnable


@pytest.mark.parametrize(
    ("value", "stream"),
    [(b"true", True), (b"false", False), (b'"true"', False), (b"1", False), (b"null", False)],
)
def test_only_true_asks_for_a_stream(value, stream):
    assert peek(CHAT, {}, b'{"model":"m","stream": %b }' % value).stream is stream


def test_the_wish_to_keep_state_on_the_node_is_heard_in_any_spelling():
    assert peek(CHAT, {}, b'{"model":"m"}').kv_share
    assert not peek(CHAT, {"X-Viiwork-Kv-Share": " OFF "}, b'{"model":"m"}').kv_share
    for word in ("no", "false", "0", "of", "off, off"):
        assert not peek(CHAT, {"X-Viiwork-Kv-Share": word}, b'{"model":"m"}').kv_share
    for word in ("on", "True", "auto", ""):
        assert peek(CHAT, {"X-Viiwork-Kv-Share": word}, b'{"model":"m"}').kv_share


def test_session_keys_are_hashes_of_the_first_header_that_says_something():
    first = key_in({"X-Session-Affinity": "a", "X-Session-Id": "b"})
    assert first == key_in({"X-Session-Affinity": " a "}) == key_in({"X-Session-Id": "a"})
    assert first is not None and len(first) == 32 and int(first, 16)
    assert key_in({"X-Session-Affinity": "  ", "X-Session-Id": "b"}) == key_in({"X-Session-Id": "b"})
    assert key_in({"X-Session-Id": ""}) is None and key_in({}) is None
    assert key_in({"X-Session-Id": "\udce5"}) is not None


@relaxed
@given(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=5), st.text(min_size=1, max_size=30))
def test_the_model_read_is_the_one_any_json_reader_finds(others, model):
    body = writable({**others, "model": model})
    try:
        seen = peek(CHAT, {}, body)
    except RequestError:
        assert "\\ud" in body.decode(), "only halves of surrogate pairs are refused"
    else:
        assert seen.model == json.loads(body)["model"]


@relaxed
@given(
    st.lists(st.tuples(st.sampled_from(["model", "mod\\u0065l", "x"]), st.sampled_from("abc")), min_size=1)
)
def test_of_equal_keys_the_last_one_counts_as_for_the_engine(pairs):
    body = ("{" + ",".join(f'"{key}":"{value}"' for key, value in pairs) + "}").encode()
    expected = json.loads(body).get("model")
    if expected is None:
        with pytest.raises(RequestError):
            peek(CHAT, {}, body)
    else:
        assert peek(CHAT, {}, body).model == expected


@relaxed
@given(JSON_VALUES, st.sampled_from(["", " ", "\r\n", "\t "]), st.integers(-1, 63))
def test_a_pinned_body_is_the_old_one_with_the_slot_as_its_last_key(value, trailing, slot):
    body = writable({"model": "m", "id_slot": 99, "x": value}) + trailing.encode()
    pinned = pin(body, slot)
    assert json.loads(pinned) == {**json.loads(body), "id_slot": slot}
    assert pinned.replace(b',"id_slot":%d}' % slot, b"}") == body


@relaxed
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_a_request_error(body):
    for raw in (body, b'{"model":"m","x":' + body + b"}", b'{"model":"' + body + b'"}'):
        try:
            peek(CHAT, {}, raw)
        except RequestError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
