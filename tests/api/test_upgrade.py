"""The opening of a kv channel, and the socket that comes out of it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.fakes.node import FakeChannels, FakeDispatcher, serving
from tests.fakes.rawclient import RawClient

UPGRADE = ("Connection: Upgrade", "Upgrade: viiwork-kv/2")


async def test_after_the_101_the_socket_is_a_plain_one_in_both_directions():
    channels = FakeChannels()
    async with serving(FakeDispatcher([]), channels=channels) as api, RawClient(api.port) as client:
        client.post("/v1/kv/channel", b"yes", *UPGRADE)
        status, headers = await client.head()
        fields = dict(headers)
        assert status == 101
        assert (fields["Upgrade"], fields["Connection"]) == ("viiwork-kv/2", "Upgrade")
        assert fields["X-Viiwork-Kv-Grant"] == "g1"
        ((admitted, sock),) = channels.taken
        assert admitted == b"yes"
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        client.send(b"\x00raw\xff" * 100_000)
        got = b""
        while len(got) < 500_000:
            got += await loop.sock_recv(sock, 65536)
        assert got == b"\x00raw\xff" * 100_000
        await loop.sock_sendall(sock, b"back")
        assert await client.reader.readexactly(4) == b"back"
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        assert await client.closed() == b""


@pytest.mark.parametrize(
    ("body", "lines", "status"),
    [
        (b"no", UPGRADE, 401),
        (b"yes", (), 400),
        (b"yes", ("Connection: Upgrade", "Upgrade: websocket"), 400),
        (b"y" * 100_000, UPGRADE, 413),
    ],
)
async def test_an_offer_that_is_not_admitted_gets_a_plain_answer(body, lines, status):
    channels = FakeChannels()
    async with serving(FakeDispatcher([]), channels=channels) as api, RawClient(api.port) as client:
        client.post("/v1/kv/channel", body, *lines)
        reply = await client.reply()
    assert reply.status == status and "error" in reply.json
    assert not channels.taken


async def test_a_node_without_kv_share_has_no_such_path():
    async with serving(FakeDispatcher([])) as api, RawClient(api.port) as client:
        client.post("/v1/kv/channel", b"yes", *UPGRADE)
        assert (await client.reply()).status == 404
