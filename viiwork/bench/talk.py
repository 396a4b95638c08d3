"""How the two ends of a benchmark talk: one line that opens each connection, then a sealed conversation.

Every connection begins with `viiwork-bench 1 WHAT VERSION [TOKEN [NUMBER]]` of whoever comes and
`viiwork-bench 1 VERSION ok|busy|denied` of the one that listens. WHAT is `look`, `control`, or with the
token that the control connection gave `probe`, `raw` or `state`. On the control connection the KV channel's
own handshake follows, so both ends prove that they hold the same mesh secret, and then questions and
answers in its encrypted frames.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from viiwork.errors import BenchError, ChannelError, NobodyListens
from viiwork.kv.jobs import Stages
from viiwork.limits import BENCH_ANSWER_S, BENCH_LINE_MAX_BYTES, BENCH_OPEN_S, BENCH_SIZE_MAX_BYTES
from viiwork.mesh.notices import one_line
from viiwork.version import VERSION
from viiwork.wire.channel import (
    HEADER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    TAG_BYTES,
    FrameType,
    Initiator,
    Opener,
    Responder,
    Sealer,
    Session,
    read_header,
)
from viiwork.wire.state import Layout, StateShape

NEAR_NAME, FAR_NAME = "bench-near", "bench-far"  # what the KV channel's two ends call themselves
WORD = "viiwork-bench"
TALK_VERSION = 1
TOKEN_BYTES = 16


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Begin(_Message, frozen=True, kw_only=True):
    """What will come: states of at most so many bytes."""

    shape: StateShape
    n_tokens: int
    n_bytes: int


class TakeResult(_Message, frozen=True, kw_only=True):
    """What became of the state that was sent last?"""


class Render(_Message, frozen=True, kw_only=True):
    """Write the state that came last as a file an engine of this layout restores."""

    target: Layout


class Drop(_Message, frozen=True, kw_only=True):
    """Forget every state."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    addr: str
    speed_mbps: int | None
    mtu: int


class Ready(_Message, frozen=True, kw_only=True):
    """The far end takes part; `host` is for the report."""

    token: str
    host: dict[str, str | int]
    addresses: list[Address]


class Received(_Message, frozen=True, kw_only=True):
    stages: Stages
    cpu_s: float


class Rendered(_Message, frozen=True, kw_only=True):
    seconds: float


class Dropped(_Message, frozen=True, kw_only=True):
    pass


class No(_Message, frozen=True, kw_only=True):
    """It cannot be done; one line for the operator of the other end."""

    message: str


Question = Begin | TakeResult | Render | Drop
Answer = Ready | Received | Rendered | Dropped | No
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)
A = TypeVar("A", bound=_Message)


# -- the opening line ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Opening:
    """What a connection is for."""

    what: str
    version: str
    token: str = ""
    n_bytes: int = 0

    def line(self) -> bytes:
        words = [WORD, str(TALK_VERSION), self.what, self.version, self.token, str(self.n_bytes or "")]
        return " ".join(word for word in words if word).encode() + b"\n"


def read_opening(line: bytes) -> Opening | None:
    """None for what is no opening of ours."""
    words = line.decode("ascii", "replace").split()
    if not 4 <= len(words) <= 6 or words[0] != WORD:
        return None
    number = words[5] if len(words) == 6 else "0"
    if words[1] != str(TALK_VERSION) or not (number.isascii() and number.isdigit() and len(number) < 20):
        return Opening("", words[3])
    if int(number) > BENCH_SIZE_MAX_BYTES:
        return None
    return Opening(words[2], words[3], words[4] if len(words) > 4 else "", int(number))


async def open_with(sock: socket.socket, opening: Opening, where: str) -> None:
    """Say what the connection is for; raises `BenchError` when the other end is not one for it."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(BENCH_OPEN_S):
            await loop.sock_sendall(sock, opening.line())
            answer = (await read_line(sock)).decode("ascii", "replace").split()
    except TimeoutError:
        raise NobodyListens(f"{where} took the connection and does not answer") from None
    except OSError as error:
        raise BenchError(f"the connection to {where} broke: {error.strerror or error}") from None
    if len(answer) != 4 or answer[0] != WORD:
        raise NobodyListens(f"what answers at {where} is no `viiwork bench kvshare --listen`")
    if answer[1] != str(TALK_VERSION) or answer[2] != VERSION:
        theirs = one_line(answer[2])[:32]
        raise BenchError(
            f"{where} runs viiwork {theirs}, this is {VERSION}: install the same version on both hosts"
        )
    if answer[3] == "busy":
        raise BenchError(f"{where} is measuring with another host; try again when that is done")
    if answer[3] != "ok":
        raise BenchError(f"{where} takes no benchmark from this address")


def answer_line(said: str) -> bytes:
    return f"{WORD} {TALK_VERSION} {VERSION} {said}\n".encode()


async def read_line(sock: socket.socket) -> bytes:
    """Up to a line's end, and no byte further; b"" when none comes within the bound."""
    loop = asyncio.get_running_loop()
    line = bytearray()
    while len(line) < BENCH_LINE_MAX_BYTES:
        if not (byte := await loop.sock_recv(sock, 1)):
            return b""
        if byte == b"\n":
            return bytes(line)
        line += byte
    return b""


# -- the conversation ------------------------------------------------------------------------------
class Talk:
    """One end of a control connection after its handshake. The socket stays the caller's."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self._sock = sock
        self._sealer = Sealer(session.send, encrypt=True, aes=session.aes)
        self._opener = Opener(session.receive, encrypt=True, aes=session.aes)
        self._seq = 0

    @classmethod
    async def initiate(cls, sock: socket.socket, key: bytes) -> Talk:
        """Raises `ChannelError` (`wrong_key`) or OSError."""
        loop = asyncio.get_running_loop()
        side = Initiator(key, NEAR_NAME, os.urandom(32), encrypt=True)
        async with asyncio.timeout(BENCH_OPEN_S):
            await loop.sock_sendall(sock, side.hello())
            answer = await _recv(sock, HELLO_BYTES)
            proof, session = side.finish(answer, FAR_NAME)
            await loop.sock_sendall(sock, proof)
        return cls(sock, session)

    @classmethod
    async def respond(cls, sock: socket.socket, keys: tuple[bytes, ...]) -> Talk:
        """Raises `ChannelError` or OSError."""
        loop = asyncio.get_running_loop()
        side = Responder(keys, FAR_NAME, os.urandom(32))
        async with asyncio.timeout(BENCH_OPEN_S):
            hello = await _recv(sock, HELLO_BYTES)
            await loop.sock_sendall(sock, side.answer(hello, NEAR_NAME, require_encrypt=True))
            session = side.finish(await _recv(sock, PROOF_BYTES))
        return cls(sock, session)

    async def ask(self, question: Question, kind: type[A]) -> A:
        """The answer; raises `BenchError` for any other."""
        try:
            async with asyncio.timeout(BENCH_ANSWER_S):
                await self._send(question)
                answer = _answers.decode(await self._receive())
        except TimeoutError:
            raise BenchError(f"the other host did not answer within {BENCH_ANSWER_S:.0f} s") from None
        except OSError as error:
            raise BenchError(f"the connection to the other host broke: {error.strerror or error}") from None
        except (msgspec.MsgspecError, ChannelError) as error:
            raise BenchError(f"the other host's answer cannot be read: {one_line(str(error))}") from None
        if isinstance(answer, No):
            raise BenchError(f"the other host says: {one_line(answer.message)}")
        if not isinstance(answer, kind):
            raise BenchError(f"the other host answers a {type(question).__name__} with something else")
        return answer

    async def next_question(self) -> Question | None:
        """None when the other end is done. Raises `ChannelError`, OSError, or `msgspec.MsgspecError`."""
        try:
            return _questions.decode(await self._receive())
        except ConnectionResetError:
            return None

    async def answer(self, answer: Answer) -> None:
        await self._send(answer)

    async def _send(self, message: Question | Answer) -> None:
        sealed = self._sealer.seal(FrameType.OFFER, msgspec.msgpack.encode(message))
        data = b"".join((sealed.header, sealed.payload, sealed.tag))
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _receive(self) -> bytes:
        header = read_header(await _recv(self._sock, HEADER_BYTES), self._seq)
        self._seq += 1
        body = bytearray(await _recv(self._sock, header.wire_len + TAG_BYTES))
        payload, _ = self._opener.open(header, body)
        return bytes(payload)


async def _recv(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        if not (piece := await loop.sock_recv(sock, size - len(data))):
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return bytes(data)
