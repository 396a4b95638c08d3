"""Which headers pass: from a client to an engine or a peer, and from an answer back to the client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
# uncompressed, which the scanner can read.
_OWN_REQUEST = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"origin", b"accept-encoding"}
_OWN_ANSWER = HOP_BY_HOP | {b"content-length"}
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
        low = name.lower()
        if low in _OWN_REQUEST or low in dropped or low.startswith(_CORS):
            continue
        # What the mesh says about a request is ours to say; only this wish of the client travels on.
        if low.startswith(_VIIWORK) and not (peer and low == _KV_SHARE):
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    for key, text in extra.items():
        lines.append(f"{key}: {text}\r\n".encode("latin-1"))
    lines.append(b"Content-Length: %d\r\n\r\n" % body_bytes)
    return b"".join(lines)


def answer_headers(raw: RawHeaders, *, peer: bool) -> list[bytes]:
    """Header lines of an upstream's answer that the client may see, framing excepted."""
    dropped = _named_by_connection(raw)
    lines = []
    for name, value in raw:
        low = name.lower()
        if low in _OWN_ANSWER or low in dropped or low.startswith(_CORS):
            continue
        if low.startswith(_VIIWORK) or (low == b"x-gpu-backend" and not peer):
            continue
        if low == b"vary":
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


def _named_by_connection(raw: RawHeaders) -> frozenset[bytes]:
    """Headers that `Connection` declares to be for one hop only."""
    names: set[bytes] = set()
    for name, value in raw:
        if len(name) == 10 and name.lower() == b"connection":
            names.update(part.lower() for part in _list(value))
    return frozenset(names)


def _list(value: bytes) -> Iterable[bytes]:
    return filter(None, (part.strip() for part in value.split(b",")))
