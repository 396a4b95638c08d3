"""Control writes: what their bodies must be, and that only proven ones reach their handler."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.node import FakeDispatcher, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.routes import ControlRoute
from viiwork.api.server import json_answer
from viiwork.limits import CONTROL_BODY_MAX_BYTES, CONTROLS_AT_ONCE

JSON = "Content-Type: application/json"


@pytest.fixture
async def admitted():
    return []


@pytest.fixture
async def api(admitted):
    async def handler(request, path, body):
        admitted.append((request.method, path, body))
        return json_answer(200, {"ok": True})

    routes = [
        ControlRoute("/v1/things/*", ("PUT", "DELETE"), handler),
        ControlRoute("/v1/do", ("POST",), handler),
    ]
    async with serving(FakeDispatcher([]), routes=routes) as api:
        yield api


async def send(api, method: str, path: str, body: bytes, *headers: str):
    async with RawClient(api.port) as client:
        head = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
        client.send("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        return await client.reply()


def proof(method: str, path: str, body: bytes) -> str:
    return f"X-Viiwork-Auth: sesame {method} {path} {len(body)}"


@pytest.mark.parametrize(
    "kind", [JSON, "content-type: APPLICATION/JSON", JSON + "; charset=utf-8", JSON + " ;charset=utf-8"]
)
async def test_a_proven_write_reaches_its_handler_with_path_and_whole_body(api, admitted, kind):
    body, path = b'{"target":"m"}', "/v1/things/a%2Fb?x=1"
    reply = await send(api, "PUT", path, body, kind, proof("PUT", path, body))
    assert reply.status == 200
    assert admitted == [("PUT", "/v1/things/a%2Fb", body)]


async def test_a_write_without_a_body_needs_no_type(api, admitted):
    reply = await send(api, "DELETE", "/v1/things/a", b"", proof("DELETE", "/v1/things/a", b""))
    assert reply.status == 200 and admitted == [("DELETE", "/v1/things/a", b"")]


@pytest.mark.parametrize(
    "types",
    [
        (),
        ("Content-Type: text/plain",),
        ("Content-Type: application/x-www-form-urlencoded",),
        ("Content-Type: multipart/form-data; boundary=application/json",),
        ("Content-Type: text/plain; application/json",),
        ("Content-Type: application/jsonx",),
        ("Content-Type:",),
    ],
)
async def test_a_body_that_a_web_form_could_have_sent_is_415(api, admitted, types):
    reply = await send(api, "POST", "/v1/do", b"{}", *types, proof("POST", "/v1/do", b"{}"))
    assert reply.status == 415 and reply.json["error"]["code"] == "unsupported_body"
    assert not admitted


async def test_an_empty_body_of_another_type_is_415_too(api, admitted):
    reply = await send(api, "POST", "/v1/do", b"", "Content-Type: text/plain", proof("POST", "/v1/do", b""))
    assert reply.status == 415 and not admitted


async def test_two_types_are_not_even_http(api, admitted):
    reply = await send(api, "POST", "/v1/do", b"{}", JSON, "Content-Type: text/plain")
    assert reply.status == 400 and not admitted


async def test_an_unproven_write_is_401_and_goes_nowhere(api, admitted):
    for headers in ((JSON,), (JSON, proof("POST", "/v1/do", b"{} ")), (JSON, proof("PUT", "/v1/do", b"{}"))):
        reply = await send(api, "POST", "/v1/do", b"{}", *headers)
        assert reply.status == 401 and reply.json["error"]["code"] == "unauthorized"
    assert not admitted


async def test_a_body_that_is_too_long_is_413_also_when_it_does_not_say_so(api, admitted):
    assert (await send(api, "POST", "/v1/do", b"x" * (CONTROL_BODY_MAX_BYTES + 1), JSON)).status == 413
    async with RawClient(api.port) as client:
        client.send(
            f"POST /v1/do HTTP/1.1\r\nHost: x\r\n{JSON}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        piece = b"%x\r\n%b\r\n" % (1 << 16, b" " * (1 << 16))
        client.send(piece * (CONTROL_BODY_MAX_BYTES // (1 << 16) + 2))
        reply = await client.reply()
    assert reply.status == 413 and not admitted


async def test_a_body_in_chunks_is_the_same_body(api, admitted):
    async with RawClient(api.port) as client:
        head = f"POST /v1/do HTTP/1.1\r\nHost: x\r\n{JSON}\r\n{proof('POST', '/v1/do', b'{}')}\r\n"
        client.send((head + "Transfer-Encoding: chunked\r\n\r\n").encode() + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")
        assert (await client.reply()).status == 200
    assert admitted == [("POST", "/v1/do", b"{}")]


async def test_a_body_whose_framing_breaks_is_refused(api, admitted):
    async with RawClient(api.port) as client:
        head = f"POST /v1/do HTTP/1.1\r\nHost: x\r\n{JSON}\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head.encode() + b"2\r\n{}\r\n")
        await asyncio.sleep(0.05)
        client.send(b"zz\r\n")
        assert (await client.reply()).status == 400
    assert not admitted


async def test_strangers_that_send_slowly_hold_little_memory_and_the_rest_is_told(api, admitted):
    clients = [RawClient(api.port) for _ in range(CONTROLS_AT_ONCE)]
    try:
        for client in clients:
            await client.__aenter__()
            head = ("POST /v1/do HTTP/1.1", "Host: x", JSON, "Content-Length: 9", "Expect: 100-continue")
            client.send("\r\n".join(head).encode() + b"\r\n\r\n")
            assert (await client.head())[0] == 100  # its body is being read now
        refused = await send(api, "POST", "/v1/do", b"{}", JSON, proof("POST", "/v1/do", b"{}"))
        assert refused.status == 503 and refused.value("Retry-After")
        clients[0].send(b"123456789")
        assert (await clients[0].reply()).status == 401
        assert (await send(api, "POST", "/v1/do", b"{}", JSON, proof("POST", "/v1/do", b"{}"))).status == 200
    finally:
        for client in clients:
            client.writer.transport.abort()


async def test_a_wrong_method_is_405_before_any_proof(api):
    reply = await send(api, "POST", "/v1/things/a", b"{}", JSON)
    assert reply.status == 405 and reply.value("Allow") == "PUT, DELETE"
