"""An answer that was cut never looks finished."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.engine import DONE, LAST, ROLE, Conn, FakeEngine, Seen, delta
from tests.fakes.node import FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient, Reply

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "stream": True}


def cut_after(data: bytes, how: str):
    async def script(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        conn.chunk(data)
        await conn.drain()
        # Far enough apart for the reset not to overtake the bytes.
        await asyncio.sleep(0.02)
        conn.reset() if how == "reset" else conn.fin()

    return script


async def streamed(script, path: str = CHAT, *, hops: int = 0) -> tuple[Reply, FakeDispatcher]:
    async with FakeEngine(script) as engine:
        node = FakeDispatcher([route("b", engine.url), route("c", engine.url, "c/0")])
        async with serving(node, facts=FakeFacts("b")) as api:
            if not hops:
                async with RawClient(api.port) as client:
                    client.post(path, STREAM)
                    reply = await client.reply()
            else:
                entry = FakeDispatcher([route("b", api.url, backend="", slot=None)])
                async with serving(entry, facts=FakeFacts("a")) as api_a, RawClient(api_a.port) as client:
                    client.post(path, STREAM)
                    reply = await client.reply()
        assert len(engine.requests) == 1, "after the first byte nothing is tried again"
    return reply, node


@pytest.mark.parametrize("how", ["reset", "fin"])
@pytest.mark.parametrize("hops", [0, 1])
async def test_a_stream_cut_between_events_ends_in_one_error_event_and_no_end_marker(how, hops):
    sent = ROLE + delta("half")
    reply, node = await streamed(cut_after(sent, how), hops=hops)
    assert not reply.whole
    assert reply.body.startswith(sent)
    assert reply.body[len(sent) :].count(b'data: {"error":{') == 1
    assert b"[DONE]" not in reply.body
    assert node.results == ["broken"]


@pytest.mark.parametrize("how", ["reset", "fin"])
async def test_a_stream_cut_inside_an_event_is_only_aborted(how):
    sent = ROLE + delta("half")[:-9]
    reply, node = await streamed(cut_after(sent, how))
    assert (reply.whole, reply.body, node.results) == (False, sent, ["broken"])


async def test_an_answer_cut_after_its_last_choice_is_still_no_whole_answer():
    sent = b'data: {"choices":[{"finish_reason":"stop","delta":{}}]}\n\n'
    reply, node = await streamed(cut_after(sent, "fin"))
    assert not reply.whole and b'"error"' in reply.body and node.results == ["broken"]


async def test_a_stream_that_said_its_end_marker_is_done_although_its_framing_is_not():
    sent = delta("all") + LAST + DONE
    reply, node = await streamed(cut_after(sent, "fin"))
    assert (reply.whole, reply.body, node.results) == (False, sent, ["done"])


async def test_a_whole_stream_without_an_end_marker_is_no_error():
    async def without(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        conn.chunk(delta("all"))
        conn.end()

    reply, node = await streamed(without)
    assert (reply.whole, reply.body, node.results) == (True, delta("all"), ["done"])


@pytest.mark.parametrize("event", [b'data: {"error":{"message":"x"}}\n\n', b'error: {"message":"x"}\n\n'])
async def test_an_error_event_of_the_engine_passes_once(event):
    reply, _ = await streamed(cut_after(event, "fin"))
    assert (reply.whole, reply.body) == (False, event)


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":'),
    ],
)
async def test_the_error_event_speaks_the_dialect_of_its_endpoint(path, start):
    sent = b'event: ping\ndata: {"type":"ping"}\n\n'
    reply, _ = await streamed(cut_after(sent, "fin"), path)
    assert reply.body.startswith(sent + start)


@pytest.mark.parametrize("how", ["reset", "fin"])
async def test_a_plain_answer_cut_short_keeps_its_length_and_comes_short(how):
    async def short(conn: Conn, seen: Seen) -> None:
        conn.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n" + b'{"a":'
        )
        await conn.drain()
        await asyncio.sleep(0.02)
        conn.reset() if how == "reset" else conn.fin()

    reply, node = await streamed(short)
    assert (reply.status, reply.whole, reply.body, node.results) == (200, False, b'{"a":', ["broken"])


async def test_a_client_of_http_1_0_sees_a_reset_where_the_close_would_look_like_the_end():
    async with FakeEngine(cut_after(delta("half"), "fin")) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.send(
                b'POST /v1/chat/completions HTTP/1.0\r\nContent-Length: 27\r\n\r\n{"model":"m","stream":true}'
            )
            status, headers = await client.head()
            assert "transfer-encoding" not in {name.lower() for name, _ in headers}
            with pytest.raises(ConnectionResetError):
                while True:
                    assert await client.reader.read(4096)
    assert status == 200 and node.results == ["broken"]


async def test_bytes_that_came_with_the_break_still_reach_a_slow_client():
    big = delta("x" * 1000) * 400

    async def burst(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        conn.chunk(big)
        await conn.drain()
        conn.fin()

    reply, _ = await streamed(burst)
    assert reply.body.startswith(big) and not reply.whole


async def test_a_backend_given_up_in_mid_stream_breaks_the_stream():
    async def hang(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        conn.chunk(delta("x"))
        await conn.closed.wait()

    async with FakeEngine(hang) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            _, headers = await client.head()
            await client.chunk()
            request_id = dict(headers)["X-Viiwork-Request"]
            assert api.server.inference.abandon(request_id, "silent for 60 s")
            error = await client.chunk()
            assert error is not None and b'"error"' in error
            assert await client.closed() == b""
            assert not api.server.inference.abandon(request_id, "again")
    assert node.results == ["broken"]
