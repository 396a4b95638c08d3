from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.errors import ChannelError
from viiwork.limits import KV_CHUNK_MAX_BYTES, KV_MESSAGE_MAX_BYTES
from viiwork.wire.channel import (
    HEADER_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    FrameType,
    Header,
    Initiator,
    Opener,
    Responder,
    Sealed,
    Sealer,
    Session,
    mesh_key,
    pack_refusal,
    read_header,
    unpack_refusal,
)

KEY, OTHER = mesh_key("secret"), mesh_key("another")


def shake(
    *,
    key: bytes = KEY,
    accepts: tuple[bytes, ...] = (KEY,),
    encrypt: bool = True,
    require: bool = False,
    names: tuple[str, str] = ("a", "b"),
    expects: tuple[str, str] = ("b", "a"),
) -> tuple[Session, Session]:
    near = Initiator(key, names[0], b"1" * 32, encrypt=encrypt)
    far = Responder(accepts, names[1], b"2" * 32)
    answer = far.answer(near.hello(), expects[1], require_encrypt=require)
    proof, mine = near.finish(answer, expects[0])
    return mine, far.finish(proof)


def reason_of(**options: Any) -> str:
    with pytest.raises(ChannelError) as caught:
        shake(**options)
    return caught.value.reason


@pytest.mark.parametrize("encrypt", [False, True])
def test_both_sides_agree_on_keys_names_and_encryption(encrypt: bool) -> None:
    near, far = shake(encrypt=encrypt)
    assert near.send == far.receive and near.receive == far.send
    assert near.send != near.receive
    assert near.encrypt == far.encrypt == encrypt
    assert (near.peer_name, far.peer_name) == ("b", "a")


def test_the_previous_secret_is_still_taken() -> None:
    assert shake(key=OTHER, accepts=(KEY, OTHER))


def test_another_secret_is_refused() -> None:
    assert reason_of(key=OTHER) == "wrong_key"
    assert reason_of(key=mesh_key(""), accepts=(KEY,)) == "wrong_key"


def test_a_peer_with_another_name_is_refused_by_either_side() -> None:
    assert reason_of(expects=("c", "a")) == "wrong_peer"
    assert reason_of(expects=("b", "c")) == "wrong_peer"


def test_a_side_that_asks_for_encryption_refuses_plaintext() -> None:
    assert reason_of(encrypt=False, require=True) == "plaintext"


def test_a_replayed_hello_does_not_finish() -> None:
    old = Initiator(KEY, "a", b"1" * 32, encrypt=True)
    far = Responder((KEY,), "b", b"3" * 32)
    far.answer(old.hello(), "a", require_encrypt=False)
    with pytest.raises(ChannelError) as caught:
        far.finish(bytes(32))
    assert caught.value.reason == "wrong_key"


def test_a_hello_sent_back_to_its_maker_is_refused() -> None:
    near = Initiator(KEY, "a", b"1" * 32, encrypt=True)
    with pytest.raises(ChannelError):
        near.finish(near.hello(), "a")


def test_a_key_of_low_order_is_refused() -> None:
    far = Responder((KEY,), "b", b"2" * 32)
    near = Initiator(KEY, "a", b"1" * 32, encrypt=True)
    real = near._body
    near._body = real[:8] + bytes(32) + real[40:]
    with pytest.raises(ChannelError) as caught:
        far.answer(near.hello(), "a", require_encrypt=False)
    assert caught.value.reason == "protocol"


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, HELLO_BYTES * 2 + 31), bit=st.integers(0, 7))
def test_no_bit_of_the_handshake_can_be_changed(at: int, bit: int) -> None:
    near, far = Initiator(KEY, "a", b"1" * 32, encrypt=True), Responder((KEY,), "b", b"2" * 32)
    messages = bytearray()

    def through(data: bytes) -> bytes:
        sent = bytearray(data)
        if len(messages) <= at < len(messages) + len(data):
            sent[at - len(messages)] ^= 1 << bit
        messages.extend(data)
        return bytes(sent)

    with pytest.raises(ChannelError):
        answer = far.answer(through(near.hello()), "a", require_encrypt=False)
        proof, _ = near.finish(through(answer), "b")
        far.finish(through(proof))


def body_of(frame: Sealed) -> bytearray:
    return bytearray(bytes(frame.payload) + frame.tag)


@pytest.mark.parametrize("near_aes", [False, True])
@pytest.mark.parametrize("far_aes", [False, True])
def test_aes_is_used_where_both_sides_are_quick_at_it(near_aes: bool, far_aes: bool) -> None:
    mine = Initiator(KEY, "a", b"1" * 32, encrypt=True, aes=near_aes)
    other = Responder((KEY,), "b", b"2" * 32, aes=far_aes)
    proof, near = mine.finish(other.answer(mine.hello(), "a", require_encrypt=True), "b")
    far = other.finish(proof)
    assert near.aes == far.aes == (near_aes and far_aes)
    frame = Sealer(near.send, encrypt=True, aes=near.aes).seal(FrameType.OFFER, b"x")
    opener = Opener(far.receive, encrypt=True, aes=far.aes)
    assert opener.open(read_header(frame.header, 0), body_of(frame))[0] == b"x"
    with pytest.raises(ChannelError):
        Opener(far.receive, encrypt=True, aes=not far.aes).open(read_header(frame.header, 0), body_of(frame))


def test_a_cipher_that_was_not_offered_is_refused() -> None:
    mine = Initiator(KEY, "a", b"1" * 32, encrypt=True)
    other = Initiator(KEY, "a", b"1" * 32, encrypt=True, aes=True)
    answer = Responder((KEY,), "b", b"2" * 32, aes=True).answer(other.hello(), "a", require_encrypt=True)
    with pytest.raises(ChannelError):
        mine.finish(answer, "b")


def test_a_cipher_for_what_is_not_encrypted_is_no_hello_of_this_version() -> None:
    hello = bytearray(Initiator(KEY, "a", b"1" * 32, encrypt=False).hello())
    hello[6] = 2
    with pytest.raises(ChannelError) as caught:
        Responder((KEY,), "b", b"2" * 32, aes=True).answer(bytes(hello), "a", require_encrypt=False)
    assert caught.value.reason == "version"


@pytest.mark.parametrize("aes", [False, True])
def test_a_frame_is_sealed_and_opened_within_buffers_that_are_given(aes: bool) -> None:
    near, far = shake(encrypt=True)
    wire, plain = bytearray(100), bytearray(b"." * 80)
    frame = Sealer(near.send, encrypt=True, aes=aes).seal(FrameType.DATA, b"x" * 60, into=wire)
    assert bytes(frame.payload) + frame.tag == wire[:76] and wire[76:] == bytes(24)
    opener = Opener(far.receive, encrypt=True, aes=aes)
    payload, digest = opener.open(read_header(frame.header, 0), memoryview(wire)[:76], into=plain)
    assert payload == b"x" * 60 and digest == frame.digest and plain == b"x" * 60 + b"." * 20


def test_a_payload_sent_from_where_it_lies_is_proven_by_its_digest() -> None:
    near, far = shake(encrypt=False)
    sealer, opener = Sealer(near.send, encrypt=False), Opener(far.receive, encrypt=False)
    frame = sealer.prove(FrameType.DATA, 5, blake3(b"hello").digest(), 7)
    assert opener.open(read_header(frame.header, 0), bytearray(b"hello" + frame.tag))[0] == b"hello"
    frame = sealer.prove(FrameType.DATA, 5, blake3(b"hello").digest(), 7)
    with pytest.raises(ChannelError):
        opener.open(read_header(frame.header, 1), bytearray(b"other" + frame.tag))


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000)])
def test_a_frame_opens_to_what_was_sealed(encrypt: bool, payload: bytes) -> None:
    near, far = shake(encrypt=encrypt)
    sealer, opener = Sealer(near.send, encrypt=encrypt), Opener(far.receive, encrypt=encrypt)
    for seq in range(3):
        frame = sealer.seal(FrameType.DATA, payload, seq * 10)
        header = read_header(frame.header, seq)
        assert header == Header(FrameType.DATA, seq, seq * 10, len(payload))
        opened, digest = opener.open(header, body_of(frame))
        assert bytes(opened) == payload and digest == frame.digest
        if encrypt and payload:
            assert bytes(frame.payload) != payload


@pytest.mark.parametrize("encrypt", [False, True])
@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, HEADER_BYTES + 50 + TAG_BYTES - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_frame_can_be_changed(encrypt: bool, at: int, bit: int) -> None:
    near, far = shake(encrypt=encrypt)
    frame = Sealer(near.send, encrypt=encrypt).seal(FrameType.DATA, bytes(50), 5)
    wire = bytearray(frame.header + body_of(frame))
    wire[at] ^= 1 << bit
    with pytest.raises(ChannelError):
        header = read_header(wire[:HEADER_BYTES], 0)
        Opener(far.receive, encrypt=encrypt).open(header, wire[HEADER_BYTES:])


@pytest.mark.parametrize("encrypt", [False, True])
def test_frames_cannot_be_repeated_swapped_or_sent_back(encrypt: bool) -> None:
    near, far = shake(encrypt=encrypt)
    sealer = Sealer(near.send, encrypt=encrypt)
    first, second = sealer.seal(FrameType.DATA, b"1"), sealer.seal(FrameType.DATA, b"2")
    with pytest.raises(ChannelError):
        read_header(second.header, 0)
    opener = Opener(far.receive, encrypt=encrypt)
    opener.open(read_header(first.header, 0), body_of(first))
    with pytest.raises(ChannelError):
        read_header(first.header, 1)
    with pytest.raises(ChannelError):
        opener.open(read_header(first.header, 0), body_of(first))
    with pytest.raises(ChannelError):
        Opener(near.receive, encrypt=encrypt).open(read_header(first.header, 0), body_of(first))


def test_frames_of_another_connection_do_not_open() -> None:
    near, _ = shake()
    other = Responder((KEY,), "b", b"9" * 32)
    mine = Initiator(KEY, "a", b"1" * 32, encrypt=True)
    proof, _ = mine.finish(other.answer(mine.hello(), "a", require_encrypt=False), "b")
    far = other.finish(proof)
    frame = Sealer(near.send, encrypt=True).seal(FrameType.OFFER, b"x")
    with pytest.raises(ChannelError):
        Opener(far.receive, encrypt=True).open(read_header(frame.header, 0), body_of(frame))


def test_encrypted_and_plain_frames_do_not_pass_for_each_other() -> None:
    near, far = shake(encrypt=True)
    frame = Sealer(near.send, encrypt=False).seal(FrameType.OFFER, b"x")
    with pytest.raises(ChannelError):
        Opener(far.receive, encrypt=True).open(read_header(frame.header, 0), body_of(frame))


@pytest.mark.parametrize(
    ("type_", "size", "fine"),
    [
        (FrameType.DATA, KV_CHUNK_MAX_BYTES, True),
        (FrameType.DATA, KV_CHUNK_MAX_BYTES + 1, False),
        (FrameType.OFFER, KV_MESSAGE_MAX_BYTES, True),
        (FrameType.OFFER, KV_MESSAGE_MAX_BYTES + 1, False),
    ],
)
def test_sizes_are_capped_before_a_payload_is_read(type_: FrameType, size: int, fine: bool) -> None:
    data = Header(type_, 0, 0, size).pack()
    if fine:
        assert read_header(data, 0).wire_len == size
    else:
        with pytest.raises(ChannelError):
            read_header(data, 0)


@pytest.mark.parametrize("at", [0, 4, 5, 6, 24, 32, 36, 40])
def test_unknown_types_codecs_flags_and_fields_are_refused(at: int) -> None:
    data = bytearray(Header(FrameType.DATA, 0, 0, 10).pack())
    data[at] ^= 0x80
    with pytest.raises(ChannelError):
        read_header(data, 0)


def test_a_refusal_is_a_word_of_ours_whatever_the_peer_says() -> None:
    said = unpack_refusal(pack_refusal("no_space", "full"))
    assert (said.reason, said.detail) == ("no_space", "full")
    assert unpack_refusal(pack_refusal("their_own_word", "")).reason == "peer_error"
    assert unpack_refusal(b"\xff\x00").reason == "peer_error"
    noisy = unpack_refusal(pack_refusal("busy", "\x1b[2J" + "x" * 500))
    assert noisy.detail.isprintable() and len(noisy.detail) <= 200
