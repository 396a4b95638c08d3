"""A receiver written from docs/replication.md alone: blocking, in memory, one transfer after the other."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import msgspec
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

CONTEXT = "viiwork kv channel v2"


def derived(context: str, data: bytes) -> bytes:
    return blake3(data, derive_key_context=context).digest()


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the sender left")
        data += piece
    return data


class PlainReceiver:
    """Holds the rows of one session: `rows[cache][pos]` is a list of one row a segment."""

    def __init__(self, secret: str, name: str) -> None:
        self.key, self.name = derived(CONTEXT, secret.encode()), name
        self.tokens = b""
        self.rows: list[dict[int, list[bytes]]] = []
        self.generation: tuple[int, str] | None = None

    def serve(self, sock: socket.socket) -> dict[str, Any]:
        """One whole conversation; the offer."""
        self.sock = sock
        self._shake_hands()
        offer = self._message(1)
        shape = offer["shape"]["caches"]
        self.widths = [[row for _, row in (*cache["k"], *cache["v"])] for cache in shape]
        n, needed = offer["n_tokens"], offer["needed"]
        have = self._have(offer)
        self._say(2, msgspec.msgpack.encode(have))
        keep = self._message(4)["keep"]
        assert 0 <= keep <= min(have["n"], n)
        lows = have["lows"] if keep else [0] * len(shape)
        starts = [keep if low <= need <= keep else need for low, need in zip(lows, needed, strict=True)]
        self.tokens = self.tokens[: 4 * keep]
        while len(self.tokens) < 4 * n:
            header, payload = self._frame(5)
            assert header["offset"] == len(self.tokens) // 4 and len(payload) == 4 * header["rows"]
            self.tokens += payload
        assert blake3(self.tokens).digest() == offer["tokens_digest"]
        if not keep:
            self.rows = [{} for _ in shape]
        for at in reversed(range(len(shape))):
            self.rows[at] = {pos: row for pos, row in self.rows[at].items() if pos < starts[at]}
            self._take_rows(at, starts[at], n)
        commit = self._message(8, raw=True)
        said = msgspec.msgpack.decode(commit)
        for at, start in enumerate(starts):
            group = self._group(at)
            digests = [
                self._digest(at, max(first, needed[at]), min(first + group, n))
                for first in range(start // group * group, n, group)
            ]
            assert said["groups"][at] == (b"".join(digests) if start < n else b"")
        assert said["blobs"] == []
        self.generation = offer["generation"], offer["source"]
        self._say(9, blake3(commit).digest())
        return {**offer, "kept": keep}

    # -- what is held

    def _have(self, offer: dict[str, Any]) -> dict[str, Any]:
        held = len(self.tokens) // 4
        marks = {(mark["generation"], mark["source"]): mark["keep"] for mark in offer.get("known", [])}
        sure = min(held, marks.get(self.generation, 0)) if self.generation else 0
        if not sure:
            return {"n": 0}
        common = 0
        while (common + 256) * 4 <= len(self.tokens):
            digest = blake3(self.tokens[: (common + 256) * 4]).digest()[:16]
            if offer["prefix"][common // 256 * 16 :][:16] != digest:
                break
            common += 256
        common = min(common, sure)
        lows = [min(rows) for rows in self.rows]
        tail = self.tokens[4 * common :][: 4 * 256]
        return {"n": sure, "lineage": True, "lows": lows, "common": common, "tail": tail}

    def _group(self, cache: int) -> int:
        size, rows = sum(self.widths[cache]), 256
        while rows > 1 and rows * size > 2 * 1024 * 1024:
            rows //= 2
        return rows

    def _take_rows(self, cache: int, start: int, n: int) -> None:
        pos, group = start, self._group(cache)
        while pos < n:
            header, payload = self._frame(6)
            count = min(group - pos % group, n - pos)
            assert (header["segment"], header["offset"], header["rows"]) == (cache, pos, count)
            assert len(payload) == count * sum(self.widths[cache])
            for i in range(count):
                at, row = 0, []
                for width in self.widths[cache]:
                    row.append(payload[at + i * width : at + (i + 1) * width])
                    at += count * width
                self.rows[cache][pos + i] = row
            pos += count

    def _digest(self, cache: int, low: int, high: int) -> bytes:
        segments = range(len(self.widths[cache]))
        rows = (self.rows[cache][pos][at] for at in segments for pos in range(low, high))
        return blake3(b"".join(rows)).digest()[:16]

    # -- the channel

    def _shake_hands(self) -> None:
        hello = exactly(self.sock, 328)
        body, proof = hello[:296], hello[296:]
        assert body[:6] == b"VWKV\x02\x01" and proof == blake3(b"hello\0" + body, key=self.key).digest()
        (flags,) = struct.unpack("<H", body[6:8])
        self.encrypted = bool(flags & 1)
        private = X25519PrivateKey.from_private_bytes(os.urandom(32))
        name = self.name.encode()
        mine = struct.pack("<4sBBH", b"VWKV", 2, 2, flags & 1)
        mine += private.public_key().public_bytes_raw() + bytes([len(name)]) + name.ljust(255, b"\0")
        shared = private.exchange(X25519PublicKey.from_public_bytes(body[8:40]))
        root = blake3(shared + blake3(body + mine).digest(), key=self.key).digest()

        def key(what: str) -> bytes:
            return derived(f"{CONTEXT} {what}", root)

        self.sock.sendall(mine + key("responder proof"))
        assert exactly(self.sock, 32) == key("initiator proof")
        self.out_mac, self.out_aead = key("responder mac"), ChaCha20Poly1305(key("responder aead"))
        self.in_mac, self.in_aead = key("initiator mac"), ChaCha20Poly1305(key("initiator aead"))
        self.in_seq = self.out_seq = 0

    def _frame(self, wanted: int) -> tuple[dict[str, int], bytes]:
        head = exactly(self.sock, 48)
        names = ("type", "codec", "flags", "seq", "offset", "item", "segment", "rows", "raw", "wire")
        magic, *values = struct.unpack("<4sBBHQQQIIII", head)
        header = dict(zip(names, values, strict=True))
        assert magic == b"VWK2" and header["type"] == wanted and header["seq"] == self.in_seq
        payload, tag = exactly(self.sock, header["wire"]), exactly(self.sock, 16)
        if self.encrypted:
            payload = self.in_aead.decrypt(self.in_seq.to_bytes(12, "little"), payload + tag, head)
        else:
            assert tag == blake3(head + blake3(payload).digest(), key=self.in_mac).digest()[:16]
        self.in_seq += 1
        if header["codec"]:
            payload = zstandard.decompress(payload, max_output_size=header["raw"])
            if (width := header["codec"]) > 1:
                n = len(payload) // width
                payload = bytes(payload[plane * n + i] for i in range(n) for plane in range(width))
        assert len(payload) == header["raw"]
        return header, payload

    def _message(self, wanted: int, *, raw: bool = False) -> Any:
        payload = self._frame(wanted)[1]
        return payload if raw else msgspec.msgpack.decode(payload)

    def _say(self, type_: int, payload: bytes) -> None:
        size = len(payload)
        head = struct.pack("<4sBBHQQQIIII", b"VWK2", type_, 0, 0, self.out_seq, 0, 0, 0, 0, size, size)
        if self.encrypted:
            body = self.out_aead.encrypt(self.out_seq.to_bytes(12, "little"), payload, head)
        else:
            body = payload + blake3(head + blake3(payload).digest(), key=self.out_mac).digest()[:16]
        self.out_seq += 1
        self.sock.sendall(head + body)
