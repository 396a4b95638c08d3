"""A client that waits for a stream hears comments, and still gets its answer from whoever can give it."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.fakes.engine import DONE, LAST, ROLE, Conn, FakeEngine, Seen, answer_all, delta
from tests.fakes.node import Api, FakeDispatcher, FakeFacts, route, serving
from tests.fakes.rawclient import RawClient, Reply
from viiwork.errors import AllRoutesRefused, QueueTimeout

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "messages": [], "stream": True}
EVERY_S = 0.05
WHOLE = ROLE + delta("hel") + delta("lo") + LAST + DONE


def without_comments(body: bytes) -> bytes:
    lines = [line for line in body.split(b"\n") if not line.startswith(b":")]
    events = [event.strip(b"\n") for event in b"\n".join(lines).split(b"\n\n")]
    return b"".join(event + b"\n\n" for event in events if event)


class Silent:
    """An engine that takes requests and says nothing until it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.then = answer_all

    async def __call__(self, conn: Conn, seen: Seen) -> None:
        await self.go.wait()
        await self.then(conn, seen)


async def until_comments(client: RawClient, n: int) -> None:
    for _ in range(n):
        assert await client.chunk() == b":\n\n"


async def rest(client: RawClient) -> tuple[bytes, bool]:
    """The rest of a chunked body, and whether it came to its end."""
    body = b""
    try:
        while (chunk := await client.chunk()) is not None:
            body += chunk
    except (asyncio.IncompleteReadError, ConnectionError):
        return body, False
    return body, True


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_silent_engine_that_took_the_request_is_bridged_with_a_head_and_comments(path):
    script = Silent()
    async with FakeEngine(script) as engine:
        node = FakeDispatcher([route("a", engine.url, queued_s=1.5)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(path, STREAM)
            status, headers = await client.head()
            said = dict(headers)
            await until_comments(client, 3)
            script.go.set()
            body, whole = await rest(client)
            client.post(path, STREAM)
            again = await client.reply()
    assert status == 200 and said["Content-Type"] == "text/event-stream"
    assert (said["X-Viiwork-Node"], said["X-Gpu-Backend"], said["X-Viiwork-Queued-Ms"]) == (
        "a",
        "m/0",
        "1500",
    )
    assert whole and without_comments(body) == WHOLE
    assert again.body == WHOLE, "the connection goes on"
    outcome = node.outcomes[0][1]
    assert outcome.result == "done" and outcome.usage is not None
    assert outcome.ttft_s is not None and outcome.ttft_s >= 3 * EVERY_S, "comments are no first token"


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"model": "m"}), (CHAT, STREAM | {"stream": False}), ("/v1/embeddings", STREAM)],
)
async def test_who_did_not_ask_for_a_stream_waits_for_the_engines_own_head(path, body):
    async def late(conn: Conn, seen: Seen) -> None:
        await asyncio.sleep(4 * EVERY_S)
        conn.json(201, {"late": True})

    async with FakeEngine(late) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(path, body)
            reply = await client.reply()
    assert (reply.status, reply.json) == (201, {"late": True})


async def test_nothing_is_said_while_the_request_may_still_be_refused():
    async with FakeEngine() as engine:
        node = FakeDispatcher([route("a", engine.url)], gate=asyncio.Event())
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            await node.until(lambda: node.n_waiting == 1)
            await asyncio.sleep(4 * EVERY_S)
            node.routes.clear()
            node.gate.set()
            reply = await client.reply()
    assert reply.status == 503 and reply.json["error"]["code"] == "all_routes_refused"


async def break_off(conn: Conn, seen: Seen) -> None:
    conn.reset()


async def refuse(conn: Conn, seen: Seen) -> None:
    conn.json(503, {"error": {"message": "no"}})


async def comments_then_death(conn: Conn, seen: Seen) -> None:
    conn.stream_head()
    for piece in (b":\n\n", b": ping\n", b":", b" half a com"):
        conn.chunk(piece)
        await conn.drain()
        await asyncio.sleep(0.02)
    conn.reset()


@pytest.mark.parametrize("then", [break_off, refuse, comments_then_death])
async def test_after_comments_another_place_still_gives_the_answer(then):
    script = Silent()
    script.then = then
    async with FakeEngine(script) as bad, FakeEngine() as good:
        node = FakeDispatcher([route("x", bad.url), route("y", good.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            await client.head()
            await until_comments(client, 1)
            script.go.set()
            body, whole = await rest(client)
    assert whole and without_comments(body) == WHOLE
    assert b": X-Viiwork-Node: y\n" in body, "whoever looks closer finds who answered"
    assert node.results == [node.results[0], "done"] and node.results[0] in ("unreachable", "refused")


async def test_an_engine_that_sent_only_comments_before_it_died_is_replaced_without_a_trace():
    async with FakeEngine(comments_then_death) as bad, FakeEngine() as good:
        node = FakeDispatcher([route("x", bad.url), route("y", good.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            reply = await client.reply()
    assert reply.whole and without_comments(reply.body) == WHOLE
    assert node.results == ["unreachable", "done"]


async def through_two(script, entry_routes, **limits) -> tuple[Reply, FakeDispatcher, FakeDispatcher]:
    """One streamed request that enters at a and may be forwarded to b, whose engine follows the script."""
    async with FakeEngine(script) as engine:
        b = FakeDispatcher([route("b", engine.url)])
        async with serving(b, facts=FakeFacts("b"), **limits) as api_b:
            a = FakeDispatcher([route("b", api_b.url, backend="", slot=None), *entry_routes])
            async with serving(a, facts=FakeFacts("a"), **limits) as api_a, RawClient(api_a.port) as client:
                client.post(CHAT, STREAM)
                reply = await client.reply()
    return reply, a, b


async def test_comments_of_an_executor_do_not_keep_its_entry_node_from_trying_elsewhere():
    async def die_late(conn: Conn, seen: Seen) -> None:
        await asyncio.sleep(4 * EVERY_S)
        conn.reset()

    async with FakeEngine() as good:
        reply, a, b = await through_two(die_late, [route("a", good.url)], comment_every_s=EVERY_S)
    assert reply.whole and without_comments(reply.body) == WHOLE and b"error" not in reply.body
    assert (a.results, b.results) == (["unreachable", "done"], ["unreachable"])


async def test_an_entry_node_passes_its_executors_comments_and_adds_none():
    silent_s = 0.0

    async def late(conn: Conn, seen: Seen) -> None:
        nonlocal silent_s
        since = asyncio.get_running_loop().time()
        await asyncio.sleep(6.5 * EVERY_S)
        silent_s = asyncio.get_running_loop().time() - since
        await answer_all(conn, seen)

    reply, _, _ = await through_two(late, [], comment_every_s=EVERY_S)
    assert without_comments(reply.body) == WHOLE
    assert reply.body.startswith(b":\n\n")
    assert reply.value("X-Viiwork-Node") == "b" and reply.value("X-Viiwork-Origin") == "a"
    assert reply.body.count(b":\n\n") <= silent_s / EVERY_S + 1


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (CHAT, b'data: {"error":{'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":'),
    ],
)
@pytest.mark.parametrize("error", [AllRoutesRefused, QueueTimeout])
async def test_when_no_place_is_left_after_comments_an_error_event_ends_the_stream(path, kind, error):
    script = Silent()
    script.then = break_off

    class NobodyLeft(FakeDispatcher):
        async def acquire(self, ask, exclude=()):
            if exclude:
                raise error("nobody is left")
            return await super().acquire(ask, exclude)

    async with FakeEngine(script) as engine:
        node = NobodyLeft([route("a", engine.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(path, STREAM)
            await client.head()
            await until_comments(client, 1)
            script.go.set()
            body, whole = await rest(client)
            assert api.requests.words[0] == "granted" and len(api.requests.words) == 2
    told = without_comments(body)
    assert not whole and told.startswith(kind) and told.count(b"data:") == 1
    assert b"[DONE]" not in body


@pytest.mark.parametrize(
    "body", [json.dumps({"error": {"message": "too long a prompt"}}).encode(), b"<html>"]
)
async def test_an_error_of_the_engine_that_comes_late_is_told_in_the_stream(body):
    async def late_error(conn: Conn, seen: Seen) -> None:
        conn.answer(400, body)

    script = Silent()
    script.then = late_error
    async with FakeEngine(script) as engine:
        node = FakeDispatcher([route("a", engine.url), route("b", engine.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            await client.head()
            await until_comments(client, 1)
            script.go.set()
            got, whole = await rest(client)
    (event,) = without_comments(got).split(b"\n\n")[:-1]
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert whole and error["type"] == "invalid_request"
    assert error["message"] == (
        "too long a prompt" if b"long" in body else "the engine answered 400 and no stream"
    )
    assert len(engine.requests) == 1 and node.outcomes[0][1].status == 400


async def test_a_silence_between_events_is_bridged_and_one_inside_an_event_is_left_alone():
    more = asyncio.Event()
    first, half = delta("x"), delta("y")

    async def pausing(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        for piece in (first, half[:-10], half[-10:] + DONE):
            conn.chunk(piece)
            await more.wait()
            more.clear()
        conn.end()

    async with FakeEngine(pausing) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            await client.head()
            assert await client.chunk() == first
            await until_comments(client, 2)
            more.set()
            while (chunk := await client.chunk()) == b":\n\n":
                continue
            assert chunk == half[:-10]
            await asyncio.sleep(4 * EVERY_S)
            more.set()
            assert await client.chunk() == half[-10:] + DONE
            more.set()
            body, whole = await rest(client)
    assert whole and without_comments(body) == b""


async def test_a_stream_with_a_length_of_its_own_gets_no_comment_into_it():
    async def with_length(conn: Conn, seen: Seen) -> None:
        conn.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(WHOLE)
        )
        conn.send(ROLE)
        await asyncio.sleep(4 * EVERY_S)
        conn.send(WHOLE[len(ROLE) :])

    async with FakeEngine(with_length) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            reply = await client.reply()
    assert reply.whole and reply.body == WHOLE


async def test_a_client_of_http_1_0_that_waits_gets_a_stream_that_ends_with_the_connection():
    script = Silent()
    async with FakeEngine(script) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            body = json.dumps(STREAM, separators=(",", ":")).encode()
            client.send(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
            status, headers = await client.head()
            assert await client.reader.readexactly(3) == b":\n\n"
            script.go.set()
            got = await client.closed()
    assert status == 200 and "Transfer-Encoding" not in dict(headers)
    assert without_comments(got) == WHOLE


async def test_a_backend_given_up_after_comments_is_replaced():
    async with FakeEngine(Silent()) as bad, FakeEngine() as good:
        node = FakeDispatcher([route("x", bad.url), route("y", good.url)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            await client.head()
            await until_comments(client, 1)
            assert api.server.inference.abandon(node.asks[0].request_id, "it is idle")
            body, whole = await rest(client)
    assert whole and without_comments(body) == WHOLE and node.results == ["stalled", "done"]


async def test_two_forwards_of_one_name_are_two_requests_and_both_come_back():
    script = Silent()
    async with FakeEngine(script) as engine:
        node = FakeDispatcher([route("b", engine.url)])
        async with serving(node, facts=FakeFacts("b")) as api:
            async with RawClient(api.port) as one, RawClient(api.port) as two:
                body = b'{"model":"m"}'
                proof = (
                    "X-Viiwork-Forwarded: a",
                    f"X-Viiwork-Auth: sesame {CHAT} {len(body)}",
                    "X-Viiwork-Request: 0123456789abcdef",
                )
                for client in (one, two):
                    client.post(CHAT, body, *proof)
                await engine.until(lambda: len(engine.requests) == 2)
                script.go.set()
                replies = [await one.reply(), await two.reply()]
    assert [reply.status for reply in replies] == [200, 200]
    assert node.results == ["done", "done"]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"model":"unknown"}', b'{"model":1}', b'{"model":"m"}'], ids=repr
)
async def test_errors_of_the_node_name_their_request_too(body):
    async with serving(FakeDispatcher([])) as api, RawClient(api.port) as client:
        client.post(CHAT, body)
        reply = await client.reply()
        assert reply.status in (400, 404, 503) and len(reply.value("X-Viiwork-Request")) == 16
        client.get("/nowhere")
        assert not (await client.reply()).values("X-Viiwork-Request")
        heard: list[tuple[str, str]] = api.requests.heard
    assert all(rid == reply.value("X-Viiwork-Request") for _, rid in heard)


async def test_the_node_hears_of_each_request_once_however_it_ends():
    async def ended(api: Api, words: list[str]) -> None:
        async with asyncio.timeout(5):
            while api.requests.words != words:
                await asyncio.sleep(0.005)

    async with FakeEngine() as engine:
        node = FakeDispatcher([route("x", "http://127.0.0.1:9"), route("y", engine.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            await client.reply()
            await ended(api, ["granted", "granted", "done"])
            node.gate = asyncio.Event()
            client.post(CHAT, STREAM)
            await node.until(lambda: node.n_waiting == 1)
            client.leave()
            await ended(api, ["granted", "granted", "done", "left"])


async def test_a_forward_that_may_wait_at_its_peer_is_not_promised_to_the_client():
    class WaitsThere(FakeDispatcher):
        async def acquire(self, ask, exclude=()):
            grant = await super().acquire(ask, exclude)
            grant.wait_ms = 60_000
            return grant

    async def refuse_late(conn: Conn, seen: Seen) -> None:
        assert seen.values("X-Viiwork-Wait-Ms") == ["60000"]
        await asyncio.sleep(4 * EVERY_S)
        await refuse(conn, seen)

    async with FakeEngine(refuse_late) as peer:
        node = WaitsThere([route("b", peer.url, backend="", slot=None)])
        async with serving(node, comment_every_s=EVERY_S) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            reply = await client.reply()
    assert reply.status == 503 and reply.json["error"]["code"] == "all_routes_refused"


async def test_a_page_may_read_the_head_it_gets_while_it_waits():
    async with FakeEngine(Silent()) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node, comment_every_s=EVERY_S, allows_origin=lambda origin: True) as api:
            async with RawClient(api.port) as client:
                client.post(CHAT, STREAM, "Origin: http://page", "Content-Type: application/json")
                _, headers = await client.head()
                client.leave()
                await node.until(lambda: node.results == ["client_gone"])
    assert dict(headers)["Access-Control-Allow-Origin"] == "http://page"


async def test_an_engine_that_only_comments_has_not_answered_and_can_be_given_up():
    async def comments_for_ever(conn: Conn, seen: Seen) -> None:
        conn.stream_head()
        conn.chunk(b":\n\n")
        await asyncio.Event().wait()

    grants = []

    class Watched(FakeDispatcher):
        async def acquire(self, ask, exclude=()):
            grants.append(await super().acquire(ask, exclude))
            return grants[-1]

    async with FakeEngine(comments_for_ever) as bad, FakeEngine() as good:
        node = Watched([route("x", bad.url), route("y", good.url)])
        async with serving(node) as api, RawClient(api.port) as client:
            client.post(CHAT, STREAM)
            await client.head()
            await until_comments(client, 1)
            assert not grants[0].answered
            assert api.server.inference.abandon(node.asks[0].request_id, "it is idle")
            body, whole = await rest(client)
    assert whole and without_comments(body) == WHOLE and grants[1].answered


async def test_the_openai_client_reads_over_comments_and_raises_the_error_event():
    script = Silent()
    async with FakeEngine(script) as engine:
        node = FakeDispatcher([route("a", engine.url)])
        async with serving(node, comment_every_s=EVERY_S) as api:
            async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="x", max_retries=0) as client:

                async def text() -> str:
                    stream = await client.chat.completions.create(model="m", messages=[], stream=True)
                    script.go.set()  # the head has come, so comments have
                    return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

                assert await text() == "hello"
                script.go.clear()
                script.then = break_off
                with pytest.raises(openai.APIError, match="the upstream failed"):
                    await text()
