"""The asking side of direct links: a peer's table of addresses, and the challenge at each of them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import NamedTuple

from viiwork.core.paths import LinkAddress, Path
from viiwork.errors import ChannelRefused, MeshError, RequestError
from viiwork.limits import (
    CHANNEL_HEAD_MAX_BYTES,
    LINK_ANSWER_MAX_BYTES,
    LINK_PROBE_S,
)
from viiwork.mesh.channel import connected, http_request, parse_head
from viiwork.mesh.notices import one_line
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member, host_port
from viiwork.wire.probe import (
    LINK_PAD,
    NONCE_BYTES,
    PATHS_PATH,
    PROBE_PATH,
    Probe,
    Table,
    decode_answer,
    decode_table,
    encode,
    encode_table,
    is_proof,
)

_READ_BYTES = 64 * 1024


class _Answered(NamedTuple):
    body: bytes
    rtt_s: float


class DirectClient:
    """Questions to one address of a peer, each on a connection of its own."""

    def __init__(self, me: str, client: PeerClient, keys: tuple[bytes, ...]) -> None:
        self._me = me
        self._client = client
        self._keys = keys

    async def exchange(self, member: Member, run: str, own: list[LinkAddress]) -> Table:
        """Tell the member this node's addresses at its mesh address, and hear its. Raises `MeshError`."""
        body = encode_table(self._me, run, own)
        source = self._client.source_ip
        answered = await self._ask(member.addr, member.api_port, source, PATHS_PATH, body)
        try:
            table = decode_table(answered.body)
        except RequestError as error:
            raise MeshError(one_line(f"{member.api}: {error}")) from error
        if table.node != member.name:
            raise MeshError(f"{member.api} answers as {one_line(table.node)!r}, not {member.name!r}")
        return table

    async def probe(self, member: Member, run: str, path: Path, *, source: str) -> float:
        """Seconds of a round trip, if the member and nobody else is at the path's other end.

        Raises `MeshError`.
        """
        probe = Probe(
            to=member.name,
            addr=path.addr.partition("%")[0],
            nonce=os.urandom(NONCE_BYTES).hex(),
            pad=LINK_PAD,
        )
        answered = await self._ask(path.addr, member.api_port, source, PROBE_PATH, encode(probe))
        where = host_port(path.addr, member.api_port)
        try:
            answer = decode_answer(answered.body)
        except RequestError as error:
            raise MeshError(one_line(f"{where}: {error}")) from error
        if not is_proof(answer, self._keys, asks=self._me, probe=probe, run=run):
            raise MeshError(f"{where} does not prove to be {member.name!r}")
        return answered.rtt_s

    async def ask(self, member: Member, target: str, body: bytes, limit_s: float) -> bytes:
        """A signed question at the member's mesh address, and its answer. Raises `MeshError`."""
        source = self._client.source_ip
        return (await self._ask(member.addr, member.api_port, source, target, body, limit_s)).body

    async def _ask(
        self, addr: str, port: int, source: str, target: str, body: bytes, limit_s: float = LINK_PROBE_S
    ) -> _Answered:
        headers = {"Connection": "close", **self._client.sign("POST", target, body)}
        request = http_request(addr, port, target, headers, body)
        try:
            async with asyncio.timeout(limit_s):
                begun = time.perf_counter()
                sock = await connected(addr, port, source)
                try:
                    rtt_s = time.perf_counter() - begun
                    await asyncio.get_running_loop().sock_sendall(sock, request)
                    answer = await _read(sock, host_port(addr, port))
                finally:
                    sock.close()
        except TimeoutError as error:
            where = host_port(addr, port)
            raise MeshError(f"no answer from {where} within {limit_s:g} s") from error
        except OSError as error:
            raise MeshError(f"{host_port(addr, port)}: {one_line(str(error))}") from error
        return _Answered(answer, rtt_s)


async def _read(sock: socket.socket, where: str) -> bytes:
    """Body of the answer."""
    loop = asyncio.get_running_loop()
    data = bytearray(await loop.sock_recv(sock, _READ_BYTES))
    while data and (end := data.find(b"\r\n\r\n")) < 0 and len(data) <= CHANNEL_HEAD_MAX_BYTES:
        if not (piece := await loop.sock_recv(sock, _READ_BYTES)):
            break
        data += piece
    if (end := data.find(b"\r\n\r\n")) < 0:
        raise MeshError(f"{where} does not answer as a node does")
    try:
        status, headers = parse_head(bytes(data[:end]), where)
    except ChannelRefused as error:
        raise MeshError(str(error)) from error
    length = headers.get("content-length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 10 else -1
    if not 0 <= size <= LINK_ANSWER_MAX_BYTES:
        raise MeshError(f"{where} answers with {status} and a body of no fit size")
    while len(data) < end + 4 + size:
        if not (piece := await loop.sock_recv(sock, _READ_BYTES)):
            raise MeshError(f"{where} broke off in its answer")
        data += piece
    body = bytes(data[end + 4 : end + 4 + size])
    if status != 200:
        raise MeshError(f"{where} answers with {status}: {one_line(body.decode(errors='replace'))[:150]}")
    return body
