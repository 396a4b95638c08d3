"""A request tries its routes before the first byte, never after, and says why when none is left."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.engine import Conn, FakeEngine, Seen, answer_all
from tests.fakes.node import FakeDispatcher, FakeFacts, FakeOrigins, route, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.upstream import Upstreams

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": []}
NOWHERE = "http://127.0.0.1:1"


def refusing(status: int):
    async def script(conn: Conn, seen: Seen) -> None:
        conn.json(status, {"error": {"message": "Loading model", "type": "unavailable_error"}})

    return script


async def dying(conn: Conn, seen: Seen) -> None:
    conn.fin()


async def ask(node: FakeDispatcher, **limits):
    async with serving(node, **limits) as api, RawClient(api.port) as client:
        client.post(CHAT, ASK)
        return await client.reply()


@pytest.mark.parametrize(
    ("script", "result"), [(refusing(429), "refused"), (refusing(503), "refused"), (dying, "unreachable")]
)
async def test_a_route_that_fails_before_the_first_byte_is_replaced_by_the_next(script, result):
    async with FakeEngine(script) as bad, FakeEngine() as good:
        node = FakeDispatcher([route("a", bad.url), route("b", good.url, "m/1")])
        reply = await ask(node)
    assert reply.status == 200 and reply.value("X-Viiwork-Node") == "b"
    assert node.results == [result, "done"]
    assert len(bad.requests) == 1


async def test_a_route_nobody_listens_at_is_replaced():
    async with FakeEngine() as good:
        node = FakeDispatcher([route("a", NOWHERE), route("b", good.url)])
        assert (await ask(node)).status == 200
    assert node.results == ["unreachable", "done"]


async def test_when_every_route_refused_the_client_may_come_again():
    async with FakeEngine(refusing(503)) as one, FakeEngine(refusing(429)) as two:
        reply = await ask(FakeDispatcher([route("a", one.url), route("b", two.url)]))
    assert (reply.status, reply.value("Retry-After")) == (503, "2")
    assert reply.json["error"]["type"] == "unavailable"


async def test_when_the_routes_failed_otherwise_it_is_a_bad_gateway():
    node = FakeDispatcher([route("a", NOWHERE)])
    reply = await ask(node)
    assert reply.status == 502 and reply.json["error"]["code"] == "upstream_unreachable"
    assert node.results == ["unreachable"]


async def test_a_dispatcher_that_never_gives_up_does_not_keep_a_request_for_ever():
    class Stubborn(FakeDispatcher):
        async def acquire(self, ask, exclude=()):
            return await super().acquire(ask, ())

    node = Stubborn([route("a", NOWHERE)])
    assert (await ask(node)).status == 502
    assert len(node.results) == 16


async def test_a_silent_backend_given_up_before_the_first_byte_is_replaced():
    async def silent(conn: Conn, seen: Seen) -> None:
        await conn.closed.wait()

    async with FakeEngine(silent) as bad, FakeEngine() as good:
        node = FakeDispatcher([route("a", bad.url), route("b", good.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, ASK)
            await bad.until(lambda: bool(bad.requests))
            assert api.server.inference.abandon(node.asks[0].request_id, "silent for 60 s")
            reply = await client.reply()
            await bad.until(lambda: bad.n_left_early == 1)
    assert reply.status == 200 and node.results == ["stalled", "done"]
    assert node.outcomes[0][1].detail == "silent for 60 s"


async def test_a_peer_that_does_not_trust_us_is_a_failed_route_and_not_the_clients_401():
    async with FakeEngine() as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            api_b.server.inference._origins = FakeOrigins("b", word="another secret")
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None), route("a", engine.url)])
            reply = await ask(a)
    assert reply.status == 200 and reply.value("X-Viiwork-Node") == "a"
    assert a.results == ["unreachable", "done"] and not b.asks


async def test_an_engines_own_401_behind_a_peer_reaches_the_client():
    async with FakeEngine(refusing(401)) as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
            reply = await ask(a)
    assert reply.status == 401 and a.results == ["done"]


async def test_a_peer_whose_engine_died_is_replaced():
    async with FakeEngine(dying) as dead, FakeEngine() as engine:
        b = FakeDispatcher([route("b", dead.url)])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None), route("a", engine.url)])
            reply = await ask(a)
    assert reply.status == 200 and a.results == ["unreachable", "done"] and b.results == ["unreachable"]


async def test_a_forward_is_never_forwarded_again():
    async with FakeEngine() as engine:
        b = FakeDispatcher([route("c", engine.url, backend="")])
        async with serving(b, facts=FakeFacts("b")) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
            reply = await ask(a)
    assert reply.status == 503 and not engine.requests


async def test_our_own_fault_before_the_first_byte_is_a_500_without_its_inside(caplog):
    class Broken(FakeDispatcher):
        async def acquire(self, ask, exclude=()):
            raise KeyError("secret detail")

    reply = await ask(Broken([]))
    assert reply.status == 500 and b"secret" not in reply.body and b"Traceback" not in reply.body
    assert reply.json["error"]["type"] == "server_error"
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]


async def test_a_reused_connection_that_was_dead_already_costs_the_client_nothing():
    async def once(conn: Conn, seen: Seen) -> None:
        await answer_all(conn, seen)
        await conn.drain()
        asyncio.get_running_loop().call_later(0.002, lambda: conn.idle and conn.fin())

    async with FakeEngine(once) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            for i in range(300):
                client.post(CHAT, ASK)
                assert (await client.reply()).status == 200
                await asyncio.sleep(0.0015 + (i % 10) * 0.0001)  # around the moment of the close
    assert len(engine.requests) == 300, "no request ran twice"
    assert set(node.results) == {"done"}


async def test_a_request_the_engine_took_on_a_reused_connection_is_not_run_again_there():
    async def second_time_die(conn: Conn, seen: Seen) -> None:
        if len(engine.requests) == 1:
            await answer_all(conn, seen)
        else:
            conn.fin()

    async with FakeEngine(second_time_die) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, ASK)
            assert (await client.reply()).status == 200
            client.post(CHAT, ASK)
            assert (await client.reply()).status == 502
    assert len(engine.requests) == 2 and engine.n_opened == 1


async def test_a_reset_long_after_the_request_was_taken_is_no_reason_to_run_it_again():
    async def second_time_reset(conn: Conn, seen: Seen) -> None:
        if len(engine.requests) == 1:
            await answer_all(conn, seen)
        else:
            await asyncio.sleep(0.1)
            conn.reset()

    async with FakeEngine(second_time_reset) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, ASK)
            assert (await client.reply()).status == 200
            client.post(CHAT, ASK)
            assert (await client.reply()).status == 502
    assert len(engine.requests) == 2 and node.results == ["done", "unreachable"]


async def test_an_engine_restarted_between_two_requests_is_reached_again():
    async with FakeEngine() as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, ASK)
            assert (await client.reply()).status == 200
            await engine.stop()
            await engine.start()
            client.post(CHAT, ASK)
            assert (await client.reply()).status == 200
    assert set(node.results) == {"done"}


async def test_connections_are_reused_and_idle_ones_closed():
    async with FakeEngine() as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node, upstreams=Upstreams(idle_s=0.1)) as api, RawClient(api.port) as client:
            for _ in range(5):
                client.post(CHAT, ASK)
                await client.reply()
            assert engine.n_opened == 1
            await engine.until(lambda: not engine.open)
