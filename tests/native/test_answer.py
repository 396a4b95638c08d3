"""The compiled reader of answers and its plain twin agree on every answer, wherever it is cut."""

from __future__ import annotations

import random
import re

import pytest

from viiwork.native.answer import AnswerReader

HEAD_MAX, HEADERS_MAX = 1024, 8
OK = b"HTTP/1.1 200 OK\r\n"

WHOLE = [
    (OK + b"Content-Length: 2\r\n\r\nhi", 200, b"hi"),
    (OK + b"content-length:0\r\n\r\n", 200, b""),
    (
        OK + b'Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nA;x="y"\r\n0123456789\r\n0\r\n\r\n',
        200,
        b"hi0123456789",
    ),
    (OK + b"TRANSFER-ENCODING: Chunked\r\n\r\n0 \r\nX-Trailer: 1\r\nY: 2\r\n\r\n", 200, b""),
    (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    (b"HTTP/1.1 304\r\nContent-Length: 5\r\n\r\n", 304, b""),
    (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\nA: b\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nz",
        200,
        b"z",
    ),
    (b"HTTP/1.1 101 X\r\nUpgrade: y\r\n\r\n", 101, b""),
    (b"HTTP/1.0 500 \xff\r\nContent-Length: 1\r\nConnection: x, Keep-Alive\r\n\r\na", 500, b"a"),
    (OK + b"Content-Length: 1\r\nConnection: Close\r\n\r\na", 200, b"a"),
]
FAULTY = [
    b"SSH-2.0-x\r\n\r\n",
    b"HTTP/2.0 200 OK\r\n\r\n",
    b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1 099 OK\r\n\r\n",
    b"HTTP/1.1 200 O\x00K\r\n\r\n",
    OK + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na",
    OK + b"Content-Length: +1\r\n\r\na",
    OK + b"Content-Length: \r\n\r\na",
    OK + b"Content-Length: 9999999999999999999\r\n\r\na",
    OK + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    OK + b"No colon\r\n\r\n",
    OK + b": x\r\n\r\n",
    OK + b"A : x\r\n\r\n",
    OK + b"A: x\r\n folded\r\n\r\n",
    OK + b"A: x\ny\r\n\r\n",
    OK + b"A: 1\r\n" * 9 + b"\r\n",
    OK + b"A: " + b"x" * 1024 + b"\r\n\r\n",
]
BROKEN_CHUNKS = [
    b"\r\n",
    b"g\r\n",
    b"-1\r\n",
    b"1\nx",
    b"1\rx",
    b"1\r\nxy\r\n",
    b"1\r\nx\n",
    b"0\r\n\n",
    b"0\r\nA\n",
]


class Twin:
    """The same contract for an answer that is there as a whole, in plain Python."""

    def __init__(self, data: bytes) -> None:
        self.status, self.body, self.keep_alive, self.done, self.surplus = 0, b"", False, False, False
        while True:
            head, _, data = data.partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            self.status = int(first.split(b" ")[1])
            if self.status >= 200 or self.status == 101:
                break
        fields = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines]
        self.headers = tuple(fields)
        low = {name.lower(): value for name, value in fields}
        options = {part.strip() for part in low.get(b"connection", b"").lower().split(b",")}
        self.keep_alive = b"keep-alive" in options if b"1.0" in first else b"close" not in options
        if self.status in (101, 204, 304):
            self.done = True
        elif b"transfer-encoding" in low:
            while match := re.match(rb"([0-9a-fA-F]+)[^\r]*\r\n", data):
                size, data = int(match[1], 16), data[match.end() :]
                if not size:
                    end = data.index(b"\r\n") + 2 if data.startswith(b"\r\n") else data.index(b"\r\n\r\n") + 4
                    self.done, data = True, data[end:]
                    break
                self.body += data[:size]
                data = data[size + 2 :]
        elif b"content-length" in low:
            size = int(low[b"content-length"])
            self.body, data, self.done = data[:size], data[size:], True
        else:
            self.body, data, self.keep_alive = data, b"", False
        self.surplus = bool(data)


def read(pieces: list[bytes]) -> tuple[AnswerReader, bytes]:
    reader = AnswerReader(HEAD_MAX, HEADERS_MAX)
    return reader, b"".join(map(reader.feed, pieces))


def cuts(data: bytes) -> list[list[bytes]]:
    dice = random.Random(7)
    ways = [[data], [data[i : i + 1] for i in range(len(data))]]
    ways += [[data[:i], data[i:]] for i in range(1, len(data))]
    for _ in range(20):
        at = sorted(dice.choices(range(len(data)), k=4))
        ways.append([data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)])
    return ways


@pytest.mark.parametrize(("data", "status", "body"), WHOLE)
@pytest.mark.parametrize("more", [b"", b"HTTP/1.1 408 X\r\n\r\n"])
def test_a_whole_answer_reads_alike_wherever_it_is_cut(data, status, body, more):
    twin = Twin(data + more)
    assert (twin.status, twin.body, twin.done) == (status, body, True)
    for pieces in cuts(data + more):
        reader, got = read(pieces)
        assert (reader.fault, reader.head_seen, reader.done) == ("", True, True)
        assert (reader.status, reader.headers, got) == (status, twin.headers, body)
        assert (reader.keep_alive, reader.surplus) == (twin.keep_alive, bool(more))


@pytest.mark.parametrize("data", FAULTY)
def test_what_is_not_http_or_could_mean_two_things_is_a_fault(data):
    for pieces in cuts(data):
        reader, got = read(pieces)
        assert reader.fault and not reader.done and not reader.feed_eof() and got == b""
        reader.start()
        assert reader.feed(WHOLE[0][0]) == b"" and reader.fault, "a faulty connection stays one"


@pytest.mark.parametrize("bad", BROKEN_CHUNKS)
def test_chunks_that_lose_their_framing_give_what_came_before(bad):
    for pieces in cuts(OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n" + bad):
        reader, got = read(pieces)
        assert reader.fault and got in (b"abc", b"abcx") and not reader.done


def test_extensions_and_trailers_without_end_are_a_fault():
    for endless in (b"1;", b"0\r\nA: "):
        reader, got = read([OK + b"Transfer-Encoding: chunked\r\n\r\n" + endless, *[b"x" * 100] * 11])
        assert reader.fault and got == b""


def test_a_chunk_size_no_counter_holds_is_a_fault():
    reader, _ = read([OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n"])
    assert reader.fault


def test_a_body_without_length_ends_with_the_connection_and_only_there():
    for pieces in cuts(OK + b"A: b\r\n\r\nsome"):
        reader, got = read(pieces)
        assert (got, reader.done, reader.keep_alive) == (b"some", False, False)
        assert reader.feed_eof() and reader.done


@pytest.mark.parametrize(("data", "status", "body"), WHOLE)
def test_an_answer_cut_short_is_not_whole(data, status, body):
    for end in range(len(data)):
        reader, _ = read([data[:end]])
        assert not reader.feed_eof()


def test_one_reader_reads_answer_after_answer():
    reader = AnswerReader(HEAD_MAX, HEADERS_MAX)
    for data, status, body in WHOLE:
        reader.start()
        assert not reader.head_seen and not reader.done
        assert (reader.feed(data), reader.status, reader.done) == (body, status, True)


def test_a_large_body_passes_through_in_the_pieces_it_came_in():
    body = bytes(range(256)) * 1000
    reader, got = read([OK + b"Content-Length: 256000\r\n\r\n", body[:100_000], body[100_000:]])
    assert got == body and reader.done
    framed = b"".join(
        b"%x\r\n%b\r\n" % (len(body[i : i + 999]), body[i : i + 999]) for i in range(0, 256_000, 999)
    )
    reader, got = read([OK + b"Transfer-Encoding: chunked\r\n\r\n", framed + b"0\r\n\r\n"])
    assert got == body and reader.done
