"""The slots client against a server that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from viiwork.engine.ports import PortPicker
from viiwork.engine.slots import Health, SlotsClient
from viiwork.errors import EngineError, KvError
from viiwork.limits import ENGINE_ANSWER_MAX_BYTES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[SlotsClient]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts an engine that is one handler, and gives a client for its two slots."""
    runners: list[web.ServerRunner] = []
    async with aiohttp.ClientSession() as session:

        async def start(handler: Handler) -> SlotsClient:
            runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)  # type: ignore[arg-type]
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            return SlotsClient(f"http://{host}:{port}", session, 2)

        yield start
        for runner in runners:
            await runner.cleanup()


def saying(body: Any, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return handler


def text(body: str, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=body, status=status, content_type="text/html")

    return handler


async def test_slots_tell_what_they_hold_and_only_busy_ones_their_progress(serve: Serve) -> None:
    token = [{"n_decoded": 5, "n_remain": 7, "has_next_token": True}]
    client = await serve(
        saying(
            [
                {"id": 0, "n_ctx": 64, "is_processing": False, "speculative": False},
                {
                    "id": 1,
                    "n_ctx": 32,
                    "is_processing": True,
                    "id_task": 9,
                    "n_prompt_tokens": 3,
                    "next_token": token,
                },
                {"id": 2, "n_ctx": 32, "is_processing": False, "next_token": token},
            ]
        )
    )
    never_used, busy, idle = await client.slots()
    assert (never_used.n_prompt_tokens, never_used.id_task) == (None, None)
    assert (busy.n_ctx, busy.id_task, busy.n_prompt_tokens, busy.n_decoded, busy.n_remain) == (32, 9, 3, 5, 7)
    assert (idle.n_decoded, idle.n_remain) == (None, None)


@pytest.mark.parametrize("body", [[], {}, [{"id": 0}], [{"id": "0", "n_ctx": 1}], None, "ok"])
async def test_answer_that_is_no_list_of_slots_is_an_error(serve: Serve, body: Any) -> None:
    client = await serve(saying(body))
    with pytest.raises(EngineError):
        await client.slots()


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (saying({"status": "ok"}), Health("ready")),
        (saying({"error": {"message": "Loading model"}}, 503), Health("loading", "loading the model")),
        (text("<html>"), Health("wrong", "/health answered something that is not an engine's")),
        (saying({"status": "no slot"}), Health("wrong", "/health says 'no slot'")),
        (text("", 404), Health("wrong", "/health answered 404")),
    ],
)
async def test_health_is_ready_only_when_an_engine_says_so(
    serve: Serve, handler: Handler, expected: Health
) -> None:
    assert await (await serve(handler)).health(5.0) == expected


async def test_health_of_nobody_is_an_answer_too(serve: Serve, unused_port: int) -> None:
    async with aiohttp.ClientSession() as session:
        health = await SlotsClient(f"http://127.0.0.1:{unused_port}", session, 1).health(5.0)
    assert health.state == "unreachable" and health.said.startswith("/health: ")


@pytest.fixture
def unused_port() -> int:
    return PortPicker().pick()


@pytest.mark.parametrize("slot", [-1, 2, 7])
async def test_slot_out_of_range_never_reaches_the_engine(serve: Serve, slot: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        raise AssertionError("the engine would take it modulo its slot count")

    client = await serve(handler)
    for call in (client.save(slot, "a", 1.0), client.restore(slot, "a", 1.0), client.erase(slot)):
        with pytest.raises(KvError) as caught:
            await call
        assert caught.value.reason == "no_such_slot"


BAD_NAMES = ["", "..", ".", "a/b", "a\\b", " a", "a ", "a.", "a\0b", "x" * 256, 'q"', "a..b"]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_filename_the_engine_refuses_is_refused_here(serve: Serve, name: str) -> None:
    client = await serve(saying({}))
    with pytest.raises(KvError) as caught:
        await client.save(0, name, 1.0)
    assert caught.value.reason == "bad_filename"


async def test_save_posts_the_filename_and_reads_the_figures(serve: Serve) -> None:
    heard = []

    async def handler(request: web.Request) -> web.Response:
        heard.append((request.method, request.path_qs, await request.json()))
        done = {"id_slot": 1, "filename": "a.bin", "n_saved": 38, "n_written": 876904}
        return web.json_response(done | {"timings": {"save_ms": 0.5}})

    done = await (await serve(handler)).save(1, "a.bin", 5.0)
    assert (done.n_saved, done.n_written, done.ms) == (38, 876904, 0.5)
    assert heard == [("POST", "/slots/1?action=save", {"filename": "a.bin"})]


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (saying({"error": {"message": "No available space in KV cache"}}, 400), "restore_refused"),
        (saying({"error": {"message": "not supported"}}, 501), "restore_refused"),
        (text("<html>"), "restore_failed"),
        (saying({"id_slot": 1, "n_restored": 1, "n_read": 1}), "wrong_slot"),
    ],
)
async def test_failed_restore_has_a_reason_that_can_be_counted(
    serve: Serve, handler: Handler, reason: str
) -> None:
    client = await serve(handler)
    with pytest.raises(KvError) as caught:
        await client.restore(0, "a.bin", 5.0)
    assert caught.value.reason == reason and "\n" not in str(caught.value)


async def test_timeout_closes_the_connection_so_that_the_engine_drops_the_task() -> None:
    dropped = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client closes
        dropped.set()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        client = SlotsClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", session, 2)
        with pytest.raises(KvError) as caught:
            await client.save(0, "a.bin", 0.1)
        assert caught.value.reason == "save_timeout"
        async with asyncio.timeout(10):
            await dropped.wait()


async def test_answer_without_end_is_cut_off(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        sent = 0
        try:
            while sent < 4 * ENGINE_ANSWER_MAX_BYTES:
                await response.write(b"x" * 65536)
                sent += 65536
        except ConnectionError:
            pass
        return response

    client = await serve(handler)
    with pytest.raises(EngineError, match="an answer of more than"):
        await client.slots(timeout_s=20.0)


@pytest.mark.parametrize(
    ("status", "fine"), [(200, True), (501, True), (400, True), (500, False), (404, False)]
)
async def test_warm_up_accepts_an_engine_without_completions(serve: Serve, status: int, fine: bool) -> None:
    client = await serve(saying({"error": {"message": "m"}}, status))
    if fine:
        await client.warm_up(0, 5.0)
    else:
        with pytest.raises(EngineError, match=f"one token in slot 0 failed: {status} m"):
            await client.warm_up(0, 5.0)
