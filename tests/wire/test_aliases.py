from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.aliases import Entry, Write, entry_of, merged, setting_bytes
from viiwork.errors import BadAliases, RequestError
from viiwork.limits import (
    ALIAS_FILE_MAX_BYTES,
    ALIAS_MESSAGE_MAX_BYTES,
    ALIAS_NAMES_MAX,
    ALIAS_SETTING_MAX_BYTES,
    ALIAS_SETTINGS_MAX,
    ALIAS_VER_MAX,
)
from viiwork.wire.aliases import (
    decode_message,
    decode_put,
    decode_table,
    digest,
    encode_pieces,
    encode_table,
    encode_write,
    written,
)

names = st.text("abzAZ09._-", min_size=1, max_size=64)
models = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
writes = st.builds(
    Write,
    st.integers(0, ALIAS_VER_MAX),
    st.integers(0, ALIAS_VER_MAX),
    st.sampled_from(["a", "b", "node-1.lan"]),
    models | st.just(""),
    st.just(()),
)
tables = st.dictionaries(names, st.lists(writes, min_size=1, max_size=14).map(entry_of), max_size=6)
GOOD = {"target": "m", "fallbacks": ["n"], "ver": 1, "ts": 1, "by": "a", "deleted": False}


def table_of(**entry) -> bytes:
    return json.dumps({"v": 1, "aliases": {"x": {**GOOD, **entry}}}).encode()


@given(tables)
def test_a_table_survives_its_way_through_a_file_or_a_message(table):
    assert decode_table(encode_table(table)) == table
    pieces = [decode_message(piece) for piece in encode_pieces(table)]
    together: dict[str, Entry] = {}
    for piece in pieces:
        together = dict(merged(together, piece))
    assert together == table


@given(tables, tables)
def test_digests_are_equal_exactly_when_tables_are(a, b):
    assert (digest(a) == digest(b)) == (a == b)
    assert digest(dict(reversed(a.items()))) == digest(a)


def test_the_table_has_the_shape_that_clients_know():
    table = {
        "x": entry_of([Write(2, 20, "b", "m2", ("m3",)), Write(1, 10, "a", "m1")]),
        "gone": Entry(Write(3, 30, "c")),
    }
    assert json.loads(encode_table(table)) == {
        "v": 1,
        "aliases": {
            "gone": {"target": "", "fallbacks": [], "ver": 3, "ts": 30, "by": "c", "deleted": True},
            "x": {
                "target": "m2",
                "fallbacks": ["m3"],
                "ver": 2,
                "ts": 20,
                "by": "b",
                "deleted": False,
                "history": [{"target": "m1", "fallbacks": [], "ts": 10, "by": "a", "ver": 1}],
            },
        },
    }


def test_a_history_without_versions_is_older_than_what_counts():
    old = {"target": "m1", "fallbacks": [], "ts": 99, "by": "a"}
    entry = decode_table(table_of(history=[old]))["x"]
    assert [w.target for w in entry.writes] == ["m", "m1"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no alias table"),
        (b"[]", "no alias table"),
        (b'{"aliases":{}}', "no alias table"),
        (b'{"v":1}', "no alias table"),
        (b'{"v":2,"aliases":"a newer shape"}', "of version 2, and this viiwork knows version 1"),
        (b"\xff\xfe", "no alias table"),
        (b'{"v":1,"aliases":' + b'{"x":' * 5000, "no alias table"),
        (table_of(target=""), "'x' has no target"),
        (table_of(ver=ALIAS_VER_MAX + 1), "no alias table"),
        (table_of(ver=-1), "no alias table"),
        (table_of(ver=1.5), "no alias table"),
        (table_of(ts=1e300), "no alias table"),
        (table_of(by=""), "no node's name"),
        (table_of(by="a\x1b[2J"), "no node's name"),
        (table_of(target="a\x1b[2J"), "characters that are not visible"),
        (table_of(target="a b"), "characters that are not visible"),
        (table_of(target="\ud800"), "no alias table"),
        (table_of(fallbacks=["m"]), "names a model twice"),
        (table_of(fallbacks=[""]), "the name is|name is empty"),
        (table_of(fallbacks=None), "no alias table"),
        (table_of(fallbacks=[f"{i:04}" for i in range(200)]), f"more than {ALIAS_SETTING_MAX_BYTES} bytes"),
        (table_of(history=[{"target": "", "fallbacks": [], "ts": 1, "by": "a"}]), "without a target"),
        (table_of(history=[GOOD] * (ALIAS_SETTINGS_MAX + 1)), "no alias table"),
        (json.dumps({"v": 1, "aliases": {"a b": GOOD}}).encode(), "the alias name 'a b'"),
        (json.dumps({"v": 1, "aliases": {"x" * 65: GOOD}}).encode(), "the alias name"),
        (
            json.dumps({"v": 1, "aliases": {str(i): GOOD for i in range(ALIAS_NAMES_MAX + 1)}}).encode(),
            "no alias table",
        ),
    ],
)
def test_what_a_hostile_member_or_a_broken_file_says_is_refused_in_one_line(data, why):
    with pytest.raises(BadAliases, match=why) as caught:
        decode_table(data)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_refused(data):
    try:
        decode_message(data)
    except BadAliases:
        return


def test_a_removal_carries_no_target():
    assert decode_table(table_of(deleted=True))["x"] == Entry(Write(1, 1, "a"))


def test_the_largest_write_fits_into_a_datagram_and_the_largest_table_into_pieces():
    target, fallback = "é" * 150, '"' * 150 + "m" * 94
    assert setting_bytes(target, [fallback]) == ALIAS_SETTING_MAX_BYTES
    write = Write(ALIAS_VER_MAX, ALIAS_VER_MAX, "n" * 64, target, (fallback,))
    assert 900 < len(encode_write("x" * 64, Entry(write))) <= 1000
    olds = [write._replace(ver=ALIAS_VER_MAX - i, target=f"{i:02}" + "é" * 149) for i in range(1, 11)]
    table = {f"{i:064}": entry_of([write, *olds]) for i in range(ALIAS_NAMES_MAX)}
    pieces = list(encode_pieces(table))
    assert 40_000 < max(map(len, pieces)) <= ALIAS_MESSAGE_MAX_BYTES
    assert {name for piece in pieces for name in decode_message(piece)} == set(table)
    assert len(encode_table(table)) < ALIAS_FILE_MAX_BYTES


def test_one_write_is_told_without_its_history():
    entry = entry_of([Write(2, 20, "b", "m2"), Write(1, 10, "a", "m1")])
    assert decode_message(encode_write("x", entry)) == {"x": Entry(entry.current)}
    expected = {"target": "m2", "fallbacks": [], "ver": 2, "ts": 20, "by": "b", "deleted": False}
    assert written("x", entry) == {"name": "x", "entry": expected}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"target":1}', b'{"fallbacks":[1]}', b'{"force":"yes"}', b"\xff"]
)
def test_a_body_of_another_shape_is_told_what_was_expected(body):
    with pytest.raises(RequestError, match=r'expected \{"target"'):
        decode_put(body)


def test_the_body_of_a_put_needs_a_target_only():
    assert decode_put(b'{"target":"m"}') == decode_put(
        b'{"target":"m","fallbacks":[],"force":false,"more":1}'
    )
