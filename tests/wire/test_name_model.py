"""The model's name is put in place of an alias, and no other byte changes."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.wire.openai import name_model, peek

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"x"}', b'{"model":"qwen"}'),
        (b' {\n  "model" : "x" ,\t"n":1}\r\n', b' {\n  "model" : "qwen" ,\t"n":1}\r\n'),
        (b'{"model":"y","model":"x"}', b'{"model":"y","model":"qwen"}'),
        (b'{"messages":[{"model":"x"}],"model":"x"}', b'{"messages":[{"model":"x"}],"model":"qwen"}'),
        (b'{"model":"x","messages":[{"model":"x"}]}', b'{"model":"qwen","messages":[{"model":"x"}]}'),
        (b'{"a":"\\"model\\":\\"x\\"","model":"x"}', b'{"a":"\\"model\\":\\"x\\"","model":"qwen"}'),
        (b'{"mod\\u0065l":"\\u0078","b":"\\u00e9"}', b'{"mod\\u0065l":"qwen","b":"\\u00e9"}'),
        (b'{"model":"y","mod\\u0065l":"x"}', b'{"model":"y","mod\\u0065l":"qwen"}'),
        ('{"user":"é€","model":"x","z":"𝄞"}'.encode(), '{"user":"é€","model":"qwen","z":"𝄞"}'.encode()),
        (b'{"Model":"y","model":"x","model ":"z"}', b'{"Model":"y","model":"qwen","model ":"z"}'),
        (b'{"n":1e400,"big":123456789012345678901234567890,"model":"x"}', None),
    ],
)
def test_only_the_value_that_counts_is_replaced(body, expected):
    assert peek(CHAT, {}, body).model == "x"
    assert name_model(body, "qwen") == (expected or body.replace(b'"x"', b'"qwen"'))


def test_a_name_that_json_must_escape_is_escaped():
    body = name_model(b'{"model":"x","n":1}', 'a"b\\c/é')
    assert json.loads(body) == {"model": 'a"b\\c/é', "n": 1} and body.endswith(b',"n":1}')


blank = st.text(" \t\r\n", max_size=2)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    scalars | texts | st.sampled_from(["x", "model"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("model"), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def objects(draw) -> tuple[str, str, str]:
    """A JSON object with a `model` somewhere: what stands before its value, the value, what stands after."""

    def encoded(value) -> str:
        return json.dumps(value, ensure_ascii=draw(st.booleans()))

    def key(name: str) -> str:
        if name == "model" and draw(st.booleans()):
            i = draw(st.integers(0, 4))
            return f'"{name[:i]}\\u{ord(name[i]):04x}{name[i + 1 :]}"'
        return encoded(name)

    def member(name: str) -> str:
        return f"{draw(blank)}{key(name)}{draw(blank)}:{draw(blank)}"

    before = [
        member(draw(texts | st.just("model"))) + encoded(draw(values)) + draw(blank)
        for _ in range(draw(st.integers(0, 3)))
    ]
    after = [
        member(draw(texts.filter(lambda t: t != "model"))) + encoded(draw(values)) + draw(blank)
        for _ in range(draw(st.integers(0, 3)))
    ]
    head = draw(blank) + "{" + "".join(f"{part}," for part in before) + member("model")
    tail = draw(blank) + "".join(f",{part}" for part in after) + "}" + draw(blank)
    return head, encoded(draw(texts)), tail


@given(objects(), texts)
def test_the_last_model_of_any_object_is_replaced_and_nothing_else(parts, model):
    head, value, tail = (part.encode() for part in parts)
    named = name_model(head + value + tail, model)
    assert named == head + msgspec.json.encode(model) + tail
    assert json.loads(named)["model"] == model
