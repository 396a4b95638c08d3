"""Routes that tell; and paths, names and methods as people write them."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.fakes.node import FakeChannels, FakeDispatcher, FakeFacts, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.routes import ControlRoute

NAMES = (
    "a/b",
    "a:b",
    "a%2Fb",
    "../x",
    "ünï",
    "A",
    "a",
    "n" * 300,
    "with space",
    "/lead",
    "q?x=1",
    "org/model:Q4",
)


@pytest.fixture
async def api():
    async with serving(FakeDispatcher([]), facts=FakeFacts("a", NAMES), channels=FakeChannels()) as api:
        yield api


async def get(api, path: str, method: str = "GET"):
    async with RawClient(api.port) as client:
        client.get(path, method=method)
        return await client.reply(head_only=method == "HEAD")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/health", "status"),
        ("/v1/models", "data"),
        ("/v1/models?", "data"),
        ("/v1//models", "data"),
        ("/v1/models/", "data"),
        ("/models", "data"),
        ("/v1/model/info", "data"),
        ("/v1/capacity", "node"),
        ("/v1/fleet/capacity?model=m", "asked"),
        ("/v1/status", "node"),
        ("http://x/v1/status?y#z", "node"),
    ],
)
async def test_every_route_answers_json(api, path, key):
    reply = await get(api, path)
    assert reply.status == 200 and key in reply.json
    assert reply.value("Content-Type").startswith("application/json")


async def test_every_listed_model_is_found_by_its_name_raw_and_encoded(api):
    for name in NAMES:
        encoded = quote(name, safe="")
        raw = encoded if set(name) & set(" ?%") or not name.isascii() else name
        for path in (raw, encoded):
            reply = await get(api, f"/v1/models/{path}")
            assert (reply.status, reply.json.get("id")) == (200, name), path


async def test_a_name_that_looks_encoded_is_found_raw_when_no_other_is_meant():
    async with serving(FakeDispatcher([]), facts=FakeFacts("a", ("x%2Fy",))) as api:
        assert (await get(api, "/v1/models/x%2Fy")).json["id"] == "x%2Fy"


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/models/none", "/v1/models/%2e%2e", "/v1/models/..%2fx%00", "/x?y"]
)
async def test_what_is_not_there_is_a_json_404(api, path):
    reply = await get(api, path)
    assert reply.status == 404 and reply.json["error"]["type"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/v1/models/a", "GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/messages/count_tokens?beta=true", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("GET", "/v1/kv/channel", "POST"),
    ],
)
async def test_a_wrong_method_is_a_405_that_names_the_right_ones(api, method, path, allowed):
    reply = await get(api, path, method)
    assert (reply.status, reply.value("Allow")) == (405, allowed)


async def test_head_answers_without_a_body(api):
    async with RawClient(api.port) as client:
        client.get("/health", method="HEAD")
        reply = await client.reply(head_only=True)
        assert reply.status == 200 and int(reply.value("Content-Length")) > 0
        client.get("/health")
        assert (await client.reply()).json == {"status": "ok"}


async def test_a_fault_of_ours_is_told_as_such_and_the_node_goes_on(caplog):
    facts = FakeFacts(fault=ValueError("inner secret"))
    async with serving(FakeDispatcher([]), facts=facts) as api, RawClient(api.port) as client:
        client.get("/health")
        reply = await client.reply()
        assert reply.status == 500 and b"secret" not in reply.body
        client.get("/v1/status")
        assert (await client.reply()).status == 200
    assert "inner secret" in caplog.text


async def test_a_model_called_like_an_action_can_be_looked_up_too():
    async def act(request, path, body):
        raise AssertionError("not asked for")

    routes = [ControlRoute("/v1/models/down", ("POST",), act)]
    async with serving(FakeDispatcher([]), facts=FakeFacts("a", ("down",)), routes=routes) as api:
        assert (await get(api, "/v1/models/down")).json["id"] == "down"
        assert (await get(api, "/v1/models/down?x=1")).json["id"] == "down"
        assert (await get(api, "/v1/models/down", "PUT")).value("Allow") == "POST"
        assert (await get(api, "/v1/models/down", "POST")).status == 401
