"""Which pages a list of origins lets in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.cross_origin import (
    OriginRules,
    is_loopback_host,
    is_same_place,
    parse_origin,
    parse_pattern,
)

DERIVED = OriginRules.derived(tailnet_suffix="tail1234.ts.net")


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "https://localhost:3000",
        "HTTP://LocalHost:3000",
        "http://127.0.0.1:8086",
        "http://[::1]:3000",
        "https://box.tail1234.ts.net",
        "http://a.b.tail1234.ts.net:8086",
        "http://100.64.0.1:8086",
        "http://100.127.255.254",
        "http://[fd7a:115c:a1e0::5]:8086",
    ],
)
def test_without_a_list_this_machine_and_the_own_tailnet_are_allowed(origin):
    assert DERIVED.allows(origin)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "*",
        "localhost",
        "//localhost",
        "file://localhost",
        "ftp://localhost",
        "chrome-extension://localhost",
        "ws://localhost",
        "http://localhost/",
        "http://localhost/x",
        "http://localhost:",
        "http://localhost:123456",
        "http://user@localhost",
        "http://localhost, http://localhost",
        "http://localhost http://localhost",
        " http://localhost",
        "http://localhost\x00",
        "http://localhost\n",
        "http://localhost.",
        "http://xlocalhost",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "http://127.1",
        "http://2130706433",
        "http://[::2]",
        "http://[::1",
        "http://[127.0.0.1]",
        "http://192.168.1.5",
        "http://10.0.0.1:8086",
        "http://100.128.0.1",
        "http://100.63.255.255",
        "http://[fd00::1]",
        "https://tail1234.ts.net",
        "https://xtail1234.ts.net",
        "https://box.tail9999.ts.net",
        "https://box.ts.net",
        "https://tail1234.ts.net.evil.example",
        "http://l\u043ecalhost",
        "http://\uff4cocalhost",
    ],
)
def test_every_other_origin_is_foreign(origin):
    assert not DERIVED.allows(origin)


@pytest.mark.parametrize("suffix", ["", "ts.net", "net", "*", ".", "a b", "x/y", "\x1b[2J", "a" * 400])
def test_a_suffix_that_is_not_one_tailnets_adds_nothing(suffix):
    assert OriginRules.derived(tailnet_suffix=suffix) == OriginRules.derived()


def test_a_letter_that_only_lower_case_makes_plain_is_foreign():
    assert not OriginRules.listed(["desk"]).allows("http://des\u212a")
    assert not is_same_place("http://des\u212a", "desk")


def test_tailnet_addresses_can_be_left_out():
    rules = OriginRules.derived(tailnet_ips=False)
    assert not rules.allows("http://100.64.0.1") and rules.allows("http://localhost")


def test_a_list_is_used_as_written():
    rules = OriginRules.listed(
        ["chat.example.org", "*.lan.example", "http://a.example", "b.example:81", "[fd00::5]"]
    )
    for origin in (
        "http://chat.example.org:1",
        "https://chat.example.org",
        "https://x.y.lan.example:3",
        "http://a.example",
        "http://a.example:80",
        "https://b.example:81",
        "http://[fd00:0::5]:3",
    ):
        assert rules.allows(origin), origin
    for origin in (
        "http://localhost",
        "http://100.64.0.1",
        "https://lan.example",
        "https://a.example",
        "http://a.example:81",
        "http://b.example",
    ):
        assert not rules.allows(origin), origin


def test_an_empty_list_allows_nothing():
    assert not any(OriginRules.listed([]).allows(o) for o in ("http://localhost", "http://127.0.0.1"))


@pytest.mark.parametrize(
    "entry",
    [
        *[
            "",
            " ",
            "*",
            " * ",
            "*.",
            "*.ts.net",
            "*.TS.net",
            "*.net",
            "https://*.ts.net",
            "a b",
            "ftp://x",
            "x/y",
        ],
        *[
            "http://",
            "x:",
            "x:p",
            "*x.example",
            "x.*.example",
            "null\n",
            "*.1.2.3.4",
            "*.[::1]",
            "[::g]",
            "ü.de",
        ],
        "a" * 300,
    ],
)
def test_an_entry_that_means_nothing_or_everything_is_refused(entry):
    with pytest.raises(ValueError, match=r"origin|tailnet"):
        parse_pattern(entry)


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://box:8086", "box:8086", True),
        ("http://BOX:8086", "box:8086", True),
        ("http://box", "box", True),
        ("http://box", "box:80", True),
        ("https://box", "box", True),
        ("https://box", "box:443", True),
        ("http://[fd00::5]:8086", "[fd00:0::5]:8086", True),
        ("https://box", "box:80", False),
        ("http://box:8087", "box:8086", False),
        ("http://box", "other", False),
        ("http://box", "", False),
        ("null", "null", False),
        ("http://box", "box/", False),
        ("http://box", "user@box", False),
    ],
)
def test_a_page_of_the_node_itself_is_told_by_host_and_port(origin, host, same):
    assert is_same_place(origin, host) is same


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8086", "127.0.0.1", "127.9.9.9:1", "[::1]:8086", "[::ffff:127.0.0.1]"]
)
def test_loopback_hosts_name_this_machine(host):
    assert is_loopback_host(host)


@pytest.mark.parametrize(
    "host",
    [
        *[
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.nip.io",
            "localhost:x",
            "192.168.1.5",
            "[::2]",
        ],
        *["0.0.0.0", "localhost,evil", "a@localhost", "::1"],
    ],
)
def test_other_hosts_do_not(host):
    assert not is_loopback_host(host)


@given(st.text(max_size=60))
def test_no_header_text_is_an_error(text):
    parse_origin(text)
    is_loopback_host(text)
    assert DERIVED.allows(text) in (True, False)
    assert is_same_place(text, text) in (True, False)


@given(st.from_regex(r"https?://[a-z0-9.\-:\[\]]{1,30}", fullmatch=True))
def test_what_is_allowed_is_echoed_in_a_header_and_so_is_plain(text):
    found = parse_origin(text)
    assert found is None or (text.isascii() and text.isprintable() and " " not in text)
