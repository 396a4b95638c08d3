"""Sends bytes to a node and judges whatever it answers."""

from __future__ import annotations

import io
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse

PATIENCE_S = 60.0
_DOCUMENTED_5XX = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    usable: bool  # the connection may carry another request


def ask(address: tuple[str, int], request: bytes, method: str) -> Answer:
    """Send one well-formed request, read its answer, and see that the connection is good for another one."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        sock.sendall(request)
        answer = _read(sock, method)
        if answer.usable:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert _read(sock, "GET").status == 200
    return answer


def say(address: tuple[str, int], data: bytes) -> list[Answer]:
    """Send bytes of any kind and the end of them; the answers that came whole."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        with suppress(ConnectionError):  # refused before all was sent
            sock.sendall(data)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        got = bytearray()
        with suppress(ConnectionError):
            while piece := sock.recv(65536):
                got += piece
    return _split(bytes(got))


def judge(path: str, method: str, answer: Answer) -> None:
    """Never a fault of ours, and every error in the shape OpenAI's clients read."""
    assert answer.status < 500 or answer.status in _DOCUMENTED_5XX, answer
    assert b"Traceback" not in answer.body and b'File "' not in answer.body
    if answer.status < 400 or method.upper() == "HEAD":
        return
    if answer.status == 503 and path.strip("/") == "health":
        assert json.loads(answer.body)["status"] == "unhealthy"
        return
    assert answer.headers.get("content-type", "").startswith("application/json"), answer
    error = json.loads(answer.body)["error"]
    assert all(isinstance(error[key], str) and error[key] for key in ("message", "type", "code")), answer
    assert error["code"] != "internal"


def _read(sock: socket.socket, method: str) -> Answer:
    with HTTPResponse(sock, method=method) as response:  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if response.status == 101:
            return Answer(101, headers, b"", usable=False)
        if (
            headers.get("content-type", "").startswith("text/event-stream")
            and "x-viiwork-node" not in headers
        ):
            return Answer(response.status, headers, b"", usable=False)  # it never ends
        body = response.read()
        return Answer(response.status, headers, body, usable=not response.will_close)


class _Received(io.BytesIO):
    """Received bytes in the place of a socket; stays open from one answer to the next."""

    def makefile(self, mode: str) -> io.BytesIO:
        return self

    def close(self) -> None:
        pass


def _split(data: bytes) -> list[Answer]:
    answers = []
    source = _Received(data)
    while source.tell() < len(data):
        rest = data[source.tell() :]
        assert rest.startswith(b"HTTP/1."), f"no answer of HTTP: {rest[:200]!r}"
        response = HTTPResponse(source)  # type: ignore[arg-type]
        try:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            body = b"" if response.status == 101 else response.read()
        except (HTTPException, ValueError):
            break  # cut off when the client left
        answers.append(Answer(response.status, headers, body, usable=False))
        if response.status == 101:
            break
    return answers
