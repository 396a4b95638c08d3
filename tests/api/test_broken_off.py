"""Requests that stop in the middle, and versions of HTTP that nobody speaks here."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.node import FakeChannels, FakeDispatcher, route, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.routes import ControlRoute

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", [CHAT, "/v1/kv/channel", "/v1/do"])
@pytest.mark.parametrize("framing", ["Content-Length: 50", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("together", [True, False])
async def test_a_client_that_leaves_in_the_middle_of_its_body_holds_nothing(path, framing, together):
    async def never(request, path, body):
        raise AssertionError("half a body was taken for a whole one")

    upgrade = "Connection: Upgrade\r\nUpgrade: viiwork-kv/2\r\n" if "kv" in path else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{upgrade}{framing}\r\n\r\n".encode()
    part = b'{"model":"m"' if "Length" in framing else b'c\r\n{"model":"m"\r\n'
    async with FakeEngine() as engine:
        node = FakeDispatcher([route("a", engine.url)])
        routes = [ControlRoute("/v1/do", ("POST",), never)]
        async with serving(node, channels=FakeChannels(), routes=routes) as api:
            async with asyncio.timeout(30), RawClient(api.port) as client:  # far below the limit for silence
                client.send(head + part if together else head)
                if not together:
                    await asyncio.sleep(0.02)
                    client.send(part)
                client.fin()
                assert b" 200 " not in (await client.closed()).partition(b"\r\n")[0]
    assert not node.asks and not engine.requests


@pytest.mark.parametrize("version", ["HTTP/0.9", "HTTP/2.0", "HTTP/3.0", "HTTP/1.2", ""])
async def test_a_version_that_is_not_http_1_gets_a_400_that_can_be_read(version):
    async with serving(FakeDispatcher([])) as api, RawClient(api.port) as client:
        client.send(f"GET /v1/models {version}".rstrip().encode() + b"\r\nHost: x\r\n\r\n")
        client.fin()
        answer = await client.closed()
    assert answer.startswith(b"HTTP/1.0 400 ") and b'"invalid_request"' in answer
