"""Requests as they really arrive: labels, framing, bodies nobody should have sent."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.node import Api, FakeDispatcher, route, serving
from tests.fakes.rawclient import RawClient, Reply

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[]}'
PINNED = b'{"model":"m","messages":[],"id_slot":1}'


async def exchange(api: Api, raw: bytes) -> Reply:
    async with RawClient(api.port) as client:
        client.send(raw)
        return await client.reply()


def post(*lines: str, body: bytes = BODY, version: str = "1.1", target: str = CHAT) -> bytes:
    return "\r\n".join([f"POST {target} HTTP/{version}", "Host: x", *lines]).encode() + b"\r\n\r\n" + body


@pytest.fixture
async def engine():
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def api(engine):
    async with serving(FakeDispatcher([route("a", engine.url)]), body_max_bytes=100_000) as api:
        yield api


LENGTH = f"Content-Length: {len(BODY)}"


@pytest.mark.parametrize(
    "label",
    [
        [],
        ["Content-Type: application/x-www-form-urlencoded"],
        ["Content-Type: text/plain"],
        ["Content-Type: APPLICATION/JSON"],
        ["Content-Type: application/json; charset=UTF-8"],
        ["Content-Type: application/vnd.api+json"],
        ["Accept: */*"],
    ],
)
async def test_the_model_is_found_whatever_the_content_type_says(api, engine, label):
    reply = await exchange(api, post(LENGTH, *label))
    assert reply.status == 200
    # The body was read as JSON, so the engine gets it as JSON: of a form it takes 1 MiB at most.
    types = [value for name, value in engine.requests[0].headers if name == "Content-Type"]
    assert types == ["application/json"]


async def test_multipart_and_compressed_bodies_get_a_clear_refusal(api, engine):
    multipart = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
    for lines, body in (
        (["Content-Type: multipart/form-data; boundary=x"], multipart),
        (["Content-Encoding: gzip"], b"\x1f\x8b\x08\x00"),
    ):
        reply = await exchange(api, post(f"Content-Length: {len(body)}", *lines, body=body))
        assert reply.status == 415 and reply.json["error"]["type"] == "invalid_request"
    assert not engine.requests


async def test_a_chunked_upload_with_extensions_and_trailers_reaches_the_engine_with_one_length(api, engine):
    body = b'9;ext="1"\r\n{"model":\r\n12;a\r\n"m","messages":[]}\r\n0\r\nX-Trailer: 1\r\n\r\n'
    reply = await exchange(api, post("Transfer-Encoding: chunked", "Trailer: X-Trailer", body=body))
    assert reply.status == 200
    assert engine.requests[0].body == PINNED
    assert engine.requests[0].values("Content-Length") == [str(len(PINNED))]
    assert not engine.requests[0].values("Transfer-Encoding") and not engine.requests[0].values("Trailer")


@pytest.mark.parametrize(
    "raw",
    [
        post(LENGTH, "Transfer-Encoding: chunked"),
        post("Transfer-Encoding: chunked", LENGTH, body=b"0\r\n\r\n"),
        post(LENGTH, "Content-Length: 5"),
        post(LENGTH, LENGTH + "0"),
        post(f"Content-Length: {len(BODY)}, {len(BODY) + 1}"),
        post(f"Content-Length: +{len(BODY)}"),
        post("Content-Length: -1"),
        post("Content-Length: 1_0"),
        post("Content-Length: 0x1b"),
        post("Transfer-Encoding: gzip, identity", body=b""),
        post("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
        post("Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
        post("Transfer-Encoding: chunked", body=b"zz\r\n"),
        post("Transfer-Encoding: chunked", body=b"-1\r\n{}\r\n0\r\n\r\n"),
        post("Transfer-Encoding: chunked", body=b"2\r\n{}XX0\r\n\r\n"),
        post("Content-Length : 2", body=b"{}"),
        post("X-A: 1", " folded: 1", LENGTH),
        post("X-A: 1\rX-B: 2", LENGTH),
        post("X-A: a\0b", LENGTH),
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/3.7\r\nHost: a\r\n\r\n",
        b"POST\x01 / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_ambiguous_or_broken_framing_is_refused_and_the_connection_closed(api, engine, raw):
    async with RawClient(api.port) as client:
        client.send(raw)
        reply = await client.reply()
        assert reply.status == 400
        assert reply.json["error"]["type"] == "invalid_request"
        assert await client.closed() == b""
    assert not engine.requests and not api.dispatcher.asks


@pytest.mark.parametrize("rest", [b"zz\r\n", b"2\r\n{}XX0\r\n\r\n"])
async def test_framing_that_breaks_in_a_later_packet_is_refused_at_once(api, engine, rest):
    async with RawClient(api.port) as client:
        client.send(post("Transfer-Encoding: chunked", "Expect: 100-continue", body=b""))
        assert (await client.reply()).status == 100
        client.send(rest)
        assert (await client.reply()).status == 400
        assert await client.closed() == b""
    assert not api.dispatcher.asks


async def test_a_client_that_asks_may_continue_and_one_that_sends_too_much_is_told_before(api, engine):
    async with RawClient(api.port) as client:
        client.send(post(LENGTH, "Expect: 100-continue", body=b""))
        assert (await client.reply()).status == 100
        client.send(BODY)
        assert (await client.reply()).status == 200
        client.send(post("Content-Length: 41943040", "Expect: 100-continue", body=b""))
        reply = await client.reply()
        assert reply.status == 413 and reply.value("Connection") == "close"
    assert len(engine.requests) == 1


async def test_a_body_beyond_the_cap_is_refused_also_when_it_names_no_length(api, engine):
    piece = b"x" * 50_000
    body = (b"%x\r\n%b\r\n" % (len(piece), piece)) * 3 + b"0\r\n\r\n"
    assert (await exchange(api, post("Transfer-Encoding: chunked", body=body))).status == 413
    assert not engine.requests


async def test_no_place_is_taken_before_the_body_is_complete(api, engine):
    async with RawClient(api.port) as client:
        client.send(post(LENGTH, body=b""))
        for i in range(len(BODY)):
            assert not api.dispatcher.asks
            client.send(BODY[i : i + 1])
            await asyncio.sleep(0.001)
        assert (await client.reply()).status == 200


async def test_a_body_that_stops_coming_is_given_up(engine):
    async with serving(FakeDispatcher([route("a", engine.url)]), body_silence_s=0.05) as api:
        async with RawClient(api.port) as client:
            client.send(post(LENGTH, body=BODY[:5]))
            reply = await client.reply()
            assert (reply.status, reply.value("Connection")) == (408, "close")
    assert not engine.requests


async def test_a_head_that_stops_coming_is_closed_also_on_a_used_connection(engine):
    async with serving(FakeDispatcher([route("a", engine.url)]), header_read_s=0.05) as api:
        async with RawClient(api.port) as client:
            assert await client.closed() == b""
        async with RawClient(api.port) as client:
            client.post(CHAT, BODY)
            assert (await client.reply()).status == 200
            client.send(b"POST / HT")
            assert await client.closed() == b""


async def test_an_idle_connection_is_kept_and_then_closed(engine):
    async with serving(FakeDispatcher([route("a", engine.url)]), idle_s=0.1, header_read_s=5) as api:
        async with RawClient(api.port) as client:
            for _ in range(2):
                client.post(CHAT, BODY)
                assert (await client.reply()).status == 200
            assert await client.closed() == b""


async def test_too_many_large_bodies_at_once_are_refused_and_counted_back(engine):
    node = FakeDispatcher([route("a", engine.url)], gate=asyncio.Event())
    big = b'{"model":"m","x":"' + b"x" * 50_000 + b'"}'
    async with serving(node, bodies_max_bytes=120_000) as api:
        async with RawClient(api.port) as one, RawClient(api.port) as two, RawClient(api.port) as three:
            one.post(CHAT, big)
            two.post(CHAT, big)
            await node.until(lambda: node.n_waiting == 2)
            three.post(CHAT, big)
            reply = await three.reply()
            assert reply.status == 503 and reply.value("Retry-After") == "2"
            node.gate.set()
            assert (await one.reply()).status == (await two.reply()).status == 200
            three.post(CHAT, big)
            assert (await three.reply()).status == 200


async def test_pipelined_requests_are_answered_in_order_the_bad_one_too(api, engine):
    async with RawClient(api.port) as client:
        first, bad, last = post(LENGTH), post("Content-Length: 2", body=b"[]"), post(LENGTH, target="/rerank")
        client.send(first + bad + last)
        assert [(await client.reply()).status for _ in range(3)] == [200, 400, 200]
    assert [seen.target for seen in engine.requests] == [CHAT, "/rerank"]


async def test_pipelined_requests_after_broken_framing_are_not_run(api, engine):
    async with RawClient(api.port) as client:
        client.send(post(LENGTH) + post(LENGTH, "Content-Length: 1") + post(LENGTH))
        assert [(await client.reply()).status for _ in range(2)] == [200, 400]
        assert await client.closed() == b""
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("lines", "kept"), [([], False), (["Connection: keep-alive"], True), (["Connection: close"], False)]
)
async def test_a_client_of_http_1_0_gets_an_answer_it_can_frame(api, lines, kept):
    async with RawClient(api.port) as client:
        client.send(post(LENGTH, *lines, version="1.0"))
        reply = await client.reply()
        assert reply.status == 200 and reply.value("Content-Length")
        assert (reply.value("Connection") == "keep-alive") == kept
        if not kept:
            assert await client.closed() == b""


async def test_an_absolute_target_means_its_path(api, engine):
    assert (await exchange(api, post(LENGTH, target=f"http://elsewhere:1{CHAT}?x=1"))).status == 200
    assert engine.requests[0].target == CHAT + "?x=1"


async def test_a_client_that_only_closes_its_sending_side_still_gets_what_is_answered_at_once(api):
    async with RawClient(api.port) as client:
        client.get("/health")
        client.fin()
        assert (await client.reply()).status == 200
        assert await client.closed() == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"[]",
        b'"m"',
        b"null",
        b"{}",
        b'{"messages":[]}',
        b'{"model":""}',
        b'{"model":1}',
        b'{"model":null}',
        b'{"model":["m"]}',
        b'{"model":"m",}',
        b'{"model":"m"}}',
        b'{"model":"m","x":NaN}',
        b'{"model":"m","x":-Infinity}',
        b'{"model":"m","x":"\xe5"}',
        b'{"model":"m","\xff":1}',
        b'{"model":"m","x":"\\ud83d"}',
        b'\xef\xbb\xbf{"model":"m"}',
        b'\xff\xfe{\0"\0',
        b'{"model":"m","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":"m","x":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b'{"model":"' + b"m" * 5000 + b'"}',
        b"{'model':'m'}",
    ],
)
async def test_a_body_no_engine_could_read_is_a_400_and_the_connection_goes_on(api, engine, body):
    async with RawClient(api.port) as client:
        client.post(CHAT, body)
        reply = await client.reply()
        assert reply.status == 400
        error = reply.json["error"]
        assert error["type"] == "invalid_request" and isinstance(error["message"], str)
        assert len(reply.body) < 2000
        client.post(CHAT, BODY)
        assert (await client.reply()).status == 200


@pytest.mark.parametrize("value", [b'"true"', b"1", b"null", b"[]", b"1180591620717411303424"])
async def test_odd_stream_flags_are_the_engines_business(api, engine, value):
    assert (await exchange_json(api, b'{"model":"m","stream":%b}' % value)).status == 200
    assert engine.requests[0].body == b'{"model":"m","stream":%b,"id_slot":1}' % value


async def exchange_json(api: Api, body: bytes) -> Reply:
    return await exchange(api, post(f"Content-Length: {len(body)}", body=body))


async def test_of_two_model_keys_routing_and_engine_take_the_same(api, engine):
    assert (await exchange_json(api, b'{"model":"other","mod\\u0065l":"m"}')).status == 200
    assert api.dispatcher.asks[0].model == engine.requests[0].json["model"] == "m"
    assert (await exchange_json(api, b'{"model":"m","model":"other"}')).status == 404


@pytest.mark.parametrize(
    "raw", [post("Content-Length: 5", body=b"{oops"), post("Content-Length: 2", body=b"{}")]
)
async def test_a_request_that_could_not_be_read_is_told_of_under_the_id_its_client_got(api, raw):
    reply = await exchange(api, raw)
    assert reply.status == 400
    assert api.requests.heard == [("invalid_request", reply.value("X-Viiwork-Request"))]


async def test_a_client_cannot_name_its_request():
    async with FakeEngine() as engine, serving(FakeDispatcher([route("a", engine.url)])) as api:
        await exchange(api, post(LENGTH, "X-Viiwork-Request: 0123456789abcdef"))
        assert api.dispatcher.asks[0].request_id != "0123456789abcdef"


@pytest.mark.parametrize(
    "lines",
    [
        ["X-Session-Id: "],
        ["X-Session-Id:    "],
        ["X-Session-Id: " + "s" * 10_000],
        ["X-Session-Id: \u5317\u4eac"],
        ["X-Session-Affinity: a", "X-Session-Affinity: b"],
        ["X-Session-Id: \x7f"],
        ["X-Viiwork-Kv-Share: \u00e9"],
    ],
)
async def test_odd_session_headers_never_break_a_request(api, lines):
    reply = await exchange(api, post(LENGTH, *lines))
    assert reply.status in (200, 400)
    assert reply.json


async def test_an_unknown_model_is_a_404_that_names_it_even_when_it_cannot_be_written(api):
    for name in ("nope", "ünï/\u2028", "a\\u0000b\\r\\nX: 1"):
        reply = await exchange_json(api, f'{{"model":"{name}"}}'.encode())
        assert reply.status == 404 and reply.json["error"]["type"] == "not_found"


async def test_json_of_the_engine_reaches_the_client_with_all_its_odd_fields(api, engine):
    odd = b'{"choices":[{"message":{"content":null,"reasoning_content":"r"}}],"__x":1e-7,"n":18446744073709551616}'  # noqa: E501

    async def answer(conn, seen):
        conn.answer(200, odd)

    engine.script = answer
    reply = await exchange_json(api, json.dumps({"model": "m"}).encode())
    assert reply.body == odd
