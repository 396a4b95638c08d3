"""A scriptable engine: a plain socket server that can delay, hang, die in mid-byte and send anything.

It counts sockets and requests and notices when the other side leaves. A script is a coroutine that
gets the connection and the request it should answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

CHAT_ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {
        "completion_tokens": 4,
        "prompt_tokens": 10,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 7},
    },
    "id": "chatcmpl-1",
    "timings": {"cache_n": 7, "prompt_n": 3, "predicted_n": 4},
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    connection: int

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[["Conn", Seen], Awaitable[None]]


def delta(text: str) -> bytes:
    """A chat chunk as llama.cpp sends it."""
    chunk = {"choices": [{"finish_reason": None, "index": 0, "delta": {"content": text}}], "id": "c1"}
    return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


ROLE = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}]}\n\n'
LAST = (
    b'data: {"choices":[],"usage":{"prompt_tokens":10},'
    b'"timings":{"cache_n":7,"prompt_n":3,"predicted_n":4}}\n\n'
)
DONE = b"data: [DONE]\n\n"


class Conn(asyncio.Protocol):
    """One accepted socket."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport
        self.closed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(0)
        self.number = self._engine._opened(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._writable.set()
        self._engine._lost(self, running=self._task is not None)

    def _next(self) -> None:
        if self._task is None and (seen := self._parse()) is not None:
            self._engine.requests.append(seen)
            self._engine._changed.set()
            self._task = asyncio.create_task(self._run(seen))

    async def _run(self, seen: Seen) -> None:
        try:
            await self._engine.script(self, seen)
        finally:
            self._task = None
        self._engine.served += 1
        if not self.transport.is_closing():
            self._next()

    def _parse(self) -> Seen | None:
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = tuple((k, v.strip()) for k, _, v in (line.partition(":") for line in lines))
        lengths = [int(v) for k, v in headers if k.lower() == "content-length"]
        length = lengths[0] if lengths else 0
        if len(rest) < length and self._engine.parse_whole:
            return None
        if len(rest) < length:
            self.transport.pause_reading()
        self._buffer = rest[length:]
        return Seen(method, target, headers, rest[:length], self.number)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered here."""
        return self._task is None

    # -- what scripts use ----------------------------------------------------------------------
    def send(self, data: bytes) -> None:
        self.transport.write(data)

    async def drain(self) -> None:
        """Wait until all is handed to the kernel, or the other side left."""
        await self._writable.wait()

    def answer(
        self, status: int, body: bytes, headers: Sequence[str] = (), kind: str = "application/json"
    ) -> None:
        lines = [
            f"HTTP/1.1 {status} Whatever",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            *headers,
        ]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def json(self, status: int, value: Any, headers: Sequence[str] = ()) -> None:
        self.answer(status, json.dumps(value).encode(), headers)

    def stream_head(self, headers: Sequence[str] = ()) -> None:
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked", *headers]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.send(b"0\r\n\r\n")

    def fin(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


async def answer_all(conn: Conn, seen: Seen) -> None:
    """A healthy engine: chat answers, streamed when asked."""
    if seen.method == "GET":
        conn.json(200, {"status": "ok"} if seen.target == "/health" else [])
    elif b'"stream":true' in seen.body:
        conn.stream_head()
        for data in (ROLE, delta("hel"), delta("lo"), LAST, DONE):
            conn.chunk(data)
        conn.end()
    else:
        conn.json(200, CHAT_ANSWER)


@dataclass
class FakeEngine:
    """`async with FakeEngine() as engine:`; then change `engine.script` at will."""

    script: Script = answer_all
    host: str = "127.0.0.1"
    port: int = 0
    requests: list[Seen] = field(default_factory=list)
    n_opened: int = 0
    n_left_early: int = 0  # sockets that closed while a script ran
    served: int = 0
    parse_whole: bool = True  # False: a script starts when the head is there, and the rest is not read
    open: set[Conn] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Conn(self), self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: stop listening and drop every socket."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [conn._task for conn in self.open if conn._task is not None]
        for task in tasks:
            task.cancel()
        for conn in list(self.open):
            conn.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.until(lambda: not self.open)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until something that happened here makes the condition true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _opened(self, conn: Conn) -> int:
        self.n_opened += 1
        self.open.add(conn)
        self._changed.set()
        return self.n_opened

    def _lost(self, conn: Conn, running: bool) -> None:
        self.open.discard(conn)
        self.n_left_early += running
        self._changed.set()
