"""Capacity polls against peers that answer, lie, hang and flood."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from viiwork.core.capacity import CapacityReport, ModelCapacity
from viiwork.core.holdings import Holding
from viiwork.limits import CAPACITY_BODY_MAX_BYTES
from viiwork.mesh import polls
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.polls import CapacityPoller
from viiwork.mesh.values import MemberEvent
from viiwork.wire.capacity import decode_report, encode_report

INTERVAL_S = 0.3


def report(node: str, busy: int = 0) -> bytes:
    return encode_report(CapacityReport(node, "0.1", (ModelCapacity("q", "e", 4, busy, 0, 8192, 1, 1),)))


@pytest.fixture
async def poller(heard):
    peer = PeerClient("a")
    await peer.start()
    p = CapacityPoller(peer, interval_s=INTERVAL_S, on_report=heard)
    yield p
    await p.stop()
    await peer.stop()


def told(p: CapacityPoller, kind: str, member) -> None:
    p.on_member(MemberEvent(kind, member))


async def test_a_member_is_polled_at_once_and_then_each_interval(poller, heard, serve):
    answered = []

    async def answer(request):
        answered.append((request.method, request.path, request.headers.get("Accept-Encoding")))
        return web.Response(body=report("b", busy=len(answered) % 4))

    member = await serve(answer)
    told(poller, "joined", member)
    await heard.until(lambda _: len(heard.items) >= 3)
    assert set(answered) == {("GET", "/v1/capacity", None)}
    name, first, requested_at, received_at, rtt_s = heard.items[0]
    assert (name, first.node, first.models[0].slots) == ("b", "b", 4)
    assert rtt_s == received_at - requested_at > 0
    (_, _, _, _, rtt2), (_, _, asked, got, rtt3) = heard.items[1:3]
    assert rtt3 == pytest.approx(rtt2 + 0.3 * ((got - asked) - rtt2))
    assert poller.reports()["b"].api == member.api


async def test_an_update_asks_at_once_without_a_second_poll_under_way(heard, serve):
    under_way, most, n = 0, 0, 0
    began, release = asyncio.Event(), asyncio.Event()

    async def answer(request):
        nonlocal under_way, most, n
        under_way += 1
        n += 1
        most = max(most, under_way)
        if n == 1:
            began.set()
            await release.wait()
        under_way -= 1
        return web.Response(body=report("b"))

    peer = PeerClient("a")
    await peer.start()
    p = CapacityPoller(peer, interval_s=60.0, on_report=heard)
    try:
        member = await serve(answer)
        told(p, "joined", member)
        await began.wait()
        for _ in range(5):
            told(p, "updated", member)
        release.set()
        await heard.until(lambda _: len(heard.items) >= 2)  # long before the interval is over
        assert most == 1
    finally:
        await p.stop()
        await peer.stop()


async def test_a_hung_member_delays_nobody(heard, serve):
    hangs, over = asyncio.Event(), asyncio.Event()

    async def hang(request):
        hangs.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    async def answer(request):
        return web.Response(body=report("c"))

    peer = PeerClient("a")
    await peer.start()
    p = CapacityPoller(peer, interval_s=60.0, on_report=heard)
    try:
        told(p, "joined", await serve(hang, "b"))
        await hangs.wait()
        c = await serve(answer, "c", "127.0.0.3")
        for n in range(5):
            told(p, "joined", c)
            await heard.until(lambda _, n=n: len(heard.items) > n)
        assert not over.is_set()
    finally:
        await p.stop()
        await peer.stop()


async def test_a_hung_poll_is_given_up_after_its_interval_and_its_connection_closed(poller, serve):
    open_now, most, ended = 0, 0, asyncio.Semaphore(0)

    async def hang(request):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            await asyncio.Event().wait()
        finally:
            open_now -= 1
            ended.release()

    told(poller, "joined", await serve(hang, "b"))
    for _ in range(3):
        await ended.acquire()
    assert most <= 2  # the server notices a moment later that the client has gone
    assert "b" in poller.failures() and "b" not in poller.reports()


async def test_a_port_that_only_accepts_is_given_up_each_interval(
    poller, heard, make_member, silent_port, serve
):
    async def answer(request):
        return web.Response(body=report("c"))

    told(poller, "joined", make_member("b", "127.0.0.3", silent_port))
    told(poller, "joined", await serve(answer, "c"))
    await heard.until(lambda _: len(heard.items) >= 4)
    assert poller.failures().keys() == {"b"}


async def test_a_failure_keeps_the_last_report_which_then_ages(poller, heard, serve):
    failed = asyncio.Event()
    n = 0

    async def answer(request):
        nonlocal n
        n += 1
        if n == 1:
            return web.Response(body=report("b", busy=3))
        failed.set()
        return web.Response(status=500, body=report("b", busy=0))

    told(poller, "joined", await serve(answer))
    await failed.wait()
    kept = poller.reports()["b"]
    assert kept.report.models[0].busy == 3
    assert kept.age_s(kept.received_at + 5) == 5
    assert len(heard.items) == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: web.Response(body=report("someone-else")), "answers as 'someone-else'"),
        (lambda: web.Response(body=b"<html>"), "not usable"),
        (lambda: web.Response(body=report("b"), headers={"Content-Encoding": "gzip"}), None),
        (lambda: web.Response(status=404), "404"),
        (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.9:1/"}), "302"),
        (lambda: web.Response(body=b" " * (CAPACITY_BODY_MAX_BYTES + 1)), "over"),
    ],
)
async def test_an_answer_that_cannot_be_believed_is_not_reported(poller, heard, serve, answer, why):
    asked = asyncio.Event()
    n = 0

    async def handler(request):
        nonlocal n
        n += 1
        if n == 2:
            asked.set()
        return answer()

    told(poller, "joined", await serve(handler))
    await asked.wait()
    if why is None:
        assert not poller.failures()  # bodies are taken as they come; a header changes nothing
        return
    assert why in poller.failures()["b"]
    assert not heard.items and not poller.reports()


async def test_an_endless_body_is_cut_off_at_the_cap(poller, heard, serve):
    sent, cut = [], asyncio.Event()

    async def flood(request):
        response = web.StreamResponse()
        await response.prepare(request)
        sent.append(0)
        try:
            while True:
                await response.write(b" " * 65536)
                sent[-1] += 65536
        finally:
            cut.set()

    told(poller, "joined", await serve(flood))
    await cut.wait()
    assert sent[0] < 16 * CAPACITY_BODY_MAX_BYTES  # what the sockets' buffers took, no more
    assert not poller.reports() and not heard.items


async def test_a_member_that_leaves_is_forgotten_and_its_poll_ends(poller, heard, serve):
    began, ended = asyncio.Event(), asyncio.Event()
    n = 0

    async def answer(request):
        nonlocal n
        n += 1
        if n == 1:
            return web.Response(body=report("b"))
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    member = await serve(answer)
    told(poller, "joined", member)
    await began.wait()
    told(poller, "left", member)
    assert not poller.reports()
    async with asyncio.timeout(10):
        await ended.wait()
    assert len(heard.items) == 1


async def test_a_member_that_restarted_starts_without_its_old_numbers(poller, heard, serve, make_member):
    async def answer(request):
        return web.Response(body=report("b"))

    member = await serve(answer)
    told(poller, "joined", member)
    await heard.until(lambda _: True)
    told(poller, "updated", make_member("b", member.addr, member.api_port, epoch=2))
    assert not poller.reports()
    heard.items.clear()
    await heard.until(lambda _: True)
    assert poller.reports().keys() == {"b"}


async def test_a_report_that_did_not_change_is_not_decoded_again_and_counts_as_new(
    poller, heard, serve, monkeypatch
):
    decoded, busy = [], [0]
    monkeypatch.setattr(polls, "decode_report", lambda body: decoded.append(body) or decode_report(body))

    async def answer(request):
        return web.Response(body=report("b", busy=busy[0]))

    told(poller, "joined", await serve(answer))
    await heard.until(lambda _: len(heard.items) >= 3)
    assert len(decoded) == 1 and heard.items[2][2] > heard.items[0][2]
    busy[0] = 3
    await poller.ask_now(30.0, 0.0)
    await heard.until(lambda item: item[1].models[0].busy == 3)
    assert len(decoded) == 2


async def test_gateways_are_not_polled_and_a_node_that_becomes_one_is_forgotten(
    poller, heard, serve, make_member
):
    async def answer(request):
        return web.Response(body=report("b"))

    member = await serve(answer)
    told(poller, "joined", member)
    await heard.until(lambda _: True)
    told(poller, "updated", make_member("b", member.addr, member.api_port, role="gateway"))
    assert not poller.reports()


async def test_a_suspect_member_is_still_asked(poller, heard, serve):
    async def answer(request):
        return web.Response(body=report("b"))

    member = await serve(answer)
    told(poller, "joined", member)
    await heard.until(lambda _: True)
    told(poller, "suspect", member)
    heard.items.clear()
    await heard.until(lambda _: True)


async def test_a_listener_that_fails_does_not_end_the_polling(serve, heard):
    def listener(*item):
        heard(*item)
        raise RuntimeError("listener bug")

    async def answer(request):
        return web.Response(body=report("b"))

    peer = PeerClient("a")
    await peer.start()
    p = CapacityPoller(peer, interval_s=0.05, on_report=listener)
    try:
        told(p, "joined", await serve(answer))
        await heard.until(lambda _: len(heard.items) >= 3)
    finally:
        await p.stop()
        await peer.stop()


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00" * 500,
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/9.9 abc\r\n\r\n",
        b"HTTP/1.1 101 x\r\nUpgrade: z\r\nConnection: upgrade\r\n\r\n",
        b"",
    ],
)
async def test_broken_http_is_a_failed_poll_and_the_next_one_is_asked(
    poller, heard, make_member, answer, caplog
):
    asked = asyncio.Semaphore(0)

    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.release()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.2", 0) as server:
        told(poller, "joined", make_member("b", "127.0.0.2", server.sockets[0].getsockname()[1]))
        for _ in range(3):  # the HTTP client itself asks twice when a connection ends without a word
            await asked.acquire()
        assert poller.failures().keys() == {"b"}
        assert not heard.items
        assert not [r for r in caplog.records if r.exc_info]
        await poller.stop()


HELD = (Holding("ab" * 16, "q", "cd" * 8, "", 100, "slot", 5, "q/0"),)


async def test_holdings_are_told_once_and_kept_while_they_do_not_change(poller, heard, serve):
    asked = []

    async def answer(request):
        asked.append(request.query.get("holdings"))
        rev = 7 if len(asked) < 4 else 8
        told = None if request.query.get("holdings") == str(rev) else HELD * (rev - 7)
        if rev == 7 and told is not None:
            told = HELD
        return web.Response(body=encode_report(CapacityReport("b", holdings_rev=rev, holdings=told)))

    told(poller, "joined", await serve(answer))
    await heard.until(lambda _: len(heard.items) >= 5)
    assert asked[:5] == [None, "7", "7", "7", "8"]
    assert [item[1].holdings for item in heard.items[:5]] == [HELD] * 5
    assert heard.items[1][1].holdings is heard.items[0][1].holdings


async def test_a_list_left_out_for_another_revision_than_the_known_one_is_unknown(poller, heard, serve):
    n = 0

    async def answer(request):
        nonlocal n
        n += 1
        held = HELD if n == 1 else None
        return web.Response(body=encode_report(CapacityReport("b", holdings_rev=n, holdings=held)))

    told(poller, "joined", await serve(answer))
    await heard.until(lambda _: len(heard.items) >= 3)
    assert [item[1].holdings for item in heard.items[:3]] == [HELD, None, None]


async def test_who_asks_now_gets_answers_to_questions_put_after_that(heard, serve, make_member):
    n = 0

    async def answer(request):
        nonlocal n
        n += 1
        return web.Response(body=report("b", busy=n))

    peer = PeerClient("a")
    await peer.start()
    p = CapacityPoller(peer, interval_s=60.0, on_report=heard)
    try:
        told(p, "joined", await serve(answer))
        await heard.until(lambda _: len(heard.items) == 1)
        await p.ask_now(30.0, 0.0)
        assert [item[1].models[0].busy for item in heard.items] == [1, 2]
        await asyncio.gather(p.ask_now(30.0, 0.0), p.ask_now(30.0, 0.0))
        assert n == 3
        await p.ask_now(30.0, 3600.0)
        assert n == 3, "who was asked a moment ago is not asked again"
    finally:
        await p.stop()
        await peer.stop()


async def test_asking_now_does_not_wait_for_a_hung_member(heard, serve):
    async def hang(request):
        await asyncio.Event().wait()

    peer = PeerClient("a")
    await peer.start()
    p = CapacityPoller(peer, interval_s=60.0, on_report=heard)
    try:
        told(p, "joined", await serve(hang))
        await p.ask_now(0.01, 0.0)
        assert heard.items == []
    finally:
        await p.stop()
        await peer.stop()
