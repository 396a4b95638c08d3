"""Bytes that are nearly HTTP: refused or answered, never taken apart differently, and nothing kept."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from .client import ask, judge, say
from .conftest import Running, fuzzed

CHAT = "POST /v1/chat/completions HTTP/1.1"
BODY = b'{"model":"m","messages":[]}'
JUNK = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b" ",
        b"\t",
        b":",
        b"HTTP/1.1",
        b"\xff",
        b"\x80",
        b"{",
        b"}",
        b"0\r\n\r\n",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 0x1\r\n",
        b"Content-Length: 1,1\r\n",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding: x\r\n"),
    *(b"transfer-encoding : chunked\r\n", b"Transfer-Encoding: chunked, chunked\r\n", b" folded: 1\r\n"),
    *(
        b"Host: y\r\n",
        b"Expect: 100-continue\r\n",
        b"Connection: close\r\n",
        b"ffffffffffffffff\r\n",
        b"-1\r\n",
    ),
    *(
        b"5;ext=1\r\nhello\r\n",
        b"5\nhello\n",
        b"Trailer: X\r\n",
        b"X: 1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
)


def sized(body: bytes = BODY) -> bytes:
    return f"{CHAT}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes = BODY) -> bytes:
    head = f"{CHAT}\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


WHOLE = (
    sized(),
    chunked(),
    sized(b'{"model":"m","stream":true}'),
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
    sized() + chunked() + sized(),
    b"POST /v1/kv/channel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: viiwork-kv/2\r\n"
    b"Content-Length: 2\r\n\r\n{}",
    b"POST /v1/kv/channel HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: viiwork-kv/2\r\n\r\n",
)
edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["insert", "cut", "replace", "end"]), st.sampled_from(JUNK)),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    for where, how, junk in changes:
        at = round(where * len(data))
        if how == "insert":
            data = data[:at] + junk + data[at:]
        elif how == "cut":
            data = data[:at] + data[at + len(junk) :]
        elif how == "replace":
            data = data[:at] + junk + data[at + len(junk) :]
        else:
            data = data[:at]
    return data


def test_damaged_requests_are_answered_or_refused_and_leave_nothing(running: Running):
    before = running.size()

    @fuzzed(300, "damaged")
    @given(st.sampled_from(WHOLE), edits)
    @example(sized(), [(0.0, "insert", JUNK[-2])])
    def said(data, changes):
        for answer in say(running.address, edited(data, changes)):
            judge("", "GET", answer)

    said()

    @fuzzed(100, "noise")
    @given(st.binary(max_size=300))
    def noise(data):
        for answer in say(running.address, data):
            judge("", "GET", answer)

    noise()
    running.assert_clean(before)
    assert ask(running.address, sized(), "POST").status == 200, "and it still serves"
