"""A peer that holds the secret and still does not keep to the rules."""

from __future__ import annotations

import errno
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from viiwork.errors import KvError
from viiwork.kv import receiver
from viiwork.kv.jobs import ReceiveDone
from viiwork.kv.link import Cancel, Link
from viiwork.kv.receiver import receive_state
from viiwork.kv.store import ReplicaStore
from viiwork.native.mover import pwrite_all
from viiwork.wire.channel import FrameType, Opener, Sealer, unpack_refusal
from viiwork.wire.replica import Offer, pack_offer, root_of

CHUNK = 64 * 1024


class Peer:
    """The sending side, frame by frame."""

    def __init__(self, sock: socket.socket, job: Any) -> None:
        self.link = Link(sock, job, Cancel())
        session = self.link.initiate(job)
        self.sealer = Sealer(session.send, encrypt=False)
        self.opener = Opener(session.receive, encrypt=False)

    def say(self, type_: FrameType, payload: bytes = b"", offset: int = 0) -> None:
        self.link.send(self.sealer.seal(type_, payload, offset))

    def heard(self) -> str:
        type_, payload = self.link.recv_message(self.opener, *FrameType)
        if type_ in (FrameType.REFUSE, FrameType.NACK):
            return f"{type_.name} {unpack_refusal(payload).reason}"
        return type_.name

    def offer(self, offer: Offer) -> str:
        self.say(FrameType.OFFER, pack_offer(offer))
        return self.heard()

    def chunks(self, data: bytes) -> None:
        for at in range(0, len(data), CHUNK):
            self.say(FrameType.DATA, data[at : at + CHUNK], at)

    def commit(self, data: bytes) -> str:
        digests = b"".join(blake3(data[at : at + CHUNK]).digest() for at in range(0, len(data), CHUNK))
        self.say(FrameType.COMMIT, root_of(digests))
        return self.heard()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplicaStore]:
    store = ReplicaStore(tmp_path / "store", 1 << 30)
    yield store
    store.close()


@pytest.fixture
def data(kit: Any) -> bytes:
    return kit.make_save(500, n_layer=4, row=64)


@pytest.fixture
def offer(kit: Any, data: bytes) -> Callable[..., Offer]:
    def make(**changes: Any) -> Offer:
        info = kit.info_of(data)
        values: dict[str, Any] = {
            "session": b"s" * 32,
            "model_fp": kit.MODEL,
            "shape": info.shape,
            "n_tokens": info.n_tokens,
            "tokens_digest": info.tokens_digest,
            "total_bytes": len(data),
            "chunk_bytes": CHUNK,
            "generation": 1,
            "source": "a",
            "created_unix_s": 1.0,
        }
        return Offer(**{**values, **changes})

    return make


@pytest.fixture
def talk(kit: Any, data: bytes, store: ReplicaStore, tmp_path: Path) -> Callable[..., str]:
    """Run a script as the peer; the receiver's reason word, or `done`."""

    def run(script: Callable[[Peer], None]) -> str:
        near, far = kit.tcp_pair()
        result: list[ReceiveDone | KvError] = []

        def receive() -> None:
            try:
                result.append(receive_state(far, kit.grant_for(data, silence_s=2.0), store, Cancel()))
            except KvError as error:
                result.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        peer = Peer(near, kit.send_job(Path("unused"), silence_s=2.0))
        try:
            script(peer)
        finally:
            peer.link.close()
            thread.join()
        (end,) = result
        if isinstance(end, ReceiveDone):
            return "done"
        assert list((tmp_path / "store").iterdir()) == []
        assert store.counts() == (0, 0, 0, 0)
        return end.reason

    return run


def test_a_peer_that_keeps_to_the_rules_is_acknowledged(talk: Any, offer: Any, data: bytes) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(offer()) == "ACCEPT"
        peer.chunks(data)
        assert peer.commit(data) == "ACK"

    assert talk(script) == "done"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "c"}, "bad_offer"),
        ({"total_bytes": 1 << 50}, "bad_offer"),
        ({"chunk_bytes": 1}, "bad_offer"),
        ({"model_fp": b"n" * 32}, "wrong_model"),
    ],
    ids=str,
)
def test_an_offer_that_is_not_acceptable_is_refused_before_any_room_is_made(
    talk: Any, offer: Any, change: dict[str, Any], reason: str
) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(offer(**change)) == f"REFUSE {reason}"

    assert talk(script) == reason


def test_noise_in_place_of_a_hello_ends_the_connection(kit: Any, data: bytes, store: ReplicaStore) -> None:
    near, far = kit.tcp_pair()
    with near:
        near.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(400))
        with pytest.raises(KvError) as caught:
            receive_state(far, kit.grant_for(data), store, Cancel())
    assert caught.value.reason == "protocol"
    assert far.fileno() == -1


def test_noise_in_place_of_an_offer_is_refused(talk: Any) -> None:
    def script(peer: Peer) -> None:
        peer.say(FrameType.OFFER, b"\xc1 noise")
        assert peer.heard() == "REFUSE bad_offer"

    assert talk(script) == "bad_offer"


def test_data_before_an_offer_is_refused(talk: Any) -> None:
    def script(peer: Peer) -> None:
        peer.say(FrameType.DATA, bytes(CHUNK))
        assert peer.heard() == "REFUSE protocol"

    assert talk(script) == "protocol"


Script = Callable[[Peer, bytes], None]


def early_commit(peer: Peer, data: bytes) -> None:
    peer.say(FrameType.DATA, data[:CHUNK])
    peer.say(FrameType.COMMIT, bytes(32))


def short_chunk(peer: Peer, data: bytes) -> None:
    peer.say(FrameType.DATA, data[: CHUNK - 1])


def wrong_place(peer: Peer, data: bytes) -> None:
    peer.say(FrameType.DATA, data[:CHUNK], 1 << 40)
    peer.chunks(data)


def one_chunk_too_many(peer: Peer, data: bytes) -> None:
    peer.chunks(data)
    peer.say(FrameType.DATA, bytes(CHUNK), len(data))


def second_offer(peer: Peer, data: bytes) -> None:
    peer.say(FrameType.OFFER, b"")


@pytest.mark.parametrize("broken", [early_commit, short_chunk, wrong_place, one_chunk_too_many, second_offer])
def test_frames_that_are_not_due_end_the_transfer(talk: Any, offer: Any, data: bytes, broken: Script) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(offer()) == "ACCEPT"
        broken(peer, data)
        assert peer.heard() == "NACK protocol"

    assert talk(script) == "protocol"


def test_a_commit_of_something_else_is_refused(talk: Any, offer: Any, data: bytes) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(offer()) == "ACCEPT"
        peer.chunks(data)
        assert peer.commit(data + b"x") == "NACK corrupt"

    assert talk(script) == "corrupt"


def test_a_crafted_state_never_becomes_a_replica(talk: Any, offer: Any, data: bytes, kit: Any) -> None:
    crafted = bytearray(data)
    crafted[kit.info_of(data).meta_offset] = 7  # two cells with one position

    def script(peer: Peer) -> None:
        assert peer.offer(offer()) == "ACCEPT"
        peer.chunks(bytes(crafted))
        assert peer.commit(bytes(crafted)) == "NACK bad_file"

    assert talk(script) == "bad_file"


@pytest.mark.parametrize("lie", [{"n_tokens": 499}, {"tokens_digest": b"x" * 32}], ids=str)
def test_a_state_that_is_not_what_was_offered_is_refused(
    talk: Any, offer: Any, data: bytes, lie: dict[str, Any]
) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(offer(**lie)) == "ACCEPT"
        peer.chunks(data)
        assert peer.commit(data) == "NACK corrupt"

    assert talk(script) == "corrupt"


def test_a_sender_that_goes_before_the_answer_does_not_undo_a_commit(
    talk: Any, offer: Any, data: bytes
) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(offer()) == "ACCEPT"
        peer.chunks(data)
        digests = b"".join(blake3(data[at : at + CHUNK]).digest() for at in range(0, len(data), CHUNK))
        peer.say(FrameType.COMMIT, root_of(digests))

    assert talk(script) == "done"


def test_a_disk_that_fills_up_half_way_is_no_space(
    talk: Any, offer: Any, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any, offset: int) -> None:
        if offset >= CHUNK:
            raise OSError(errno.ENOSPC, "no space left on device")
        pwrite_all(fd, data, offset)

    monkeypatch.setattr(receiver, "pwrite_all", full)

    def script(peer: Peer) -> None:
        assert peer.offer(offer()) == "ACCEPT"
        peer.chunks(data)
        assert peer.heard() == "NACK no_space"

    assert talk(script) == "no_space"


def test_a_file_larger_than_the_system_allows_is_refused(talk: Any, offer: Any, data: bytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, hard))
    try:

        def script(peer: Peer) -> None:
            assert peer.offer(offer()) == "REFUSE no_space"

        assert talk(script) == "no_space"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
