"""What nodes tell one another of their addresses, and the challenge that proves which node has one.

`POST /v1/kv/paths` takes a `Table` and answers with one: each side learns where the other may be reached.
`POST /v1/kv/probe`, sent to one of those addresses, takes a `Probe` and answers with an `Answer`. Its proof
is HMAC-SHA256 over the label and then, each after its length in two bytes: who asks, who is asked, the
address it was asked at, the nonce, and the run of the one asked. The key is the mesh secret; in an open mesh
it is that run, which only members were told.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Annotated

import msgspec

from viiwork.core.paths import LinkAddress, PeerAddress
from viiwork.errors import RequestError
from viiwork.limits import LINK_ADDRESSES_MAX, LINK_ANSWER_MAX_BYTES, LINK_PAD_BYTES, NODE_NAME_MAX_BYTES

PATHS_PATH = "/v1/kv/paths"
PROBE_PATH = "/v1/kv/probe"
NONCE_BYTES = 16
RUN_BYTES = 16
SPEED_MAX_MBPS = 10_000_000  # 10 Tb/s; a larger one is a fault of its sender

LINK_PAD = "x" * LINK_PAD_BYTES  # of both a probe and its answer

_LABEL = b"viiwork kv probe 1\0"
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NODE_NAME_MAX_BYTES)]
_Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Addr = Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
_Pad = Annotated[str, msgspec.Meta(max_length=LINK_ANSWER_MAX_BYTES)]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One address of the sender's."""

    addr: _Addr
    mbps: Annotated[int, msgspec.Meta(ge=1, le=SPEED_MAX_MBPS)] | None = None
    mtu: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """All of the sender's addresses that may be an end of a direct link."""

    node: _Name
    run: _Hex  # of this process, made of 16 random bytes
    addresses: Annotated[tuple[Told, ...], msgspec.Meta(max_length=LINK_ADDRESSES_MAX)]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Are you this node, at this address? `pad` makes packets of every size cross the path."""

    to: _Name
    addr: _Addr
    nonce: _Hex
    pad: _Pad = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Yes, and here is the proof."""

    node: _Name
    proof: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    pad: _Pad = ""


_tables = msgspec.json.Decoder(Table)
_probes = msgspec.json.Decoder(Probe)
_answers = msgspec.json.Decoder(Answer)
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode_table(node: str, run: str, addresses: list[LinkAddress]) -> bytes:
    told = tuple(Told(addr=a.addr, mbps=a.speed_mbps, mtu=a.mtu) for a in addresses[:LINK_ADDRESSES_MAX])
    return msgspec.json.encode(Table(node=node, run=run, addresses=told))


def decode_table(body: bytes) -> Table:
    """Raises `RequestError` with what is wrong."""
    try:
        table = _tables.decode(body)
    except _ERRORS as error:
        raise RequestError(f"not a table of addresses: {error}") from error
    for told in table.addresses:
        if not is_plain_ip(told.addr):
            raise RequestError(f"not a table of addresses: {told.addr!r} is no IP address in its short form")
    return table


def addresses_of(table: Table) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(told.addr, told.mbps, told.mtu) for told in table.addresses)


def is_plain_ip(text: str) -> bool:
    """One spelling per address, and no zone: it means something only on the machine that wrote it."""
    try:
        return str(ipaddress.ip_address(text)) == text and "%" not in text
    except ValueError:
        return False


def encode(message: Probe | Answer) -> bytes:
    return msgspec.json.encode(message)


def decode_probe(body: bytes) -> Probe:
    """Raises `RequestError` with what is wrong."""
    try:
        return _probes.decode(body)
    except _ERRORS as error:
        raise RequestError(f"not a probe: {error}") from error


def decode_answer(body: bytes) -> Answer:
    """Raises `RequestError` with what is wrong."""
    try:
        return _answers.decode(body)
    except _ERRORS as error:
        raise RequestError(f"not the answer to a probe: {error}") from error


def prove(key: bytes, *, asks: str, asked: str, addr: str, nonce: str, run: str) -> str:
    """The proof of `asked` that `addr` is its own."""
    message = bytearray(_LABEL)
    for part in (asks, asked, addr, nonce, run):
        data = part.encode("utf-8", "surrogatepass")
        message += len(data).to_bytes(2, "big") + data
    return hmac.digest(key, bytes(message), "sha256").hex()


def is_proof(answer: Answer, keys: tuple[bytes, ...], *, asks: str, probe: Probe, run: str) -> bool:
    """Did the node that was asked answer, with one of the keys (the run where there are none)?"""
    fits = [
        hmac.compare_digest(
            prove(key, asks=asks, asked=probe.to, addr=probe.addr, nonce=probe.nonce, run=run), answer.proof
        )
        for key in keys or (bytes.fromhex(run),)
    ]
    return any(fits)
