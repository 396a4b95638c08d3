"""Open-loop load: what is to be sent is fixed beforehand, and is sent in time whatever becomes of it.

`plan` draws the requests, `send` sends them over plain sockets and tells how each one ended, `build_engine`
compiles the engine that serves them and `read_record` reads what that engine did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

SOURCE = Path(__file__).with_name("load_engine.c")
LONGEST_S = 120.0  # no request of a plan takes that long: one that does hangs
CHATS = "/v1/chat/completions"


def build_engine(folder: Path) -> Path:
    """Compile the engine; the answer is its program."""
    program = folder / "load-engine"
    subprocess.run(["cc", "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program


def engine_model(folder: Path, program: Path, node: str, model: str, slots: int) -> str:
    """An entry of `models:` whose engine is that program and records what it does."""
    weights = folder / f"{model}.gguf"
    weights.write_bytes(b"GGUF")
    record = record_file(folder, node, model)
    return (
        f"  - {{name: {model}, engine: llamacpp, path: {weights}, context: 1024, parallel: {slots}, "
        f"args: ['--record', '{record}'], llamacpp: {{binary: {program}, threads: 1}}}}\n"
    )


def record_file(folder: Path, node: str, model: str) -> Path:
    return folder / f"{node}-{model}.record"


@dataclass(frozen=True, slots=True)
class Ran:
    """What an engine says about one chat; seconds of the monotonic clock, which all processes share."""

    tag: str
    node: str
    model: str
    slot: int
    started_at: float
    ended_at: float
    how: Literal["done", "gone", "clash"]


def read_record(folder: Path, node: str, model: str) -> list[Ran]:
    file = record_file(folder, node, model)
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        tag, slot, started, ended, how = line.rsplit(maxsplit=4)
        ran = Ran(
            tag,
            node,
            model,
            int(slot),
            float(started) / 1000,
            float(ended) / 1000,
            cast("Literal['done']", how),
        )
        found.append(ran)
    return found


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: when it comes, where, and what it wants."""

    tag: str
    at_s: float
    entry: str
    model: str
    hold_s: float
    prefill_s: float
    streamed: bool
    session: str
    leaves_after_s: float | None = None  # its client does not wait longer than that for the first byte
    query: str = ""  # of the URL, with its question mark


def plan(
    rng: random.Random,
    *,
    duration_s: float,
    per_s: float,
    entries: Sequence[str],
    models: Sequence[str],
    hold_s: float,
    leavers: float = 0.0,
    patience_s: float = 5.0,
) -> list[Planned]:
    """Poisson arrivals; service times are uniform between a third and five thirds of `hold_s`.

    Half of the requests are streamed, half belong to one of 64 sessions, whose turns come in no order.
    """
    found = []
    at_s = rng.expovariate(per_s)
    while at_s < duration_s:
        hold = rng.uniform(hold_s / 3, hold_s * 5 / 3)
        found.append(
            Planned(
                tag=f"q{len(found)}",
                at_s=at_s,
                entry=rng.choice(entries),
                model=rng.choice(models),
                hold_s=hold,
                prefill_s=hold * rng.uniform(0.1, 0.5),
                streamed=rng.random() < 0.5,
                session=f"session-{rng.randrange(64)}" if rng.random() < 0.5 else "",
                leaves_after_s=rng.uniform(0.0, patience_s) if rng.random() < leavers else None,
            )
        )
        at_s += rng.expovariate(per_s)
    return found


@dataclass(slots=True)
class Sent:
    """A request that was sent, and how it ended."""

    planned: Planned
    sent_at: float
    late_s: float = 0.0  # behind its plan
    status: int = 0  # 0 = no answer came
    code: str = ""  # `error.code` of a refusal
    headers: Mapping[str, str] | None = None
    token_s: float | None = None  # until the first content
    ended_at: float = 0.0
    end: Literal["", "whole", "cut", "left", "unconnected", "hung"] = ""

    @property
    def served(self) -> bool:
        return self.status == 200 and self.end == "whole"

    @property
    def refused(self) -> bool:
        return self.status == 429 and self.end == "whole"

    @property
    def failed(self) -> bool:
        """Neither served, nor told to come back, nor left on purpose."""
        return not (self.served or self.refused or self.end == "left")

    def header(self, name: str) -> str:
        return (self.headers or {}).get(name.lower(), "")

    @property
    def queued_s(self) -> float:
        return float(self.header("X-Viiwork-Queued-Ms") or 0) / 1000


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._head = b""
        self._body_bytes = 0
        self._newest = b""  # of the body
        self._chunked = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_request(self._sent.planned))
        patience_s = self._sent.planned.leaves_after_s
        if patience_s is not None:
            asyncio.get_running_loop().call_later(patience_s, self._leave)

    def data_received(self, data: bytes) -> None:
        if not self._sent.status:
            self._head += data
            head, mark, data = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            self._take_head(head.decode("latin-1"))
        if self._sent.token_s is None and b'"content":"' in data:
            self._sent.token_s = time.monotonic() - self._sent.sent_at
        self._body_bytes += len(data)
        self._newest = (self._newest + data)[-1024:]

    def connection_lost(self, exc: Exception | None) -> None:
        sent = self._sent
        sent.ended_at = time.monotonic()
        if not sent.end:
            sent.end = "whole" if sent.status and self._whole() else "cut"
        if sent.status >= 400:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                sent.code = json.loads(self._newest)["error"]["code"]
        if not self.ended.done():
            self.ended.set_result(None)

    def hang_up(self) -> None:
        self._sent.end = "hung"
        self._transport.abort()

    def _leave(self) -> None:
        """Half of the impatient close their socket, half reset it."""
        if self._sent.status or self._transport.is_closing():
            return
        self._sent.end = "left"
        if self._sent.planned.streamed:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _take_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        self._sent.status = int(first.split()[1])
        self._sent.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        self._chunked = "chunked" in self._sent.header("Transfer-Encoding")

    def _whole(self) -> bool:
        if not self._chunked:
            return self._body_bytes == int(self._sent.header("Content-Length") or -1)
        return self._newest.endswith(b"0\r\n\r\n") and b"data: [DONE]\n\n" in self._newest


def _request(planned: Planned) -> bytes:
    body = {
        "model": planned.model,
        "tag": planned.tag,
        "hold_ms": round(planned.hold_s * 1000, 3),
        "prefill_ms": round(planned.prefill_s * 1000, 3),
        "stream": planned.streamed,
        "messages": [{"role": "user", "content": f"What is the answer to {planned.tag}?"}],
    }
    data = json.dumps(body, separators=(",", ":")).encode()
    session = f"X-Session-Id: {planned.session}\r\n" if planned.session else ""
    head = f"POST {CHATS}{planned.query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{session}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def send_one(planned: Planned, address: tuple[str, int], late_s: float = 0.0) -> Sent:
    """Send one request now and wait for its end."""
    loop = asyncio.get_running_loop()
    sent = Sent(planned, time.monotonic(), late_s)
    try:
        _, exchange = await loop.create_connection(lambda: _Exchange(sent), *address)
    except OSError:
        sent.end, sent.ended_at = "unconnected", time.monotonic()
        return sent
    try:
        async with asyncio.timeout(LONGEST_S):
            await exchange.ended
    except TimeoutError:
        exchange.hang_up()
    return sent


async def send(requests: Iterable[Planned], addresses: Mapping[str, tuple[str, int]]) -> list[Sent]:
    """Send each request at its time; the answer is what became of all, in their order."""
    began = time.monotonic()
    tasks = []
    for planned in requests:
        await asyncio.sleep(max(planned.at_s - (time.monotonic() - began), 0))
        late_s = time.monotonic() - began - planned.at_s
        tasks.append(asyncio.create_task(send_one(planned, addresses[planned.entry], late_s)))
    return [await task for task in tasks]
