"""Opening a raw socket through a peer's API port: one upgrade request, one 101, then raw bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import NamedTuple

from viiwork.core.logline import fault
from viiwork.errors import ChannelRefused
from viiwork.limits import (
    CHANNEL_ERROR_MAX_BYTES,
    CHANNEL_HEAD_MAX_BYTES,
    CHANNEL_HEAD_TIMEOUT_S,
    PEER_CONNECT_S,
)
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import host_port
from viiwork.wire.channel import PROTOCOL

_READ_BYTES = 4096


class RawChannel(NamedTuple):
    """A connected, blocking socket on which nothing was sent or received since the 101."""

    sock: socket.socket
    headers: dict[str, str]  # of the 101, names in lower case


async def open_raw_channel(
    addr: str, port: int, path: str, headers: Mapping[str, str], body: bytes, *, source_ip: str = ""
) -> RawChannel:
    """Connect from `source_ip` ("" = any), upgrade, hand over.

    The socket is closed on every failure; raises ChannelRefused.
    """
    where = host_port(addr, port)
    head = {"Connection": "Upgrade", "Upgrade": PROTOCOL, **headers}
    request = http_request(addr, port, path, head, body)
    sock = await connected(addr, port, source_ip)
    try:
        answer = await _upgrade(sock, where, request)
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return RawChannel(sock, answer)


async def connected(addr: str, port: int, source_ip: str = "") -> socket.socket:
    """A connected socket that does not block; a zone (`fe80::1%eth1`) names the interface.

    Raises ChannelRefused.
    """
    where = host_port(addr, port)
    sock = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source_ip:
            try:
                sock.bind(_sockaddr(source_ip, 0))
            except OSError as error:
                raise ChannelRefused(f"cannot reach {where} from {source_ip}: {error}") from error
        try:
            async with asyncio.timeout(PEER_CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, _sockaddr(addr, port))
        except (OSError, TimeoutError) as error:
            why = "timed out" if isinstance(error, TimeoutError) else one_line(fault(error))
            raise ChannelRefused(f"no connection to {where}: {why}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _sockaddr(addr: str, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """What sockets take; an interface that is gone raises OSError."""
    ip, _, zone = addr.partition("%")
    return (ip, port, 0, socket.if_nametoindex(zone)) if zone else (ip, port)


async def _upgrade(sock: socket.socket, where: str, request: bytes) -> dict[str, str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CHANNEL_HEAD_TIMEOUT_S):
            await loop.sock_sendall(sock, request)
            return await _read_answer(sock, where)
    except TimeoutError as error:
        raise ChannelRefused(
            f"{where} did not answer the upgrade within {CHANNEL_HEAD_TIMEOUT_S:g} s"
        ) from error
    except OSError as error:
        raise ChannelRefused(f"connection to {where} broke during the upgrade: {error}") from error


async def _read_answer(sock: socket.socket, where: str) -> dict[str, str]:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > CHANNEL_HEAD_MAX_BYTES:
            raise ChannelRefused(f"{where} answered the upgrade with an endless head")
        chunk = await loop.sock_recv(sock, _READ_BYTES)
        if not chunk:
            raise ChannelRefused(f"{where} closed the connection instead of answering the upgrade")
        data += chunk
    status, headers = parse_head(bytes(data[:end]), where)
    rest = data[end + 4 :]
    if status != 101:
        raise ChannelRefused(await _refusal(sock, where, status, headers, rest), status)
    if headers.get("upgrade", "").lower() != PROTOCOL:
        raise ChannelRefused(
            f"{where} switched to {one_line(headers.get('upgrade', ''))!r}, not {PROTOCOL}", status
        )
    if rest:
        # The peer speaks only after us; the worker would miss these bytes.
        raise ChannelRefused(f"{where} sent data before it was spoken to", status)
    return headers


def http_request(addr: str, port: int, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A whole POST; a zone means nothing to the other side and is left out of `Host`."""
    host = host_port(addr.partition("%")[0], port)
    head = {"Host": host, "Content-Length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header of a request holds a line break")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def parse_head(head: bytes, where: str) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer, names in lower case. Raises ChannelRefused."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    is_http = len(parts) >= 2 and parts[0].startswith("HTTP/1.")
    if not is_http or len(parts[1]) != 3 or not (parts[1].isascii() and parts[1].isdigit()):
        raise ChannelRefused(f"{where} answered with {one_line(first)!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


async def _refusal(
    sock: socket.socket, where: str, status: int, headers: Mapping[str, str], rest: bytearray
) -> str:
    """The peer's own words when its error body is short and ours."""
    loop = asyncio.get_running_loop()
    length = headers.get("content-length", "")
    wanted = int(length) if length.isascii() and length.isdigit() and len(length) < 8 else 0
    message = ""
    if wanted <= CHANNEL_ERROR_MAX_BYTES:
        while len(rest) < wanted and (chunk := await loop.sock_recv(sock, _READ_BYTES)):
            rest += chunk
        try:
            message = str(json.loads(rest)["error"]["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            message = ""
    return f"{where} refused the channel with {status}" + (f": {one_line(message)}" if message else "")
