"""What a client and an entry node say about the place of a request, on its way through the API."""

from __future__ import annotations

import json

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.node import FakeDispatcher, FakeOrigins, route, serving
from tests.fakes.rawclient import RawClient, Reply
from viiwork.api.why import Why
from viiwork.core.choice import Candidate, Choice, Policy, Question
from viiwork.core.receipts import Receipts
from viiwork.core.turn import Ask

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[]}'


async def post(port: int, target: str = CHAT, **headers: str) -> Reply:
    lines = [f"POST {target} HTTP/1.1", "Host: x", f"Content-Length: {len(BODY)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    async with RawClient(port) as client:
        client.send("\r\n".join(lines).encode() + b"\r\n\r\n" + BODY)
        return await client.reply()


def proof(target: str = CHAT, word: str = "sesame") -> dict[str, str]:
    headers = FakeOrigins("b", word).forward_headers("POST", target, BODY)
    return {name.replace("-", "_"): value for name, value in headers.items()}


async def test_a_pin_and_preferences_reach_the_decision_and_the_header_goes_no_further():
    async with FakeEngine() as engine:
        async with serving(FakeDispatcher([route("a", engine.url)])) as api:
            await post(api.port, CHAT + "?host=rig-1")
            await post(api.port, CHAT + "?prefer=b,c", X_Viiwork_Prefer="d")
            await post(api.port, CHAT, X_Viiwork_Prefer="d, mesh")
        asks = [(ask.pin, ask.prefer) for ask in api.dispatcher.asks]
        assert asks == [("rig-1", ()), (None, ("b", "c")), (None, ("d",))]
        names = {name.lower() for seen in engine.requests for name, _ in seen.headers}
        assert len(engine.requests) == 3 and not any(name.startswith("x-viiwork") for name in names)


@pytest.mark.parametrize("target", [CHAT + "?host=a%2Fb", CHAT + "?prefer=1,2,3,4,5,6,7,8,9&host=a"])
async def test_a_malformed_wish_is_a_clear_400_and_nothing_runs(target: str):
    async with FakeEngine() as engine:
        async with serving(FakeDispatcher([route("a", engine.url)])) as api:
            reply = await post(api.port, target)
        assert reply.status == 400 and json.loads(reply.body)["error"]["type"] == "invalid_request"
        assert not engine.requests and not api.dispatcher.asks


async def test_only_a_proven_forward_may_say_how_long_it_waits():
    async with FakeEngine() as engine:
        async with serving(FakeDispatcher([route("a", engine.url)])) as api:
            await post(api.port, **proof(), X_Viiwork_Wait_Ms="250")
            await post(api.port, **proof())
            await post(api.port, X_Viiwork_Wait_Ms="250")
            refused = await post(api.port, **proof(word="guess"), X_Viiwork_Wait_Ms="250")
        assert refused.status == 401
        assert [ask.wait_ms for ask in api.dispatcher.asks] == [250, 0, 0]


async def test_a_forwards_own_place_is_not_looked_for_again():
    target = CHAT + "?host=b&prefer=c"
    async with FakeEngine() as engine:
        async with serving(FakeDispatcher([route("a", engine.url)])) as api:
            assert (await post(api.port, target, **proof(target))).status == 200
        (ask,) = api.dispatcher.asks
        assert (ask.forwarded_by, ask.pin, ask.prefer) == ("b", None, ())


async def test_a_forward_tells_its_peer_how_long_to_wait_and_the_client_hears_of_the_wait_there():
    async def answer(conn, seen):
        conn.json(200, {}, ("X-Viiwork-Queued-Ms: 1500",))

    async with FakeEngine(answer) as peer:
        granted = route("b", peer.url, backend="", slot=None, queued_s=0.25)
        granted.wait_ms = 9000
        async with serving(FakeDispatcher([granted])) as api:
            reply = await post(api.port)
        assert peer.requests[0].values("X-Viiwork-Wait-Ms") == ["9000"]
        assert reply.value("X-Viiwork-Queued-Ms") == "1750"


# -- receipts --------------------------------------------------------------------------------------
async def get(port: int, target: str) -> tuple[int, dict]:
    async with RawClient(port) as client:
        client.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        reply = await client.reply()
        return reply.status, json.loads(reply.body)


async def test_why_tells_of_a_request_and_of_no_other():
    receipts = Receipts()
    question = Question("a", "m", 7, (Candidate("a", 1), Candidate("b", 0)))
    receipts.add(Ask("0123456789abcdef", "m"), 1.0, question, Choice("a", "entry")).node = "a"
    routes = Why("a", receipts, Policy()).routes()
    async with serving(FakeDispatcher([]), routes=routes) as api:
        status, body = await get(api.port, "/v1/why/0123456789abcdef")
        assert status == 200 and [c["why"] for c in body["decisions"][0]["candidates"]] == ["taken", "full"]
        for unknown in ("fedcba9876543210", "x", "..%2f", "0123456789ABCDEF"):
            status, body = await get(api.port, f"/v1/why/{unknown}")
            assert status == 404 and body["error"]["type"] == "not_found"
