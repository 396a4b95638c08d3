"""The same kinds of input directly and through one forward: nothing may depend on the way a request took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote

import pytest

from tests.fakes.engine import DONE, Conn, FakeEngine, Seen, answer_all
from tests.fakes.node import FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient

CHAT = "/v1/chat/completions"
HOPS = pytest.mark.parametrize("hops", [0, 1])


@dataclass
class Way:
    """An engine behind b, and the port a request enters at."""

    engine: FakeEngine
    b: FakeDispatcher
    port: int


@asynccontextmanager
async def way(hops: int, script=answer_all, names: tuple[str, ...] = ("m",)) -> AsyncIterator[Way]:
    async with FakeEngine(script) as engine:
        b = FakeDispatcher([route("b", engine.url)], frozenset(names))
        async with serving(b, facts=FakeFacts("b", names)) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)], frozenset(names))
            async with serving(a, facts=FakeFacts("a", names)) as api_a:
                yield Way(engine, b, api_a.port if hops else api_b.port)


def sse(*events: str, done: bytes = DONE) -> bytes:
    return b"".join(b"data: %b\n\n" % event.encode() for event in events) + done


CHUNK = (
    '{"choices":[{"index":0,"delta":%s,"finish_reason":null}],"id":"c1","__x":1e-7,"n":18446744073709551616}'
)
STREAMS = {
    "reasoning only": (CHAT, sse(CHUNK % '{"reasoning_content":"hm","content":null}')),
    "reasoning of others": (CHAT, sse(CHUNK % '{"reasoning":"hm"}')),
    "parallel tool calls": (
        CHAT,
        sse(
            CHUNK % '{"tool_calls":[{"index":0,"id":"t1","function":{"name":"f","arguments":""}}]}',
            CHUNK % '{"tool_calls":[{"index":1,"id":"t2","function":{"name":"g","arguments":"{\\"a"}}]}',
            CHUNK % '{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}',
        ),
    ),
    "progress, then a word": (
        CHAT,
        sse('{"choices":[],"prompt_progress":{"total":10,"processed":5}}', CHUNK % '{"content":"x"}'),
    ),
    "keys in another order, spaces": (
        CHAT,
        sse('{ "id" : 1, "choices" : [ { "delta" : {"content": "x"} } ] }'),
    ),
    "text": ("/v1/completions", sse('{"choices":[{"text":"x","index":0}]}')),
    "anthropic": (
        "/v1/messages",
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n'
        b'event: ping\ndata: {"type":"ping"}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"thinking_delta","thinking":"hm"}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
    "responses": (
        "/v1/responses",
        b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'
        b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":null}}\n\n',
    ),
    "crlf": (CHAT, sse(CHUNK % '{"content":"x"}').replace(b"\n", b"\r\n")),
}


@HOPS
@pytest.mark.parametrize("name", STREAMS)
async def test_streams_of_every_dialect_pass_unchanged_and_their_first_token_counts(name, hops):
    path, sent = STREAMS[name]

    async def in_odd_pieces(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        for at in range(0, len(sent), 7):
            conn.chunk(sent[at : at + 7])
            await asyncio.sleep(0)
        conn.end()

    async with way(hops, in_odd_pieces) as on, RawClient(on.port) as client:
        client.post(path, {"model": "m", "stream": True})
        reply = await client.reply()
    assert reply.whole and reply.body == sent
    assert on.b.outcomes[0][1].ttft_s is not None


@HOPS
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","input":"x","encoding_format":"base64"}',
        b'{"model":"m" , "big":1180591620717411303424,"f":1e-7,"u":"\\u4e2d\xe4\xb8\xad"}',
        b'{"model":"x","model":"m"}',
    ],
)
async def test_bodies_reach_the_engine_as_they_were_sent(body, hops):
    async with way(hops) as on, RawClient(on.port) as client:
        client.post("/v1/embeddings", body, "Content-Type: application/x-www-form-urlencoded")
        assert (await client.reply()).status == 200
    seen = on.engine.requests[0]
    assert seen.body == body
    assert (seen.values("Content-Length"), seen.values("Content-Type")) == (
        [str(len(body))],
        ["application/json"],
    )


@HOPS
async def test_uploads_of_every_framing_work_and_end_in_one_length(hops):
    async with way(hops) as on, RawClient(on.port) as client:
        lines = (f"POST {CHAT} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", "Expect: 100-continue")
        client.send("\r\n".join(lines).encode() + b"\r\n\r\n")
        assert (await client.head())[0] == 100
        for piece in (b'{"model"', b':"m"', b"}"):
            client.send(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        client.send(b"0\r\nX-Trailer: 1\r\n\r\n")
        assert (await client.reply()).status == 200
    assert on.engine.requests[0].values("Content-Length") == [str(len(b'{"model":"m","id_slot":1}'))]
    assert not on.engine.requests[0].values("Transfer-Encoding")


@HOPS
@pytest.mark.parametrize("body", [b'{"model":"m","x":NaN}', b'{"model":"m","x":"\\ud83d"}', b"[]", b""])
async def test_what_no_engine_could_read_is_refused_where_it_enters(body, hops):
    async with way(hops) as on, RawClient(on.port) as client:
        client.post(CHAT, body)
        assert (await client.reply()).status == 400
        client.post(CHAT, {"model": "m"})
        assert (await client.reply()).status == 200
    assert len(on.engine.requests) == 1


@HOPS
@pytest.mark.parametrize(
    "name", ["a/b", "a:b", "a%2Fb", "../x", "ünï", "A", "m" * 300, "two words", "/lead", "?q"]
)
async def test_odd_names_are_listed_found_and_run(name, hops):
    async with way(hops, names=(name, "a")) as on, RawClient(on.port) as client:
        client.get(f"/v1/models/{quote(name, safe='')}")
        assert (await client.reply()).json["id"] == name
        client.post(CHAT, {"model": name})
        reply = await client.reply()
    assert reply.status == 200 and on.engine.requests[0].json["model"] == name
    assert all(value.isascii() for value in reply.values("X-Viiwork-Model"))


@HOPS
async def test_the_query_of_a_request_travels_and_is_not_needed(hops):
    async with way(hops) as on, RawClient(on.port) as client:
        for query in ("", "?beta=true", "?"):
            client.post(f"/v1/messages/count_tokens{query}", {"model": "m"})
            assert (await client.reply()).status == 200
    assert [seen.target.partition("?")[2] for seen in on.engine.requests] == ["", "beta=true", ""]


async def test_a_peer_restarted_between_two_forwards_costs_the_client_nothing():
    async with FakeEngine() as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            port = api_b.port
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
            async with serving(a, facts=FakeFacts("a")) as api_a, RawClient(api_a.port) as client:
                for _ in range(3):
                    client.post(CHAT, {"model": "m"})
                    assert (await client.reply()).status == 200
                    await api_b.server.stop(0)
                    await api_b.server.listen("127.0.0.1", port)
    assert len(engine.requests) == 3 and a.results == ["done"] * 3


async def test_a_peer_that_closes_idle_connections_at_any_moment_runs_nothing_twice():
    async def once(conn: Conn, seen: Seen) -> None:
        await answer_all(conn, seen)
        await conn.drain()
        asyncio.get_running_loop().call_later(0.002, lambda: conn.idle and conn.fin())

    async with FakeEngine(once) as peer:
        a = FakeDispatcher([route("b", peer.url, backend="", slot=None)])
        async with serving(a, facts=FakeFacts("a")) as api, RawClient(api.port) as client:
            for i in range(200):
                client.post(CHAT, {"model": "m"})
                assert (await client.reply()).status == 200
                await asyncio.sleep(0.0015 + (i % 10) * 0.0001)
    assert len(peer.requests) == 200 and set(a.results) == {"done"}


@HOPS
async def test_an_error_of_the_engine_keeps_its_status_and_words(hops):
    async def angry(conn: Conn, seen: Seen) -> None:
        conn.json(400, {"error": {"code": 400, "message": "context", "type": "exceed_context_size_error"}})

    async with way(hops, angry) as on, RawClient(on.port) as client:
        client.post(CHAT, {"model": "m", "stream": True})
        reply = await client.reply()
    assert reply.status == 400 and json.loads(reply.body)["error"]["type"] == "exceed_context_size_error"
