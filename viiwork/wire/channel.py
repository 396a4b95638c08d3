"""The KV channel, version 2: handshake and frames, as bytes in and values out.

The initiator sends the state, the responder keeps it. The conversation is drawn in docs/replication.md.
"""

from __future__ import annotations

import enum
import hmac
import struct
from dataclasses import dataclass

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from viiwork.errors import ChannelError
from viiwork.limits import KV_FRAME_MAX_BYTES, KV_MESSAGE_MAX_BYTES

PROTOCOL = "viiwork-kv/2"  # value of the Upgrade header
CHANNEL_PATH = "/v1/kv/channel"
VERSION = 2
KEY_CONTEXT = "viiwork kv channel v2"
PROOF_BYTES = 32
TAG_BYTES = 16
NAME_MAX_BYTES = 255

# Words that travel in REFUSE and NACK; a word that is not here counts as `peer_error`.
REASONS = frozenset(
    {
        "have_newer",
        "no_space",
        "wrong_model",
        "layout",
        "too_long",
        "too_large",
        "superseded",
        "version",
        "disabled",
        "busy",
        "bad_offer",
        "bad_file",
        "not_portable",
        "corrupt",
        "cancelled",
        "timeout",
        "io_error",
        "peer_error",
        "protocol",
    }
)


def mesh_key(secret: str | bytes) -> bytes:
    """The channel's static key; an open mesh has the empty secret."""
    raw = secret.encode() if isinstance(secret, str) else secret
    return blake3(raw, derive_key_context=KEY_CONTEXT).digest()


def warm_up() -> None:
    """Use each primitive once: the first X25519 of a process takes 20-40 ms, the next ones 0.1."""
    near, far = Initiator(bytes(32), "a", bytes(32), encrypt=True), Responder((bytes(32),), "b", bytes(32))
    proof, session = near.finish(far.answer(near.hello(), "a", require_encrypt=True), "b")
    opened = far.finish(proof)
    for aes in (False, True):
        frame = Sealer(session.send, encrypt=True, aes=aes).seal(FrameType.ROWS, b"")
        opener = Opener(opened.receive, encrypt=True, aes=aes)
        opener.open(read_header(frame.header, 0), bytearray(frame.tag))


# -- handshake -------------------------------------------------------------------------------------

_HELLO = struct.Struct("<4sBBH32sB255s")
HELLO_BYTES = _HELLO.size + PROOF_BYTES
_HELLO_MAGIC = b"VWKV"
_ENCRYPT = 1
_AES = 2  # of the initiator: it would rather have AES-256-GCM; of the responder: that is what is used


class Role(enum.IntEnum):
    INITIATOR = 1
    RESPONDER = 2


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one direction's frames."""

    mac: bytes
    aead: bytes


@dataclass(frozen=True, slots=True)
class Session:
    """What both sides agree on when the handshake is done."""

    send: Keys
    receive: Keys
    encrypt: bool
    peer_name: str
    aes: bool = False  # AES-256-GCM encrypts, not ChaCha20-Poly1305


@dataclass(frozen=True, slots=True)
class Hello:
    ephemeral: bytes
    name: str
    encrypt: bool
    aes: bool
    body: bytes  # as it travelled, without the proof
    proof: bytes


class Initiator:
    """The sending side: `hello()`, then `finish(answer)` gives the proof to send and the session.

    `aes` on either side: AES-GCM is the faster cipher there. It is used when it is on both.
    """

    def __init__(self, key: bytes, name: str, private: bytes, *, encrypt: bool, aes: bool = False) -> None:
        self._key, self._private, self._encrypt, self._aes = key, private, encrypt, encrypt and aes
        self._body = _hello_body(Role.INITIATOR, name, _public_of(private), encrypt, self._aes)

    def hello(self) -> bytes:
        return self._body + _keyed(self._key, b"hello", self._body)

    def finish(self, answer: bytes, expect_name: str) -> tuple[bytes, Session]:
        """Raises `ChannelError` (`wrong_key`, `wrong_peer`, `version`, `protocol`)."""
        peer = _read_hello(answer, Role.RESPONDER)
        agreed = _agree(self._key, self._private, peer, self._body, peer.body)
        if not hmac.compare_digest(peer.proof, agreed.proof_responder):
            raise ChannelError("wrong_key", "the peer does not hold the mesh secret")
        _expect(peer.name, expect_name)
        if peer.encrypt != self._encrypt:
            raise ChannelError("protocol", "the peer changed the encryption")
        if peer.aes and not self._aes:
            raise ChannelError("protocol", "the peer chose a cipher that was not offered")
        session = Session(agreed.to_responder, agreed.to_initiator, self._encrypt, peer.name, peer.aes)
        return agreed.proof_initiator, session


class Responder:
    """The receiving side: `answer(hello)` gives the bytes to send, `finish(proof)` the session."""

    def __init__(self, keys: tuple[bytes, ...], name: str, private: bytes, *, aes: bool = False) -> None:
        self._keys, self._name, self._private, self._aes = keys, name, private, aes
        self._pending: tuple[_Agreed, Hello, bool] | None = None

    def answer(self, hello: bytes, expect_name: str, *, require_encrypt: bool) -> bytes:
        """Raises `ChannelError` (`wrong_key`, `wrong_peer`, `version`, `protocol`, `plaintext`)."""
        peer = _read_hello(hello, Role.INITIATOR)
        for key in self._keys:
            if hmac.compare_digest(peer.proof, _keyed(key, b"hello", peer.body)):
                break
        else:
            raise ChannelError("wrong_key", "the peer does not hold the mesh secret")
        _expect(peer.name, expect_name)
        if require_encrypt and not peer.encrypt:
            raise ChannelError("plaintext", "the peer does not encrypt, this node asks for it")
        aes = peer.aes and self._aes
        body = _hello_body(Role.RESPONDER, self._name, _public_of(self._private), peer.encrypt, aes)
        agreed = _agree(key, self._private, peer, peer.body, body)
        self._pending = agreed, peer, aes
        return body + agreed.proof_responder

    def finish(self, proof: bytes) -> Session:
        """Raises `ChannelError` (`wrong_key`): a replayed hello gets this far and no further."""
        if self._pending is None:
            raise ChannelError("protocol", "a proof before the hello")
        agreed, peer, aes = self._pending
        if not hmac.compare_digest(proof, agreed.proof_initiator):
            raise ChannelError("wrong_key", "the peer's proof is wrong")
        return Session(agreed.to_initiator, agreed.to_responder, peer.encrypt, peer.name, aes)


@dataclass(frozen=True, slots=True)
class _Agreed:
    to_responder: Keys
    to_initiator: Keys
    proof_initiator: bytes
    proof_responder: bytes


def _agree(key: bytes, private: bytes, peer: Hello, body_i: bytes, body_r: bytes) -> _Agreed:
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(peer.ephemeral)
        )
    except ValueError:
        raise ChannelError("protocol", "the peer's ephemeral key is not usable") from None
    # Both bodies carry version, role, name, flags and ephemeral: changing any of them changes every key.
    root = blake3(shared + blake3(body_i + body_r).digest(), key=key).digest()

    def derive(what: str) -> bytes:
        return blake3(root, derive_key_context=f"{KEY_CONTEXT} {what}").digest()

    return _Agreed(
        Keys(derive("initiator mac"), derive("initiator aead")),
        Keys(derive("responder mac"), derive("responder aead")),
        derive("initiator proof"),
        derive("responder proof"),
    )


def _hello_body(role: Role, name: str, ephemeral: bytes, encrypt: bool, aes: bool) -> bytes:
    raw = name.encode()
    if not 1 <= len(raw) <= NAME_MAX_BYTES:
        raise ValueError("a node name is 1 to 255 bytes")
    flags = _ENCRYPT * encrypt | _AES * aes
    return _HELLO.pack(_HELLO_MAGIC, VERSION, role, flags, ephemeral, len(raw), raw)


def _read_hello(data: bytes, role: Role) -> Hello:
    if len(data) != HELLO_BYTES:
        raise ChannelError("protocol", "a hello of the wrong size")
    body, proof = data[: _HELLO.size], data[_HELLO.size :]
    magic, version, found, flags, ephemeral, name_bytes, raw = _HELLO.unpack(body)
    if magic != _HELLO_MAGIC or found != role:
        raise ChannelError("protocol", "not a hello of this protocol")
    if version != VERSION or flags not in (0, _ENCRYPT, _ENCRYPT | _AES):
        raise ChannelError("version", f"the peer speaks version {version} with flags {flags:#x}")
    if name_bytes == 0 or any(raw[name_bytes:]):
        raise ChannelError("protocol", "a malformed name")
    try:
        name = raw[:name_bytes].decode()
    except UnicodeDecodeError:
        raise ChannelError("protocol", "a malformed name") from None
    return Hello(ephemeral, name, bool(flags & _ENCRYPT), bool(flags & _AES), body, proof)


def _expect(name: str, wanted: str) -> None:
    if name != wanted:
        raise ChannelError("wrong_peer", f"the peer says it is {name!r}, expected {wanted!r}")


def _public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _keyed(key: bytes, what: bytes, data: bytes) -> bytes:
    return blake3(what + b"\0" + data, key=key).digest()


# -- frames ----------------------------------------------------------------------------------------

_HEADER = struct.Struct("<4sBBHQQQIIII")
HEADER_BYTES = _HEADER.size
_FRAME_MAGIC = b"VWK2"


class FrameType(enum.IntEnum):
    OFFER = 1  # -> payload: an Offer
    HAVE = 2  # <- payload: a Have
    REFUSE = 3  # <- payload: a Refusal
    BEGIN = 4  # -> payload: a Begin
    TOKENS = 5  # -> payload: `rows` tokens from position `offset` on
    ROWS = 6  # -> payload: `rows` rows from position `offset` on, of every segment of cache `segment`
    BLOB = 7  # -> payload: a piece at `offset` of blob `segment` of the offer
    COMMIT = 8  # -> payload: a Commit
    ACK = 9  # <- payload: BLAKE3 of the COMMIT's payload
    NACK = 10  # <- payload: a Refusal


DATA_TYPES = frozenset({FrameType.TOKENS, FrameType.ROWS, FrameType.BLOB})


class Codec(enum.IntEnum):
    """How a DATA payload travels; the planes are those of `native.rows.split_planes`."""

    RAW = 0
    ZSTD = 1
    PLANES2_ZSTD = 2
    PLANES4_ZSTD = 4


@dataclass(frozen=True, slots=True)
class Header:
    """The 48 bytes before a payload."""

    type: FrameType
    seq: int
    wire_len: int
    offset: int = 0
    segment: int = 0
    rows: int = 0
    raw_len: int = -1  # -1 = as on the wire
    codec: Codec = Codec.RAW

    @property
    def raw_bytes(self) -> int:
        return self.wire_len if self.raw_len < 0 else self.raw_len

    def pack(self) -> bytes:
        # magic, type, codec, flags (0), seq, offset, item (0), segment, rows, lengths
        lengths = self.raw_bytes, self.wire_len
        words = self.seq, self.offset, 0, self.segment, self.rows, *lengths
        return _HEADER.pack(_FRAME_MAGIC, self.type, self.codec, 0, *words)


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: str
    detail: str = ""


def read_header(data: bytes | bytearray | memoryview, expect_seq: int) -> Header:
    """Check a header before its payload is read; raises `ChannelError` (`protocol`).

    The bytes are not yet proven: `Opener` does that with the payload. Until then only the sizes are
    used, and they are capped.
    """
    magic, kind, codec, flags, seq, offset, item, segment, rows, raw_len, wire_len = _HEADER.unpack(data)
    if magic != _FRAME_MAGIC:
        raise ChannelError("protocol", "not a frame")
    try:
        type_, codec = FrameType(kind), Codec(codec)
    except ValueError:
        raise ChannelError("protocol", f"an unknown frame type {kind} or codec {codec}") from None
    if seq != expect_seq:
        raise ChannelError("protocol", f"frame {seq} where {expect_seq} was due")
    is_data = type_ in DATA_TYPES
    if max(raw_len, wire_len) > (KV_FRAME_MAX_BYTES if is_data else KV_MESSAGE_MAX_BYTES):
        raise ChannelError("protocol", f"a frame of {max(raw_len, wire_len)} bytes")
    plain = codec is Codec.RAW and raw_len == wire_len
    packed = codec is not Codec.RAW and is_data and wire_len < raw_len
    if flags or item or not (plain or packed) or (not is_data and (offset or segment or rows)):
        raise ChannelError("protocol", "a frame of an unknown form")
    return Header(type_, seq, wire_len, offset, segment, rows, raw_len, codec)


Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Sealed:
    """A frame on its way: three pieces that go out one after the other."""

    header: bytes
    payload: Payload
    tag: bytes

    @property
    def wire_bytes(self) -> int:
        return len(self.header) + len(self.payload) + len(self.tag)


class Sealer:
    """Numbers and proves outgoing frames of one direction; one owner at a time."""

    def __init__(self, keys: Keys, *, encrypt: bool, aes: bool = False) -> None:
        self._mac = keys.mac
        self._aead = _cipher_of(keys, aes) if encrypt else None
        self._seq = 0

    def seal(
        self,
        type_: FrameType,
        payload: Payload,
        into: bytearray | memoryview | None = None,
        *,
        digest: bytes = b"",
        offset: int = 0,
        segment: int = 0,
        rows: int = 0,
        raw_len: int = -1,
        codec: Codec = Codec.RAW,
    ) -> Sealed:
        """Without encryption `payload` is borrowed until the frame is sent; with it `into` is, when given.

        `into` is no part of `payload` and holds it and a tag. `digest` is BLAKE3 of the payload where the
        caller knows it already.
        """
        header = Header(type_, self._seq, len(payload), offset, segment, rows, raw_len, codec)
        if self._aead is None:
            return self.prove(header, digest or blake3(payload).digest(), payload)
        packed = header.pack()
        if into is None:
            into = bytearray(len(payload) + TAG_BYTES)
        secret = memoryview(into)[: len(payload) + TAG_BYTES]
        self._aead.encrypt_into(_nonce(self._seq), payload, packed, secret)
        self._seq += 1
        return Sealed(packed, secret[:-TAG_BYTES], bytes(secret[-TAG_BYTES:]))

    def next_header(self, type_: FrameType, size: int, *, offset: int, segment: int, rows: int) -> Header:
        """Of a raw frame that `prove` is given next."""
        return Header(type_, self._seq, size, offset, segment, rows)

    def prove(self, header: Header, digest: bytes, payload: Payload = b"") -> Sealed:
        """A plain frame whose payload has this digest; without it, it is sent from where it lies."""
        if self._aead is not None:
            raise ValueError("what is encrypted cannot be sent from where it lies")
        packed = header.pack()
        self._seq += 1
        return Sealed(packed, payload, _mac_of(self._mac, packed, digest))


class Opener:
    """Checks incoming frames of one direction, in order; one owner at a time."""

    def __init__(self, keys: Keys, *, encrypt: bool, aes: bool = False) -> None:
        self._mac = keys.mac
        self._aead = _cipher_of(keys, aes) if encrypt else None
        self._seq = 0

    def open(
        self, header: Header, body: bytearray | memoryview, into: bytearray | memoryview | None = None
    ) -> tuple[Payload, bytes]:
        """Payload as it travelled and its digest; `body` is what followed the header, the tag at its end.

        The payload is a view of `body`, with encryption of `into`, which is no part of `body` and holds
        at least the payload. Raises `ChannelError` (`corrupt`).
        """
        if header.seq != self._seq or len(body) != header.wire_len + TAG_BYTES:
            raise ChannelError("protocol", "frames out of order")
        packed = header.pack()
        if self._aead is None:
            payload, tag = memoryview(body)[:-TAG_BYTES], bytes(body[-TAG_BYTES:])
            digest = blake3(payload).digest()
            if not hmac.compare_digest(tag, _mac_of(self._mac, packed, digest)):
                raise ChannelError("corrupt", "a frame's proof is wrong")
        else:
            payload = memoryview(bytearray(header.wire_len) if into is None else into)[: header.wire_len]
            try:
                self._aead.decrypt_into(_nonce(header.seq), body, packed, payload)
            except InvalidTag:
                raise ChannelError("corrupt", "a frame's proof is wrong") from None
            digest = blake3(payload).digest()
        self._seq += 1
        return payload, digest


def _cipher_of(keys: Keys, aes: bool) -> AESGCM | ChaCha20Poly1305:
    return AESGCM(keys.aead) if aes else ChaCha20Poly1305(keys.aead)


def pack_refusal(reason: str, detail: str) -> bytes:
    return msgspec.msgpack.encode(Refusal(reason if reason in REASONS else "peer_error", detail[:200]))


def unpack_refusal(data: bytes | bytearray | memoryview) -> Refusal:
    """What the peer said, with a reason word of ours whatever it sent."""
    try:
        said = msgspec.msgpack.decode(data, type=Refusal)
    except (msgspec.MsgspecError, ValueError):
        return Refusal("peer_error", "an unreadable refusal")
    detail = "".join(c if c.isprintable() else "?" for c in said.detail[:200])
    return Refusal(said.reason if said.reason in REASONS else "peer_error", detail)


def _mac_of(key: bytes, header: bytes, digest: bytes) -> bytes:
    return blake3(header + digest, key=key).digest(length=TAG_BYTES)


def _nonce(seq: int) -> bytes:
    # Never repeats: keys are of one direction of one connection, and seq only grows.
    return seq.to_bytes(12, "little")
