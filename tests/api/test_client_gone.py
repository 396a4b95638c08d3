"""A client that leaves frees its slot at once, wherever its request is."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.engine import DONE, Conn, FakeEngine, Seen, delta
from tests.fakes.node import FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient

CHAT = "/v1/chat/completions"


async def silent(conn: Conn, seen: Seen) -> None:
    await conn.closed.wait()


async def talking(conn: Conn, seen: Seen) -> None:
    conn.stream_head()
    conn.chunk(delta("x"))
    await conn.closed.wait()


@pytest.mark.parametrize("how", ["leave", "reset", "fin"])
@pytest.mark.parametrize("hops", [0, 1])
@pytest.mark.parametrize(
    ("script", "stream"),
    [(silent, False), (silent, True), (talking, True)],
    ids=["plain", "unborn", "talking"],
)
async def test_a_client_that_leaves_closes_the_engine_connection_and_gives_the_slot_back(
    how, hops, script, stream
):
    async with FakeEngine(script) as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
            async with serving(a, facts=FakeFacts("a")) as api_a:
                async with RawClient((api_a if hops else api_b).port) as client:
                    client.post(CHAT, {"model": "m", "stream": stream})
                    await engine.until(lambda: bool(engine.requests))
                    if script is talking:
                        await client.head()
                        await client.chunk()
                    getattr(client, how)()
                    await engine.until(lambda: engine.n_left_early == 1)
                await b.until(lambda: b.results == ["client_gone"])
                if hops:
                    await a.until(lambda: a.results == ["client_gone"])
    assert (a.n_out, b.n_out) == (0, 0)


async def said_it_all(conn: Conn, seen: Seen) -> None:
    conn.stream_head()
    conn.chunk(delta("x") + DONE)
    await conn.closed.wait()  # the end of the body has not come yet


@pytest.mark.parametrize("how", ["leave", "reset"])
@pytest.mark.parametrize("hops", [0, 1])
async def test_a_client_that_leaves_at_the_end_marker_had_its_whole_answer(how, hops):
    async with FakeEngine(said_it_all) as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
            async with serving(a, facts=FakeFacts("a")) as api_a:
                async with RawClient((api_a if hops else api_b).port) as client:
                    client.post(CHAT, {"model": "m", "stream": True})
                    await client.head()
                    await client.chunk()
                    getattr(client, how)()
                    await engine.until(lambda: engine.n_left_early == 1)
                await b.until(lambda: b.results == ["done"])
                if hops:
                    await a.until(lambda: a.results == ["done"])


@pytest.mark.parametrize("how", ["leave", "reset"])
async def test_clients_that_leave_the_queue_give_up_their_place_and_reach_no_engine(how):
    async with FakeEngine() as engine:
        node = FakeDispatcher([route("a", engine.url)], gate=asyncio.Event())
        async with serving(node) as api:
            clients = [RawClient(api.port) for _ in range(50)]
            for client in clients:
                await client.__aenter__()
                client.post(CHAT, {"model": "m"})
            await node.until(lambda: node.n_waiting == 50)
            for client in clients[1:]:
                getattr(client, how)()
            await node.until(lambda: node.n_waiting == 1)
            node.gate.set()
            assert (await clients[0].reply()).status == 200
            await clients[0].__aexit__()
    assert (node.n_gave_up, len(engine.requests)) == (49, 1)


async def test_a_client_that_left_logs_no_traceback(caplog):
    async with FakeEngine(talking) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            with caplog.at_level("INFO"):
                client.post(CHAT, {"model": "m", "stream": True})
                await client.head()
                client.leave()
                await node.until(lambda: node.results == ["client_gone"])
            assert api.requests.words == ["granted", "client_gone"]
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


async def test_a_slow_reader_holds_the_engine_back_and_grows_no_memory():
    n_sent = 0

    async def flood(conn: Conn, seen: Seen) -> None:
        nonlocal n_sent
        conn.stream_head()
        piece = delta("x" * 8000)
        for _ in range(4000):  # 32 MB, more than all buffers on the way
            conn.chunk(piece)
            n_sent += len(piece)
            await conn.drain()
        conn.end()

    async with FakeEngine(flood) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.writer.transport.pause_reading()
            client.post(CHAT, {"model": "m", "stream": True})
            await engine.until(lambda: bool(engine.requests))
            before = -1
            while before != n_sent:  # until nothing moves any more
                before = n_sent
                await asyncio.sleep(0.2)
            assert n_sent < 20_000_000
            client.writer.transport.resume_reading()
            reply = await client.reply()
            assert reply.whole and len(reply.body) == 4000 * len(delta("x" * 8000))


async def test_a_reader_that_takes_nothing_for_too_long_loses_its_slot(monkeypatch):
    monkeypatch.setattr("viiwork.api.outgoing.WRITE_STALL_S", 0.05)

    async def flood(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        while not conn.closed.is_set():
            conn.chunk(delta("x" * 8000))
            await conn.drain()
            await asyncio.sleep(0)

    async with FakeEngine(flood) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.writer.transport.pause_reading()
            client.post(CHAT, {"model": "m", "stream": True})
            await node.until(lambda: node.results == ["client_gone"])
            await engine.until(lambda: engine.n_left_early == 1)
