"""Bodies are lent to kv_share for as long as their requests last."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.node import FakeDispatcher, route, serving
from tests.fakes.rawclient import RawClient, Reply
from viiwork.core.turn import Ask, Grant
from viiwork.errors import NoFreeSlot


class Lent:
    """What is lent now, and the paths of all that was."""

    def __init__(self) -> None:
        self.now: dict[str, bytes] = {}
        self.paths: list[str] = []

    def put(self, request_id: str, path: str, body: bytes) -> None:
        self.now[request_id] = body
        self.paths.append(path)

    def forget(self, request_id: str) -> None:
        del self.now[request_id]


class Watching(FakeDispatcher):
    """Keeps what was lent at the moment a place is looked for."""

    def __init__(self, answers: list[Any], lent: Lent) -> None:
        super().__init__(answers)
        self.lent = lent
        self.seen: list[dict[str, bytes]] = []

    async def acquire(self, ask: Ask, exclude: Any = ()) -> Grant:
        self.seen.append(dict(self.lent.now))
        if not self.routes:
            raise NoFreeSlot("full")
        return await super().acquire(ask, exclude)


async def post(port: int, path: str, body: dict[str, Any]) -> Reply:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    async with RawClient(port) as client:
        client.send(head.encode() + data)
        return await client.reply()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_body_is_lent_while_its_request_looks_for_a_place_and_runs(path: str):
    lent, body = Lent(), {"model": "m", "messages": [], "prompt": "x"}
    async with FakeEngine() as engine:
        dispatcher = Watching([route("a", engine.url)], lent)
        async with serving(dispatcher, prompts=lent) as api:
            assert (await post(api.port, path, body)).status == 200
    assert [list(map(json.loads, seen.values())) for seen in dispatcher.seen] == [[body]]
    assert lent.paths == [path] and not lent.now


async def test_a_body_whose_request_found_no_place_is_lent_no_more():
    lent = Lent()
    dispatcher = Watching([], lent)
    async with serving(dispatcher, prompts=lent) as api:
        assert (await post(api.port, "/v1/chat/completions", {"model": "m", "messages": []})).status == 429
    assert len(dispatcher.seen) == 1 and lent.paths and not lent.now


async def test_what_needs_no_slot_is_not_lent():
    lent = Lent()
    async with FakeEngine() as engine:
        async with serving(Watching([route("a", engine.url)], lent), prompts=lent) as api:
            await post(api.port, "/tokenize", {"model": "m", "content": "x"})
    assert not lent.paths and not lent.now
