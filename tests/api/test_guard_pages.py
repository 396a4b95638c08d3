"""Web pages of other origins: which may read, which may send, and what a browser is told."""

from __future__ import annotations

import pytest

from tests.fakes.engine import Conn, FakeEngine, Seen
from tests.fakes.node import FakeChannels, FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.routes import ControlRoute, Route
from viiwork.core.cross_origin import OriginRules

GOOD, FOREIGN = "https://chat.example.org", "http://evil.example"
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": []}


def allows(origin: str) -> bool:
    return OriginRules.listed(["chat.example.org"]).allows(origin)


@pytest.fixture
async def engine():
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def api(engine):
    dispatcher = FakeDispatcher([route("a", engine.url)])
    async with serving(dispatcher, channels=FakeChannels(), allows_origin=allows) as api:
        yield api


async def send(api, method: str, path: str, *headers: str, body: bytes | None = None):
    async with RawClient(api.port) as client:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{api.port}", *headers]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        client.send("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
        return await client.reply(head_only=method == "HEAD")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("HEAD", "/health", 200),
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_an_allowed_page_may_read_every_answer_also_an_error(api, method, path, status):
    reply = await send(api, method, path, f"Origin: {GOOD}")
    assert reply.status == status
    assert reply.values("Access-Control-Allow-Origin") == [GOOD] and reply.values("Vary") == ["Origin"]


async def test_a_foreign_page_is_answered_but_its_browser_is_not_told_to_show_it(api):
    reply = await send(api, "GET", "/v1/models", f"Origin: {FOREIGN}")
    assert reply.status == 200 and reply.values("Vary") == ["Origin"]
    assert not [name for name, _ in reply.headers if name.lower().startswith("access-control-")]


async def test_without_an_origin_nothing_is_said_about_origins(api):
    reply = await send(api, "GET", "/v1/models")
    names = {name.lower() for name, _ in reply.headers}
    assert "vary" not in names and not any(name.startswith("access-control-") for name in names)


async def test_a_page_gets_the_engines_answer_with_our_permission_and_not_the_engines(api, engine):
    async def answer(conn: Conn, seen: Seen) -> None:
        conn.json(200, {"ok": 1}, ["Access-Control-Allow-Origin: *", "Vary: Accept-Encoding, Origin"])

    engine.script = answer
    headers = (f"Origin: {GOOD}", "Content-Type: application/json")
    reply = await send(api, "POST", CHAT, *headers, body=b'{"model":"m"}')
    assert reply.status == 200 and reply.json == {"ok": 1}
    assert reply.values("Access-Control-Allow-Origin") == [GOOD]
    assert reply.values("Vary") == ["Accept-Encoding", "Origin"]
    assert "origin" not in {name.lower() for name, _ in engine.requests[0].headers}


async def test_a_page_may_read_a_forwarded_answer_too(engine):
    b = FakeDispatcher([route("b", engine.url)])
    async with serving(b, facts=FakeFacts("b")) as api_b:  # which allows no page itself
        a = FakeDispatcher([route("b", api_b.url, backend="", slot=None)])
        async with serving(a, allows_origin=allows) as api_a:
            reply = await send(api_a, "POST", CHAT, f"Origin: {GOOD}", body=b'{"model":"m"}')
    assert reply.status == 200 and reply.value("X-Viiwork-Node") == "b"
    assert reply.values("Access-Control-Allow-Origin") == [GOOD]


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/nothing", "/v1/kv/channel", "*"])
async def test_a_preflight_is_answered_before_routing(api, engine, path):
    ask = (
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization, x-stainless-os",
    )
    reply = await send(api, "OPTIONS", path, f"Origin: {GOOD}", *ask)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.value("Access-Control-Allow-Origin") == GOOD
    assert reply.value("Access-Control-Allow-Methods") == "GET, POST, OPTIONS"
    assert reply.value("Access-Control-Allow-Headers") == "authorization, x-stainless-os"
    assert reply.value("Access-Control-Max-Age") == "600" and reply.value("Vary") == "Origin"
    refused = await send(api, "OPTIONS", path, f"Origin: {FOREIGN}", *ask)
    assert refused.status == 403 and refused.json["error"]["type"] == "forbidden"
    assert not refused.values("Access-Control-Allow-Origin") and refused.value("Vary") == "Origin"
    assert not engine.requests


async def test_header_names_that_are_none_are_not_repeated_to_the_browser(api):
    ask = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: a;b, <c>")
    reply = await send(api, "OPTIONS", CHAT, f"Origin: {GOOD}", *ask)
    assert reply.status == 204 and not reply.values("Access-Control-Allow-Headers")


async def test_options_that_is_no_preflight_is_a_method_like_others(api):
    for headers in ((), (f"Origin: {GOOD}",), ("Access-Control-Request-Method: POST",)):
        reply = await send(api, "OPTIONS", "/v1/models", *headers)
        assert reply.status == 405 and reply.value("Allow") == "GET, HEAD"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/models", "/v1/kv/channel", "/nothing"])
@pytest.mark.parametrize("origin", [FOREIGN, "null", ""])
async def test_a_foreign_page_may_send_nothing_anywhere(api, engine, method, path, origin):
    reply = await send(api, method, path, f"Origin: {origin}", body=b'{"model":"m"}')
    assert reply.status == 403 and reply.json["error"]["code"] == "forbidden"
    assert not engine.requests and not api.dispatcher.asks


async def test_two_origins_in_one_request_are_foreign(api):
    reply = await send(api, "POST", CHAT, f"Origin: {GOOD}", f"Origin: {GOOD}", body=b"{}")
    assert reply.status == 403


async def test_the_nodes_own_page_may_send(api):
    own = f"Origin: http://127.0.0.1:{api.port}"
    assert (await send(api, "POST", CHAT, own, body=b'{"model":"m"}')).status == 200
    other_port = f"Origin: http://127.0.0.1:{api.port + 1}"
    assert (await send(api, "POST", CHAT, other_port, body=b'{"model":"m"}')).status == 403


async def test_a_refused_request_leaves_a_usable_connection(api):
    async with RawClient(api.port) as client:
        client.post(CHAT, ASK, f"Origin: {FOREIGN}")
        assert (await client.reply()).status == 403
        client.post(CHAT, ASK)
        assert (await client.reply()).status == 200


async def test_what_one_request_says_about_its_page_is_not_said_to_the_next_on_the_connection(api):
    async with RawClient(api.port) as client:
        client.get("/v1/models", f"Origin: {GOOD}")
        assert (await client.reply()).values("Access-Control-Allow-Origin") == [GOOD]
        client.get("/v1/models")
        reply = await client.reply()
    assert not reply.values("Access-Control-Allow-Origin") and not reply.values("Vary")


async def test_a_node_that_allows_no_page_says_so_to_all(engine):
    async with serving(FakeDispatcher([route("a", engine.url)])) as api:
        assert (await send(api, "POST", CHAT, f"Origin: {GOOD}", body=b"{}")).status == 403


async def test_a_control_write_of_a_foreign_page_is_refused_before_its_proof_is_looked_at(engine):
    async def handler(request, path, body):
        raise AssertionError("it was admitted")

    routes = [ControlRoute("/v1/x", ("PUT",), handler)]
    async with serving(FakeDispatcher([]), routes=routes, allows_origin=allows) as api:
        proof = "X-Viiwork-Auth: sesame PUT /v1/x 0"
        reply = await send(api, "PUT", "/v1/x", f"Origin: {FOREIGN}", proof, body=b"")
    assert reply.status == 403


async def test_a_stream_that_a_handler_writes_itself_carries_the_header_too():
    from aiohttp import web

    async def stream(request, path):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b": hi\n\n")
        return answer

    routes = [Route("/v1/x/stream", ("GET",), stream)]
    async with serving(FakeDispatcher([]), routes=routes, allows_origin=allows) as api:
        reply = await send(api, "GET", "/v1/x/stream", f"Origin: {GOOD}")
    assert reply.values("Access-Control-Allow-Origin") == [GOOD] and reply.body == b": hi\n\n"
