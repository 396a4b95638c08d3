"""Which headers pass: from a client to an engine or a peer, and from an answer back to the client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from viiwork.limits import NAMES_REMEMBERED
from viiwork.wire.openai import KV_SHARE_HEADER

RawHeaders = tuple[tuple[bytes, bytes], ...]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
# Rebuilt for each hop, or of no meaning behind this node. Without `Accept-Encoding` engines answer
# uncompressed, which the scanner can read. The body was read as JSON, so it is sent as such: curl's default
# form type makes the engine cut it off at 1 MiB.
_OWN_REQUEST = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-type",
    b"expect",
    b"origin",
    b"accept-encoding",
}
_OWN_ANSWER = HOP_BY_HOP | {b"content-length"}
_NONE: frozenset[bytes] = frozenset()
_VIIWORK = b"x-viiwork-"
_CORS = b"access-control-"
_KV_SHARE = KV_SHARE_HEADER.lower().encode()


def request_head(
    raw: RawHeaders,
    *,
    method: str,
    path_qs: str,
    host: str,
    body_bytes: int,
    extra: Mapping[str, str],
    peer: bool,
) -> bytes:
    """Head of the request to an engine, or to a peer; with one clean `Content-Length` of its own."""
    dropped = _named_by_connection(raw)
    lines = [f"{method} {path_qs} HTTP/1.1\r\nHost: {host}\r\n".encode("utf-8", "surrogateescape")]
    for name, value in raw:
        if _goes_up(name, peer) and not (dropped and name.lower() in dropped):
            lines.append(b"%b: %b\r\n" % (name, value))
    for key, text in extra.items():
        lines.append(f"{key}: {text}\r\n".encode("latin-1"))
    lines.append(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % body_bytes)
    return b"".join(lines)


def answer_headers(raw: RawHeaders, *, peer: bool) -> list[bytes]:
    """Header lines of an upstream's answer that the client may see, framing excepted."""
    dropped = _named_by_connection(raw)
    lines = []
    for name, value in raw:
        if not _goes_down(name, peer) or (dropped and name.lower() in dropped):
            continue
        if len(name) == 4 and name.lower() == b"vary":
            value = b", ".join(part for part in _list(value) if part.lower() != b"origin")
            if not value:
                continue
        lines.append(b"%b: %b\r\n" % (name, value))
    return lines


def header(raw: RawHeaders, wanted: bytes) -> bytes:
    """First value of a header, b"" when it is not there; `wanted` in lower case."""
    for name, value in raw:
        if name.lower() == wanted:
            return value
    return b""


def safe_value(text: str) -> str:
    """`text` as a header value: bytes outside printable ASCII are percent-encoded."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte != 0x25 else f"%{byte:02X}"
        for byte in text.encode("utf-8", "surrogateescape")
    )


@lru_cache(maxsize=NAMES_REMEMBERED)
def _goes_up(name: bytes, peer: bool) -> bool:
    """Whether a client's header may go to an engine, or to a peer."""
    low = name.lower()
    if low in _OWN_REQUEST or low.startswith(_CORS):
        return False
    # What the mesh says about a request is ours to say; only this wish of the client travels on.
    return not low.startswith(_VIIWORK) or (peer and low == _KV_SHARE)


@lru_cache(maxsize=NAMES_REMEMBERED)
def _goes_down(name: bytes, peer: bool) -> bool:
    """Whether a header of an engine's answer, or of a peer's, may go to the client."""
    low = name.lower()
    if low in _OWN_ANSWER or low.startswith((_CORS, _VIIWORK)):
        return False
    return peer or low != b"x-gpu-backend"


def _named_by_connection(raw: RawHeaders) -> frozenset[bytes]:
    """Headers that `Connection` declares to be for one hop only."""
    named = _NONE
    for name, value in raw:
        if len(name) == 10 and name.lower() == b"connection":
            named |= {part.lower() for part in _list(value)}
    return named


def _list(value: bytes) -> Iterable[bytes]:
    return filter(None, (part.strip() for part in value.split(b",")))
