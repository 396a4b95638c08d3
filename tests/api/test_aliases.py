"""Aliases in requests, and the routes of the alias table."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from tests.fakes.engine import FakeEngine
from tests.fakes.node import FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.aliases import AliasApi
from viiwork.api.routes import ControlRoute, RouteTable
from viiwork.errors import AliasConflict, BodyTooLarge, MethodNotAllowed, NotFound, RequestError
from viiwork.limits import ALIAS_BODY_MAX_BYTES

CHAT = "/v1/chat/completions"


class TestRequests:
    async def test_the_engine_gets_the_models_name_and_the_client_hears_both(self):
        async with FakeEngine() as engine:
            dispatcher = FakeDispatcher([route("a", engine.url)])
            facts = FakeFacts(aliases={"fast": "m"})
            async with serving(dispatcher, facts=facts) as api, RawClient(api.port) as client:
                client.post(CHAT, b'{"messages":[], "model" : "fast", "n":1}')
                reply = await client.reply()
            assert reply.status == 200
            assert (reply.value("X-Viiwork-Alias"), reply.value("X-Viiwork-Model")) == ("fast", "m")
            assert engine.requests[0].body == b'{"messages":[], "model" : "m", "n":1,"id_slot":1}'
            assert (dispatcher.asks[0].model, dispatcher.asks[0].alias) == ("m", "fast")
            assert b"hello" in reply.body

    async def test_a_model_by_its_own_name_has_no_alias_and_its_body_is_untouched(self):
        async with FakeEngine() as engine:
            dispatcher = FakeDispatcher([route("a", engine.url)])
            facts = FakeFacts(aliases={"fast": "m"})
            async with serving(dispatcher, facts=facts) as api, RawClient(api.port) as client:
                client.post(CHAT, b'{"model":"m"}')
                reply = await client.reply()
            assert reply.values("X-Viiwork-Alias") == []
            assert engine.requests[0].body == b'{"model":"m","id_slot":1}'

    async def test_an_alias_nobody_serves_is_503_with_a_time_to_come_back(self):
        dispatcher = FakeDispatcher([])
        async with (
            serving(dispatcher, facts=FakeFacts(aliases={"fast": ""})) as api,
            RawClient(api.port) as client,
        ):
            client.post(CHAT, {"model": "fast"})
            reply = await client.reply()
        assert (reply.status, reply.value("Retry-After")) == (503, "5")
        assert reply.json["error"]["code"] == "alias_unserved" and not dispatcher.asks

    async def test_a_forward_carries_the_models_name_and_is_not_resolved_again(self):
        async with FakeEngine() as engine:
            peer = FakeDispatcher([route("b", engine.url)])
            # On the peer the model's name is an alias of something else, made a moment ago.
            async with serving(peer, facts=FakeFacts(name="b", aliases={"m": "other"})) as there:
                entry = FakeDispatcher([route("b", there.url, backend="")])
                facts = FakeFacts(aliases={"fast": "m"})
                async with serving(entry, facts=facts) as api, RawClient(api.port) as client:
                    client.post(CHAT, b'{"model":"fast","messages":[]}')
                    reply = await client.reply()
            assert reply.status == 200
            assert engine.requests[0].body == b'{"model":"m","messages":[],"id_slot":1}'
            assert peer.asks[0].model == "m" and peer.asks[0].alias is None
            assert reply.values("X-Viiwork-Alias") == ["fast"] and reply.values("X-Viiwork-Model") == ["m"]

    async def test_a_client_that_only_claims_to_be_a_node_is_refused_before_its_alias_is_looked_at(self):
        dispatcher = FakeDispatcher([])
        async with serving(dispatcher, facts=FakeFacts(aliases={"fast": ""})) as api:
            async with RawClient(api.port) as client:
                client.post(CHAT, {"model": "fast"}, "X-Viiwork-Forwarded: b")
                assert (await client.reply()).status == 401


class Table:
    """An alias table that remembers what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fault: Exception | None = None

    def listing(self) -> list[dict[str, Any]]:
        return [{"name": "fast"}]

    def table_json(self) -> bytes:
        return b'{"v":1,"aliases":{}}'

    async def _call(self, *call: Any) -> dict[str, Any]:
        self.calls.append(call)
        if self.fault is not None:
            raise self.fault
        return {"name": call[1], "entry": {}}

    async def put(self, name: str, target: str, fallbacks: list[str], force: bool) -> dict[str, Any]:
        return await self._call("put", name, target, fallbacks, force)

    async def delete(self, name: str) -> dict[str, Any]:
        return await self._call("delete", name)

    async def revert(self, name: str) -> dict[str, Any]:
        return await self._call("revert", name)


@pytest.fixture
def table():
    return Table()


async def write(table: Table, method: str, target: str, body: bytes = b"") -> web.Response:
    path, found = RouteTable(AliasApi(table).routes()).find(method, target)
    assert isinstance(found, ControlRoute)
    answer = await found.handler(None, path, body)  # type: ignore[arg-type]
    assert isinstance(answer, web.Response)
    return answer


class TestRoutes:
    async def test_everybody_may_read(self, table):
        routes = AliasApi(table).routes()
        async with serving(FakeDispatcher([]), routes=routes) as api, RawClient(api.port) as client:
            client.get("/v1/aliases")
            assert (await client.reply()).json == {"aliases": [{"name": "fast"}]}
            client.get("/v1/aliases?table=1")
            reply = await client.reply()
            assert reply.body == table.table_json() and reply.value("Content-Type") == "application/json"

    async def test_writes_are_told_to_the_table(self, table):
        answer = await write(
            table, "PUT", "/v1/aliases/fast", b'{"target":"m","fallbacks":["n"],"force":true}'
        )
        assert answer.status == 200 and answer.body == b'{"name":"fast","entry":{}}'
        await write(table, "PUT", "/v1/aliases/%66ast?x=1", b'{"target":"m"}')
        await write(table, "DELETE", "/v1/aliases/fast")
        await write(table, "POST", "/v1/aliases/fast/revert")
        await write(table, "DELETE", "/v1/aliases/revert")
        assert table.calls == [
            ("put", "fast", "m", ["n"], True),
            ("put", "fast", "m", [], False),
            ("delete", "fast"),
            ("revert", "fast"),
            ("delete", "revert"),
        ]

    @pytest.mark.parametrize(
        ("method", "target", "body", "error", "status"),
        [
            ("PUT", "/v1/aliases/fast", b"", RequestError, 400),
            ("PUT", "/v1/aliases/fast", b'{"target":5}', RequestError, 400),
            ("PUT", "/v1/aliases/fast", b" " * (ALIAS_BODY_MAX_BYTES + 1), BodyTooLarge, 413),
            ("POST", "/v1/aliases/fast", b"", NotFound, 404),
            ("GET", "/v1/aliases/fast", b"", MethodNotAllowed, 405),
            ("PUT", "/v1/aliases", b"", MethodNotAllowed, 405),
            ("DELETE", "/v1/aliases/", b"", MethodNotAllowed, 405),
        ],
    )
    async def test_what_cannot_be_understood_is_refused(self, table, method, target, body, error, status):
        with pytest.raises(error) as caught:
            await write(table, method, target, body)
        assert caught.value.http_status == status and table.calls == []

    async def test_names_reach_the_table_as_they_are_and_its_refusals_are_409(self, table):
        table.fault = AliasConflict("an alias name has 1 to 64 of the characters ...")
        for target, name in (
            ("/v1/aliases/a%2Fb", "a/b"),
            ("/v1/aliases/a/b", "a/b"),
            ("/v1/aliases/%ff", "\N{REPLACEMENT CHARACTER}"),
        ):
            with pytest.raises(AliasConflict) as caught:
                await write(table, "PUT", target, b'{"target":"m"}')
            assert caught.value.http_status == 409 and table.calls[-1][1] == name
