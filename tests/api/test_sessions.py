"""Which conversation a request belongs to, on its way through the API."""

from __future__ import annotations

import json

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.node import FakeDispatcher, route, serving
from tests.fakes.rawclient import RawClient
from viiwork.core.turn import Ask

CHAT = "/v1/chat/completions"
SESSION = "0f" * 16


class Identifying(FakeDispatcher):
    """Finds the same conversation for every request that does not name one."""

    async def acquire(self, ask: Ask, exclude=()):
        grant = await super().acquire(ask, exclude)
        grant.ask = Ask(ask.request_id, ask.model, session=ask.session or SESSION)
        return grant


def request(body: dict, *lines: str) -> bytes:
    raw = json.dumps(body).encode()
    head = [f"POST {CHAT} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


BODY = {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]}


async def ask_of(body: dict, *lines: str) -> Ask:
    """What the dispatcher is asked for a request."""
    async with FakeEngine() as engine, serving(FakeDispatcher([route("a", engine.url)])) as api:
        async with RawClient(api.port) as client:
            client.send(request(body, *lines))
            assert (await client.reply()).status == 200
        return api.dispatcher.asks[0]


async def test_key_and_chain_of_a_request_reach_the_dispatcher():
    ask = await ask_of(BODY, "X-Session-Id: mine")
    assert ask.session is None and ask.session_key is not None and len(ask.session_key) == 32
    assert ask.chain is not None and len(ask.chain.links) == 2


async def test_a_clients_own_word_for_the_conversation_is_not_taken():
    ask = await ask_of(BODY, f"X-Viiwork-Session: {SESSION}", "X-Viiwork-Session-Home: c")
    assert ask.session is None and ask.home == ""


async def test_a_proven_forward_says_which_conversation_it_belongs_to():
    raw = json.dumps(BODY)
    proof = (
        "X-Viiwork-Forwarded: b",
        f"X-Viiwork-Auth: sesame {CHAT} {len(raw)}",
        f"X-Viiwork-Session: {SESSION}",
        "X-Viiwork-Session-Home: c",
    )
    ask = await ask_of(BODY, *proof)
    assert (ask.session, ask.home) == (SESSION, "c")
    odd = (*proof[:2], "X-Viiwork-Session: nonsense", "X-Viiwork-Session-Home: a/b")
    ask = await ask_of(BODY, *odd)
    assert (ask.session, ask.home) == (None, "")


@pytest.mark.parametrize("backend, told", [("", SESSION), ("m/0", None)])
async def test_only_a_peer_is_told_the_conversation_and_never_the_engine(backend, told):
    async with FakeEngine() as engine:
        async with serving(Identifying([route("b", engine.url, backend)])) as api:
            async with RawClient(api.port) as client:
                client.send(request(BODY, "X-Viiwork-Session: " + "77" * 16))
                assert (await client.reply()).status == 200
        sent = dict(engine.requests[0].headers)
        assert sent.get("X-Viiwork-Session") == told


@pytest.mark.parametrize(
    "lines",
    [
        ["X-Session-Affinity: "],
        ["X-Session-Affinity: " + "x" * 10_240],
        ["X-Session-Affinity: caf\u00e9 \u4e16"],
        ["X-Session-Affinity: one", "X-Session-Affinity: two", "X-Session-Id: three"],
        ["Session_id: a", "Session-Id: b"],
    ],
)
async def test_odd_values_of_session_headers_are_served(lines):
    ask = await ask_of(BODY, *lines)
    assert ask.session_key is None or len(ask.session_key) == 32


@pytest.mark.parametrize(
    "value", [None, 7, [], {}, "", "x" * 10_240, "\u00e9", {"session_id": [1]}, "\u0000"]
)
async def test_odd_values_of_session_fields_are_served(value):
    for field in ("prompt_cache_key", "metadata"):
        ask = await ask_of({**BODY, field: value})
        assert ask.session_key is None or len(ask.session_key) == 32
