"""A client of plain sockets: sends exactly what it is told and reads exactly what comes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; `whole` says whether its framing came to its end."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    whole: bool

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def value(self, name: str) -> str:
        return ", ".join(self.values(name))

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """`async with RawClient(port) as client:`"""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._address = (host, port)
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> RawClient:
        self.reader, self.writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: Any, *headers: str) -> None:
        """Send a request with one `Content-Length`."""
        raw = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *headers]
        self.send("\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + raw)

    def get(self, path: str, *headers: str, method: str = "GET") -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
        self.send("\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n")

    async def head(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        block = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = block[:-4].decode("utf-8", "surrogateescape").split("\r\n")
        return int(first.split(" ")[1]), tuple(
            (key, value.strip()) for key, _, value in (line.partition(":") for line in lines)
        )

    async def reply(self, *, head_only: bool = False) -> Reply:
        """Read one whole answer, or what there is of it."""
        status, headers = await self.head()
        fields = {key.lower(): value for key, value in headers}
        if head_only or status in (204, 304) or status < 200:
            return Reply(status, headers, b"", True)
        body = bytearray()
        try:
            if fields.get("transfer-encoding") == "chunked":
                while (chunk := await self.chunk()) is not None:
                    body += chunk
                return Reply(status, headers, bytes(body), True)
            if "content-length" in fields:
                length = int(fields["content-length"])
                while len(body) < length:
                    piece = await self.reader.read(length - len(body))
                    if not piece:
                        return Reply(status, headers, bytes(body), False)
                    body += piece
                return Reply(status, headers, bytes(body), True)
            while piece := await self.reader.read(65536):
                body += piece
            return Reply(status, headers, bytes(body), True)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Reply(status, headers, bytes(body), False)

    async def chunk(self) -> bytes | None:
        """One chunk's data; None at the end of the body."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2] if size else None

    async def closed(self) -> bytes:
        """Read until the other side closes; answers with what came."""
        try:
            return await self.reader.read(-1)
        except ConnectionError:
            return b""

    def fin(self) -> None:
        """Half-close: nothing more will be sent."""
        self.writer.write_eof()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def leave(self) -> None:
        """Close as a program that ends does."""
        self.writer.close()
