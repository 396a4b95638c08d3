"""The client side of conversations with peers, raw channels included."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest
from aiohttp import web

from viiwork.errors import ChannelRefused
from viiwork.limits import CHANNEL_HEAD_MAX_BYTES
from viiwork.mesh import channel
from viiwork.mesh.channel import PROTOCOL, open_raw_channel
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import CHANNEL_PATH, PeerClient
from viiwork.wire.signature import FORWARDED, SIGNER, Verifier

KEY = b"k" * 32
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: viiwork-kv/2\r\nX-Extra: 7\r\n\r\n"
)


@pytest.fixture
async def peer():
    p = PeerClient("a", (KEY,), unix_now=lambda: 1e9)
    await p.start()
    yield p
    await p.stop()


@pytest.fixture
async def answering():
    """A port that reads one request's head and body and answers with given bytes, then shouts back."""
    servers, talks = [], []

    async def start(*answers: bytes, then_close: bool = False):
        got = asyncio.get_running_loop().create_future()

        async def talk(reader, writer):
            talks.append(asyncio.current_task())
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                got.set_result((head, await reader.readexactly(length)))
                for part in answers:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                while not then_close and (data := await reader.read(1000)):
                    writer.write(data.upper())
            except ConnectionError:
                pass  # the client hung up on us, which is what most of these tests are about
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

        server = await asyncio.start_server(talk, "127.0.0.2", 0)
        servers.append(server)
        return server.sockets[0].getsockname()[1], got

    yield start
    for server in servers:
        server.close()
    await asyncio.gather(*talks)


async def test_an_upgrade_gives_a_blocking_socket_and_the_answer_headers(peer, answering, make_member):
    port, got = await answering(SWITCH[:20], SWITCH[20:])
    sock, headers = await peer.open_channel(make_member("b", "127.0.0.2", port), {"X-Offer": "5"}, b'{"a":1}')
    with sock:
        assert sock.getblocking() and sock.gettimeout() is None
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert headers["x-extra"] == "7"
        sock.sendall(b"hello")
        assert await asyncio.to_thread(sock.recv, 100) == b"HELLO"
    head, body = await got
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
    assert head.startswith(f"POST {CHANNEL_PATH} HTTP/1.1\r\n".encode())
    assert (lines["Upgrade"], lines["Connection"], lines["X-Offer"]) == (PROTOCOL, "Upgrade", "5")
    assert (lines["Host"], body) == (f"127.0.0.2:{port}", b'{"a":1}')
    assert Verifier((KEY,)).verify("POST", CHANNEL_PATH, lines, body, now_unix_s=1e9, now=0.0).signer == "a"


async def test_an_aiohttp_peer_can_be_upgraded(serve):
    async def upgrade(request):
        await request.read()
        response = web.StreamResponse(status=101, headers={"Upgrade": PROTOCOL, "Connection": "upgrade"})
        await response.prepare(request)
        request.transport.pause_reading()
        sock = socket.socket(fileno=os.dup(request.transport.get_extra_info("socket").fileno()))
        sock.setblocking(True)
        await asyncio.to_thread(lambda: sock.sendall(sock.recv(10)[::-1]))
        sock.close()
        request.transport.close()
        return response

    member = await serve(upgrade)
    sock, _ = await open_raw_channel(member.addr, member.api_port, "/x", {}, b"")
    with sock:
        sock.sendall(b"abc")
        assert await asyncio.to_thread(sock.recv, 10) == b"cba"


async def test_a_refusal_carries_status_and_the_peers_words(peer, serve):
    async def refuse(request):
        return web.json_response({"error": {"message": "no such\nmodel", "type": "x"}}, status=409)

    with pytest.raises(ChannelRefused, match=r"409: no such.model") as caught:
        await peer.open_channel(await serve(refuse), {})
    assert caught.value.status == 409


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([SWITCH + b"x"], "before it was spoken to"),
        ([SWITCH.replace(b"viiwork-kv/2", b"websocket")], "switched to 'websocket'"),
        ([b"HTTP/1.1 101 x\r\n\r\n"], "switched to ''"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "SSH"),
        ([b"HTTP/1.1 1O1 x\r\n\r\n"], "answered with"),
        ([b"x" * 4096] * (CHANNEL_HEAD_MAX_BYTES // 4096 + 2), "endless head"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"], "refused the channel with 200"),
        ([b"HTTP/1.1 500 x\r\nContent-Length: 8\r\n\r\n[[[[[[[["], "refused the channel with 500$"),
    ],
)
async def test_any_other_answer_is_refused_and_the_socket_closed(answering, answers, why):
    port, _ = await answering(*answers)
    with pytest.raises(ChannelRefused, match=why):
        await open_raw_channel("127.0.0.2", port, "/x", {}, b"")


async def test_a_peer_that_closes_or_is_not_there_is_refused(answering):
    port, _ = await answering(then_close=True)
    with pytest.raises(ChannelRefused, match=r"closed the connection|broke") as caught:
        await open_raw_channel("127.0.0.2", port, "/x", {}, b"")
    assert caught.value.status == 0
    with pytest.raises(ChannelRefused, match=r"no connection to 127\.0\.0\.9:\d+: Connection refused$"):
        await open_raw_channel("127.0.0.9", port, "/x", {}, b"")


async def test_a_peer_that_never_answers_is_given_up(monkeypatch, silent_port):
    monkeypatch.setattr(channel, "CHANNEL_HEAD_TIMEOUT_S", 0.1)
    with pytest.raises(ChannelRefused, match="did not answer"):
        await open_raw_channel("127.0.0.3", silent_port, "/x", {}, b"")


async def test_a_header_with_a_line_break_is_our_own_bug():
    with pytest.raises(ValueError, match="line break"):
        await open_raw_channel("127.0.0.3", 1, "/x", {"A": "b\r\nC: d"}, b"")


def test_forwards_name_their_entry_node_and_are_proven():
    headers = PeerClient("a", (KEY,), unix_now=lambda: 1e9).forward_headers("POST", "/v1/x?y=1", b"body")
    assert headers[FORWARDED] == "a"
    verifier = Verifier((KEY,))
    assert verifier.verify("POST", "/v1/x?y=1", headers, b"body", now_unix_s=1e9, now=0.0).ok


def test_an_open_mesh_has_a_name_and_no_proof():
    assert PeerClient("a").forward_headers("POST", "/", b"") == {FORWARDED: "a", SIGNER: "a"}


async def test_redirects_proxies_and_encodings_are_left_alone(peer, serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.9:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.9:1")

    async def answer(request):
        if request.path == "/moved":
            return web.Response(status=307, headers={"Location": "/x"})
        seen = sorted(k for k in request.headers if k != "Host")
        return web.Response(text=",".join(seen), headers={"Content-Encoding": "gzip", "Set-Cookie": "a=b"})

    member = await serve(answer)
    async with peer.request("GET", f"http://{member.api}/moved") as moved:
        assert moved.status == 307
    for _ in range(2):
        async with peer.request("GET", f"http://{member.api}/x") as plain:
            assert await plain.read() == b""  # no header of our own, and bytes as they came


async def test_in_an_open_mesh_a_channel_comes_from_the_address_members_know(serve, make_member):
    seen = []

    async def refuse(request):
        us = make_member("a", "127.0.0.7", 8086)
        origins = MeshOrigins("b", (), PeerClient("b"), {"a": us}.get)
        sender = origins.sent_by(
            "POST", request.path_qs, request.headers, await request.read(), request.remote
        )
        seen.append((sender, request.remote))
        return web.Response(status=409)

    member = await serve(refuse)
    client = PeerClient("a")
    client.own_ip = "127.0.0.7"
    with pytest.raises(ChannelRefused, match="409"):
        await client.open_channel(member, {})
    assert seen == [("a", "127.0.0.7")]


async def test_with_a_secret_the_system_chooses_the_source_address(peer):
    peer.own_ip = "127.0.0.7"
    assert peer.source_ip == ""


async def test_an_own_address_that_is_gone_is_a_refused_channel(make_member, silent_port):
    client = PeerClient("a")
    client.own_ip = "203.0.113.9"
    with pytest.raises(ChannelRefused, match=r"from 203\.0\.113\.9"):
        await client.open_channel(make_member("b", "127.0.0.3", silent_port), {})
