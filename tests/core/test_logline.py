from __future__ import annotations

import errno
import os

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.logline import fault, line, parse
from viiwork.limits import LOG_VALUE_MAX_CHARS

texts = st.text(st.characters(), max_size=LOG_VALUE_MAX_CHARS)


@given(st.dictionaries(st.sampled_from(["model", "detail", "request", "node"]), texts))
def test_what_a_line_says_is_read_back_and_no_value_passes_for_a_field(values):
    text = line("request.done", **values)
    assert parse(text) == ("request.done", values, "")
    assert "\n" not in text and "\x1b" not in text


@given(texts)
def test_any_text_can_be_read(text):
    event, fields, rest = parse(text)
    assert event or (not fields and rest == text)


def test_long_values_are_cut_and_unknown_ones_left_out():
    text = line("request.done", model="m" * 10_000, ttft_ms=None, cached=0)
    assert len(text) < 2 * LOG_VALUE_MAX_CHARS and "ttft_ms" not in text and text.endswith("cached=0")


def test_free_text_after_the_fields_is_kept_apart():
    assert parse("node.failed request=ab it broke: a=b") == (
        "node.failed",
        {"request": "ab"},
        "it broke: a=b",
    )


def test_a_connection_that_failed_is_told_in_the_systems_words():
    words = os.strerror(errno.ECONNREFUSED)
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 8086)")
    where = aiohttp.client_reqrep.ConnectionKey("10.0.0.1", 8086, False, True, None, None, None)
    assert fault(aiohttp.ClientConnectorError(where, refused)) == f"10.0.0.1:8086: {words}"
    assert fault(refused) == words
    assert fault(OSError(errno.EHOSTUNREACH, "odd")) == os.strerror(errno.EHOSTUNREACH)


def test_other_faults_are_told_in_their_own_words():
    assert fault(ValueError("no")) == "no"
    assert fault(ValueError()) == "ValueError"
    assert fault(ConnectionError("gone")) == "gone"
