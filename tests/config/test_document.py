"""Files as people and accidents write them: one mapping comes out, or one line says why not."""

from __future__ import annotations

import pytest

from viiwork.config.document import Mapping, Scalar, parse_document
from viiwork.config.fault import Fault
from viiwork.limits import CONFIG_FILE_MAX_BYTES


def fault(data: bytes) -> str:
    with pytest.raises(Fault) as caught:
        parse_document(data)
    return f"{caught.value.line}: {caught.value}"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "1: expected a mapping of sections, got an empty file"),
        (b"# only a comment\n", "1: expected a mapping of sections, got an empty file"),
        (b"---\n", "2: expected a mapping of sections, got an empty document"),
        (b"null\n", "1: expected a mapping of sections, got an empty document"),
        (b"- a\n- b\n", "1: expected a mapping of sections, got a list"),
        (b"hello\n", "1: expected a mapping of sections, got hello"),
        (b"a: b\n---\nc: d\n", "2: expected one document, got a second one"),
        (b"a: b\n...\n---\nc: d\n", "3: expected one document, got a second one"),
        (b"a:\n\tb: c\n", "2: expected spaces for indentation, got a tab"),
        (b"a: b\nc: caf\xe9\n", "2: expected UTF-8 text, got the byte 0xe9 (Latin-1 or a binary file?)"),
        ("a: b\n".encode("utf-16"), "1: expected UTF-8 text, got UTF-16 text"),
        (b"a: b\nc: \x00\n", "2: expected printable text, got the character U+0000"),
        (b"a: b\nc: \x1b[2J\n", "2: expected printable text, got the character U+001B"),
        (b"a: [1, 2\n", "2: expected valid YAML, got an error: did not find expected ',' or ']'"),
        (b"a: b: c\n", "1: expected valid YAML, got an error: mapping values are not allowed"),
    ],
)
def test_what_is_no_config_file_is_refused_with_its_line(data: bytes, said: str):
    assert fault(data).startswith(said)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a: 1\nb: 2\na: 3\n", "3: a: expected each key once, got it again (first on line 1)"),
        (b"a:\n  b: 1\n  b: 1\n", "3: a.b: expected each key once"),
        (b"a: {b: {c: 1, c: 2}}\n", "1: a.b.c: expected each key once"),
        (b"a:\n- {b: 1}\n- b: 1\n  'b': 2\n", "4: a[1].b: expected each key once"),
    ],
)
def test_a_key_given_twice_is_refused_at_every_level(data: bytes, said: str):
    assert fault(data).startswith(said)


@pytest.mark.parametrize(
    "data",
    [
        b"a: !!python/object/apply:os.system ['touch /tmp/viiwork-was-here']\n",
        b"a: !!python/name:os.system\n",
        b"a: !!str 010\n",
        b"a: ! b\n",
        b"!!map {a: b}\n",
        b"%TAG ! tag:example.com,2026:\n---\na: !thing b\n",
        b"? !!str a\n: b\n",
    ],
)
def test_a_tag_is_refused_and_nothing_runs(data: bytes):
    assert "expected plain YAML without tags, got the tag" in fault(data)


def test_merge_keys_and_odd_keys_are_refused():
    assert fault(b"a: &x {b: c}\nd: {<<: *x}\n").startswith("2: d.<<: expected plain keys")
    assert fault(b"? [a]\n: b\n") == "1: expected a word as key, got a list"
    assert fault(b"a: {null: b}\n") == "1: a: expected a word as key, got null (quote it if it is a name)"
    assert fault(b"a:\n  ? # nothing\n  : b\n").startswith("2: a: expected a word as key, got nothing")


def test_a_byte_order_mark_and_windows_line_ends_are_read_over():
    document = parse_document(b"\xef\xbb\xbfa: b\r\nc: d\r\n")
    assert [(e.key, e.line, e.value) for e in document.entries] == [
        ("a", 1, Scalar("b", 1, plain=True)),
        ("c", 2, Scalar("d", 2, plain=True)),
    ]


def test_words_that_yaml_gives_a_type_stay_the_text_they_are():
    words = ("no", "on", "y", "null", "010", "0808", "1_000", "12:30:00", "1e3", "3.10", "2026-11-30", ".inf")
    document = parse_document("".join(f"{word}x: {word}\n" for word in words).encode())
    assert [e.value for e in document.entries] == [
        Scalar(word, i, plain=True) for i, word in enumerate(words, 1)
    ]


def test_an_alias_stands_for_what_its_anchor_holds():
    document = parse_document(b"a: &x [1, 2]\nb: *x\n")
    assert document.entries[0].value == document.entries[1].value


def test_an_alias_without_anchor_or_inside_its_own_is_refused():
    assert fault(b"a: *x\n") == "1: a: expected an anchor defined above, got the alias *x"
    assert fault(b"a: &x\n  b: *x\n") == "2: a.b: expected an anchor defined above, got the alias *x"


def test_an_alias_bomb_is_refused():
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    levels += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    assert "values, aliases written out, got more" in fault("\n".join(levels).encode())


def test_aliases_do_not_get_around_the_depth_limit():
    levels = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 30)]
    assert "expected at most 16 levels" in fault("\n".join(levels).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b"{" * 100_000,
        b"- " * 100_000,
        b"? " * 100_000,
        b"a: " + b"{a: " * 5_000,
        b'"' + b"x" * 900_000,
        b"a: *" + b"x" * 900_000,
        b"a: " + b"[]," * 300_000,
        b"a: [" + b"x," * 500_000 + b"x]",
        b"a: b\n" * 200_000,
        b"x" * (CONFIG_FILE_MAX_BYTES + 1),
    ],
    ids=range(11),
)
def test_files_made_to_exhaust_are_refused_with_little_work(data: bytes):
    assert len(fault(data)) < 200  # work that grew faster than the file would take minutes


def test_a_document_keeps_the_line_of_every_value():
    document = parse_document(b"a:\n  b:\n    - c\n    - d: e\n")
    a = document.entries[0]
    assert isinstance(a.value, Mapping)
    assert (a.line, a.value.line, a.value.entries[0].value.line) == (1, 2, 3)
