"""What goes to the engine, what comes back to the client, byte for byte; and what an early end looks like."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from tests.fakes.engine import CHAT_ANSWER, DONE, LAST, ROLE, Conn, FakeEngine, Seen, delta
from tests.fakes.node import FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient
from viiwork.core.turn import Usage

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": []}
STREAM = {"model": "m", "messages": [], "stream": True}


async def test_a_plain_answer_passes_unchanged_and_tells_its_token_counts():
    async with FakeEngine() as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, ASK)
            reply = await client.reply()
    assert (reply.status, reply.body) == (200, json.dumps(CHAT_ANSWER).encode())
    assert reply.value("X-Viiwork-Node") == "a"
    assert reply.value("X-Gpu-Backend") == "m/0"
    assert reply.value("X-Viiwork-Model") == "m"
    assert not reply.values("X-Viiwork-Origin") and not reply.values("X-Viiwork-Queued-Ms")
    (_, outcome) = node.outcomes[0]
    assert (outcome.result, outcome.status, outcome.usage) == ("done", 200, Usage(7, 3, 4))


async def test_a_stream_cut_at_every_byte_passes_unchanged_through_zero_and_one_forward():
    text = "北京 🌍 e\u0301"
    sent = ROLE + delta(text) + b'data: {"choices":[{"delta":{"content":"\\u4e2d"}}]}\n\n' + LAST + DONE

    async def byte_by_byte(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        for i in range(len(sent)):
            conn.chunk(sent[i : i + 1])
            await asyncio.sleep(0)
        conn.end()

    async with FakeEngine(byte_by_byte) as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
            async with serving(a, facts=FakeFacts("a")) as api_a:
                for api in (api_b, api_a):
                    async with RawClient(api.port) as client:
                        client.post(CHAT, STREAM)
                        reply = await client.reply()
                    assert hashlib.sha256(reply.body).digest() == hashlib.sha256(sent).digest()
                    assert reply.whole
    assert a.outcomes[0][1].usage == Usage(7, 3, 4)


async def test_each_piece_leaves_when_it_comes_and_the_head_before_the_body():
    more = asyncio.Event()

    async def slowly(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        for piece in (b":\n\n", ROLE, delta("x")):
            await more.wait()
            more.clear()
            conn.chunk(piece)
        conn.end()

    async with FakeEngine(slowly) as engine:
        async with serving(FakeDispatcher([route("a", engine.url)])) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            status, _ = await client.head()
            assert status == 200
            for piece in (b":\n\n", ROLE, delta("x")):
                more.set()
                assert await client.chunk() == piece
            assert await client.chunk() is None


async def test_the_slot_is_written_last_into_a_body_that_stays_as_it_was():
    body = b'{"model":"m", "x":1e-7,"big":1180591620717411303424 ,"id_slot": 5,"u":"\\u00e9\xc3\xa9" } \r\n'
    async with FakeEngine() as engine:
        async with serving(FakeDispatcher([route("a", engine.url, slot=3)])) as api:
            async with RawClient(api.port) as client:
                client.post(CHAT, body)
                assert (await client.reply()).status == 200
    assert engine.requests[0].body == body.replace(b"} \r\n", b',"id_slot":3} \r\n')
    assert engine.requests[0].json["id_slot"] == 3


async def test_a_client_cannot_choose_a_slot_where_none_was_leased():
    async with FakeEngine() as engine:
        async with serving(FakeDispatcher([route("a", engine.url, slot=None)])) as api:
            async with RawClient(api.port) as client:
                client.post(CHAT, {"model": "m", "id_slot": 2})
                await client.reply()
                client.post(CHAT, {"model": "m", "id_slot": 2, "n": 2})
                await client.reply()
    assert [seen.json["id_slot"] for seen in engine.requests] == [-1, -1]


async def test_headers_of_one_hop_of_browsers_and_of_the_mesh_do_not_pass_either_way():
    async def answer(conn: Conn, seen: Seen) -> None:
        conn.json(
            200,
            {},
            [
                "Access-Control-Allow-Origin: *",
                "Vary: Accept, Origin",
                "X-Viiwork-Node: liar",
                "Keep-Alive: timeout=5, max=100",
                "Connection: keep-alive, X-Hop",
                "X-Hop: 1",
                "Server: llama.cpp",
                "X-Custom: kept",
            ],
        )

    async with FakeEngine(answer) as engine:
        async with serving(FakeDispatcher([route("a", engine.url)])) as api, RawClient(api.port) as client:
            client.post(
                CHAT + "?beta=true&x=%2F",
                ASK,
                "Origin: http://x",
                "Access-Control-Request-Method: POST",
                "X-Viiwork-Kv-Share: off",
                "x-viiwork-secret: 1",
                "Connection: keep-alive, X-Mine",
                "X-Mine: 1",
                "TE: trailers",
                "Authorization: Bearer sk-1",
                "X-Session-Id: s1",
                "Content-Type: text/plain",
            )
            reply = await client.reply()
    seen = engine.requests[0]
    assert seen.target == CHAT + "?beta=true&x=%2F"
    assert {name for name, _ in seen.headers} == {
        "Host",
        "Authorization",
        "X-Session-Id",
        "Content-Type",
        "Content-Length",
    }
    assert reply.values("X-Viiwork-Node") == ["a"]
    assert (reply.value("Server"), reply.value("X-Custom"), reply.value("Vary")) == (
        "llama.cpp",
        "kept",
        "Accept, Origin",
    )
    names = {name.lower() for name, _ in reply.headers}
    assert not names & {"access-control-allow-origin", "keep-alive", "x-hop", "connection"}


async def test_a_forward_is_proven_names_both_nodes_and_makes_one_hop():
    async with FakeEngine() as engine:
        b = FakeDispatcher([route("b", engine.url, slot=2), route("c", "http://127.0.0.1:9", backend="")])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None, queued_s=0.25)])
            async with serving(a, facts=FakeFacts("a")) as api_a, RawClient(api_a.port) as client:
                client.post(CHAT + "?q=1", ASK, "X-Viiwork-Kv-Share: off", "X-Session-Affinity: s")
                reply = await client.reply()
    assert (reply.status, reply.values("X-Viiwork-Node"), reply.values("X-Viiwork-Origin")) == (
        200,
        ["b"],
        ["a"],
    )
    assert (reply.value("X-Gpu-Backend"), reply.value("X-Viiwork-Queued-Ms")) == ("m/0", "250")
    assert b.asks[0].forwarded_by == "a"
    assert b.asks[0].request_id == a.asks[0].request_id == reply.value("X-Viiwork-Request")
    assert b.asks[0].session == a.asks[0].session and not b.asks[0].kv_share
    assert engine.requests[0].json["id_slot"] == 2
    assert not [name for name, _ in engine.requests[0].headers if name.lower().startswith("x-viiwork")]


async def test_an_engine_error_other_than_a_refusal_goes_to_the_client_as_it_is():
    error = b'{"error":{"code":400,"type":"exceed_context_size_error"}}'

    async def too_long(conn: Conn, seen: Seen) -> None:
        conn.answer(400, error)

    async with FakeEngine(too_long) as engine:
        node = FakeDispatcher([route("a", engine.url), route("b", "http://127.0.0.1:9", backend="")])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            reply = await client.reply()
    assert (reply.status, reply.body) == (400, error)
    assert len(node.asks) == 1


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/messages/count_tokens"])
async def test_endpoints_without_a_pinnable_slot_get_their_body_untouched(path):
    body = b'{"model":"m","input":"x","encoding_format":"base64"}'
    async with FakeEngine() as engine:
        async with serving(FakeDispatcher([route("a", engine.url, slot=1)])) as api:
            async with RawClient(api.port) as client:
                client.post(path, body)
                assert (await client.reply()).status == 200
    assert engine.requests[0].body == body


async def test_comments_before_the_first_token_pass_and_are_no_content():
    async def pinging(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        for _ in range(200):
            conn.chunk(b":\n\n")
        conn.chunk(b": ping\ndata: " + delta("a")[6:])
        conn.chunk(b'data: {"choices":[{"delta":{"content":"b"}}]}\n:\n\n')
        conn.chunk(DONE)
        conn.end()

    async with FakeEngine(pinging) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            reply = await client.reply()
    assert reply.body.count(b":\n\n") == 201 and b"data: :" not in reply.body
    assert node.outcomes[0][1].ttft_s is not None


async def test_an_upgrade_or_garbage_from_the_engine_is_a_bad_gateway():
    for garbage in (b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", b"SSH-2.0-x\r\n\r\n"):

        async def odd(conn: Conn, seen: Seen, garbage: bytes = garbage) -> None:
            conn.send(garbage)

        async with FakeEngine(odd) as engine:
            node = FakeDispatcher([route("a", engine.url)])
            async with serving(node) as api, RawClient(api.port) as client:
                client.post(CHAT, ASK)
                reply = await client.reply()
        assert reply.status == 502 and reply.json["error"]["type"] == "server_error"
        assert node.results == ["unreachable"]


@pytest.mark.parametrize("hops", [0, 1])
async def test_a_large_request_and_a_large_answer_pass_whole(hops):
    big = b'{"model":"m","x":"' + b"0123456789" * 500_000 + b'"}'
    answered = b'{"y":"' + b"abcdefghij" * 500_000 + b'","usage":{"prompt_tokens":9}}'

    async def large(conn: Conn, seen: Seen) -> None:
        conn.answer(200, answered)

    async with FakeEngine(large) as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
            async with serving(a, facts=FakeFacts("a")) as api_a:
                async with RawClient((api_a if hops else api_b).port) as client:
                    for _ in range(2):
                        client.post("/v1/embeddings", big)
                        reply = await client.reply()
                        assert reply.whole and reply.body == answered
    assert [seen.body == big for seen in engine.requests] == [True, True]


async def test_an_engine_that_answers_before_it_read_everything_is_heard_and_not_used_again():
    async def impatient(conn: Conn, seen: Seen) -> None:
        conn.json(413, {"error": "too large"})

    async with FakeEngine(impatient) as engine:
        engine.parse_whole = False
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            for _ in range(2):
                client.post(CHAT, b'{"model":"m","x":"' + b"x" * 20_000_000 + b'"}')
                assert (await client.reply()).status == 413
    assert engine.n_opened == 2


async def test_answers_without_a_body_or_an_end_of_their_own_are_framed_for_the_client():
    answers = [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the close", 200, b"until the close"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
    ]

    async def odd(conn: Conn, seen: Seen) -> None:
        conn.send(answers[len(engine.requests) - 1][0])
        await conn.drain()
        conn.fin()

    async with FakeEngine(odd) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            for _, status, body in answers:
                client.post(CHAT, ASK)
                reply = await client.reply()
                assert (reply.status, reply.body, reply.whole) == (status, body, True)
    assert set(node.results) == {"done"}
