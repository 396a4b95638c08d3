"""Stopping: what runs may end, what is too slow is cut and never looks whole."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.engine import DONE, Conn, FakeEngine, Seen, delta
from tests.fakes.node import FakeDispatcher, FakeFacts, FakeOrigins, HeardRequests, route, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.app import ApiServer

STREAM = {"model": "m", "stream": True}


async def test_a_stopping_node_lets_a_stream_end_and_takes_no_new_connection():
    go_on = asyncio.Event()

    async def waiting(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        conn.chunk(delta("a"))
        await go_on.wait()
        conn.chunk(DONE)
        conn.end()

    async with FakeEngine(waiting) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        server = ApiServer(node, FakeOrigins("a"), FakeFacts(), requests=HeardRequests())
        _, port = await server.listen("127.0.0.1", 0)
        async with RawClient(port) as client, RawClient(port) as idle:
            client.post("/v1/chat/completions", STREAM)
            await client.head()
            assert await client.chunk() == delta("a")
            stopping = asyncio.create_task(server.stop(5))
            assert await idle.closed() == b""
            with pytest.raises(OSError):
                await RawClient(port).__aenter__()
            go_on.set()
            assert await client.chunk() == DONE
            assert await client.chunk() is None
            assert await client.closed() == b""
            await stopping
    assert node.results == ["done"]


async def test_what_is_still_running_after_the_grace_is_cut_and_given_back():
    async def silent(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        conn.chunk(delta("a"))
        await conn.closed.wait()

    async with FakeEngine(silent) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        server = ApiServer(node, FakeOrigins("a"), FakeFacts(), requests=HeardRequests())
        _, port = await server.listen("127.0.0.1", 0)
        async with RawClient(port) as client:
            client.post("/v1/chat/completions", STREAM)
            await client.head()
            await client.chunk()
            await server.stop(0.05)
            rest = await client.closed()
            assert b"0\r\n\r\n" not in rest and b"[DONE]" not in rest
        await engine.until(lambda: engine.n_left_early == 1)
    assert node.results == ["broken"] and node.n_out == 0


async def test_more_connections_than_the_cap_are_closed_at_once(monkeypatch):
    monkeypatch.setattr("viiwork.api.server.CONNECTIONS_MAX", 2)
    async with serving(FakeDispatcher([])) as api:
        async with RawClient(api.port) as one, RawClient(api.port) as two:
            for client in (one, two):
                client.get("/health")
                assert (await client.reply()).status == 200
            async with RawClient(api.port) as three:
                assert await three.closed() == b""
            one.get("/health")
            assert (await one.reply()).status == 200
