"""A peer that holds the secret and still does not keep to the rules."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from blake3 import blake3

from viiwork.errors import KvError
from viiwork.kv import rowfile
from viiwork.kv.extract import SavedState, open_state
from viiwork.kv.jobs import ReceiveDone
from viiwork.kv.link import Cancel, Link
from viiwork.kv.receiver import receive_state
from viiwork.kv.store import ReplicaStore
from viiwork.native.mover import pwrite_all
from viiwork.wire.channel import Codec, FrameType, Opener, Sealer, unpack_refusal
from viiwork.wire.delta import pieces_of
from viiwork.wire.groups import Piece
from viiwork.wire.replica import Begin, Commit, Have, pack_message


class Peer:
    """The sending side, frame by frame, of the state in `data`."""

    def __init__(self, sock: socket.socket, job: Any, state: SavedState) -> None:
        self.link = Link(sock, job, Cancel())
        self.state = state
        self.digests: list[bytes] = []
        session = self.link.initiate(job)
        self.sealer = Sealer(session.send, encrypt=False)
        self.opener = Opener(session.receive, encrypt=False)

    def say(self, type_: FrameType, payload: bytes = b"", **place: Any) -> None:
        self.link.send(self.sealer.seal(type_, payload, **place))

    def heard(self) -> str:
        type_, payload = self.link.recv_message(self.opener, *FrameType)
        if type_ in (FrameType.REFUSE, FrameType.NACK):
            return f"{type_.name} {unpack_refusal(payload).reason}"
        return type_.name

    def offer(self, **changes: Any) -> str:
        self.say(FrameType.OFFER, pack_message(msgspec.structs.replace(self.state.offer(), **changes)))
        return self.heard()

    def begin(self, keep: int = 0) -> None:
        self.say(FrameType.BEGIN, pack_message(Begin(keep=keep)))

    def pieces(self) -> list[Piece]:
        offer = self.state.offer()
        return list(pieces_of(offer, Have(), 0, offer.needed))

    def data(self, piece: Piece, **changes: Any) -> None:
        payload = bytes(self.state.read(piece, memoryview(bytearray(piece.size))))
        if piece.type is FrameType.ROWS:
            self.digests.append(blake3(payload).digest(length=16))
        place = {"offset": piece.offset, "segment": piece.segment, "rows": piece.rows}
        self.say(changes.pop("type_", piece.type), changes.pop("payload", payload), **{**place, **changes})

    def commit(self, groups: list[bytes] | None = None) -> None:
        said = self.digests if groups is None else groups
        self.say(FrameType.COMMIT, pack_message(Commit(groups=(b"".join(said),), blobs=())))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplicaStore]:
    store = ReplicaStore(tmp_path / "store", 1 << 30)
    yield store
    store.close()


@pytest.fixture
def data(kit: Any) -> bytes:
    return kit.make_turn(600, n_layer=4, row=64)


@pytest.fixture
def talk(kit: Any, data: bytes, store: ReplicaStore, tmp_path: Path) -> Callable[..., str]:
    """Run a script as the peer; the receiver's reason word, or `done`."""

    def run(script: Callable[[Peer], None]) -> str:
        near, far = kit.tcp_pair()
        path = tmp_path / "state.bin"
        path.write_bytes(data)
        result: list[ReceiveDone | KvError] = []

        def receive() -> None:
            try:
                result.append(receive_state(far, kit.grant_for(data, silence_s=5.0), store, Cancel()))
            except KvError as error:
                result.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        with open_state(kit.state_file(path)) as state:
            peer = Peer(near, kit.send_job(path, silence_s=5.0), state)
            try:
                script(peer)
            finally:
                peer.link.close()
                thread.join()
        (end,) = result
        if isinstance(end, ReceiveDone):
            return "done"
        replicas, _, unfinished, incoming = store.counts()
        assert (replicas, incoming) == (0, 0)
        left = {file.name.partition(".")[2] for file in (tmp_path / "store").iterdir()}
        assert left <= ({"rows-0", "journal"} if unfinished else set())
        return end.reason

    return run


def test_a_peer_that_keeps_to_the_rules_is_acknowledged(talk: Any) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer() == "HAVE"
        peer.begin()
        for piece in peer.pieces():
            peer.data(piece)
        peer.commit()
        assert peer.heard() == "ACK"

    assert talk(script) == "done"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "c"}, "bad_offer"),
        ({"n_tokens": 1 << 50}, "bad_offer"),
        ({"version": 1}, "version"),
        ({"model_fp": b"n" * 32}, "wrong_model"),
    ],
    ids=str,
)
def test_an_offer_that_is_not_acceptable_is_refused_before_any_room_is_made(
    talk: Any, change: dict[str, Any], reason: str
) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(**change) == f"REFUSE {reason}"

    assert talk(script) == reason


def test_noise_in_place_of_a_hello_ends_the_connection(kit: Any, data: bytes, store: ReplicaStore) -> None:
    near, far = kit.tcp_pair()
    with near:
        near.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(400))
        with pytest.raises(KvError) as caught:
            receive_state(far, kit.grant_for(data), store, Cancel())
    assert caught.value.reason == "protocol"
    assert far.fileno() == -1


def test_a_hello_of_the_version_before_is_refused_as_that(kit: Any, data: bytes, store: ReplicaStore) -> None:
    near, far = kit.tcp_pair()
    with near:
        near.sendall(b"VWKV\x01\x01" + bytes(322))
        with pytest.raises(KvError) as caught:
            receive_state(far, kit.grant_for(data), store, Cancel())
    assert caught.value.reason == "version"


def test_noise_in_place_of_an_offer_is_refused(talk: Any) -> None:
    def script(peer: Peer) -> None:
        peer.say(FrameType.OFFER, b"\xc1 noise")
        assert peer.heard() == "REFUSE bad_offer"

    assert talk(script) == "bad_offer"


def test_data_before_an_offer_is_refused(talk: Any) -> None:
    def script(peer: Peer) -> None:
        peer.say(FrameType.ROWS, bytes(1000))
        assert peer.heard() == "REFUSE protocol"

    assert talk(script) == "protocol"


def early_commit(peer: Peer) -> None:
    peer.data(peer.pieces()[0])
    peer.commit()


def short_rows(peer: Peer) -> None:
    peer.data(peer.pieces()[0])
    peer.data(peer.pieces()[1], payload=bytes(10))


def wrong_place(peer: Peer) -> None:
    peer.data(peer.pieces()[0])
    peer.data(peer.pieces()[1], offset=1 << 40)


def another_cache(peer: Peer) -> None:
    peer.data(peer.pieces()[0])
    peer.data(peer.pieces()[1], segment=7)


def left_out(peer: Peer) -> None:
    peer.data(peer.pieces()[0])
    peer.data(peer.pieces()[2])


def one_too_many(peer: Peer) -> None:
    for piece in peer.pieces():
        peer.data(piece)
    peer.data(peer.pieces()[-1])


def second_offer(peer: Peer) -> None:
    peer.say(FrameType.OFFER, b"")


@pytest.mark.parametrize(
    "broken", [early_commit, short_rows, wrong_place, another_cache, left_out, one_too_many, second_offer]
)
def test_frames_that_are_not_due_end_the_transfer(talk: Any, broken: Callable[[Peer], None]) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer() == "HAVE"
        peer.begin()
        broken(peer)
        assert peer.heard() == "NACK protocol"

    assert talk(script) == "protocol"


def test_rows_nobody_holds_cannot_be_kept(talk: Any) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer() == "HAVE"
        peer.begin(keep=10)
        assert peer.heard() == "NACK protocol"

    assert talk(script) == "protocol"


def test_a_commit_of_something_else_spoils_what_came(talk: Any, store: ReplicaStore) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer() == "HAVE"
        peer.begin()
        for piece in peer.pieces():
            peer.data(piece)
        peer.commit([bytes(16)] * len(peer.digests))
        assert peer.heard() == "NACK corrupt"

    assert talk(script) == "corrupt"
    assert store.counts() == (0, 0, 0, 0)


def test_tokens_that_are_not_those_of_the_offer_are_refused_before_a_row_is_taken(
    talk: Any, store: ReplicaStore
) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer(tokens_digest=b"x" * 32) == "HAVE"
        peer.begin()
        for piece in peer.pieces():
            peer.data(piece)
        assert peer.heard() == "NACK corrupt"

    assert talk(script) == "corrupt"
    assert store.counts() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "payload", [b"\x28\xb5\x2f\xfd noise", b"", zstandard.compress(bytes(1 << 22))], ids=len
)
def test_a_frame_that_does_not_unpack_to_what_it_says_is_refused(talk: Any, payload: bytes) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer() == "HAVE"
        peer.begin()
        peer.data(peer.pieces()[0])
        piece = peer.pieces()[1]
        peer.data(piece, payload=payload, raw_len=piece.size, codec=Codec.ZSTD)
        peer.data(peer.pieces()[2])
        peer.commit()
        assert peer.heard() == "NACK corrupt"

    assert talk(script) == "corrupt"


def test_a_sender_that_goes_before_the_answer_does_not_undo_a_commit(talk: Any) -> None:
    def script(peer: Peer) -> None:
        assert peer.offer() == "HAVE"
        peer.begin()
        for piece in peer.pieces():
            peer.data(piece)
        peer.commit()

    assert talk(script) == "done"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_disk_that_fills_up_keeps_what_was_written_and_goes_on_from_there(
    talk: Any, data: bytes, monkeypatch: pytest.MonkeyPatch, store: ReplicaStore, share: float
) -> None:
    whole = 512 * 600

    def full(fd: int, data: Any, offset: int) -> None:
        if offset + len(data) > share * whole:
            raise OSError(errno.ENOSPC, "no space left on device")
        pwrite_all(fd, data, offset)

    def no_scatter(fd: int, data: Any, ranges: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(rowfile, "pwrite_all", full)
    monkeypatch.setattr(rowfile, "scatter", no_scatter)

    def script(peer: Peer) -> None:
        assert peer.offer() == "HAVE"
        peer.begin()
        for piece in peer.pieces():
            peer.data(piece)
        assert peer.heard() == "NACK no_space"

    assert talk(script) == "no_space"
    kept = int(share * 600) // 256 * 256
    assert store.counts()[2] == (kept > 0)
    monkeypatch.undo()

    def again(peer: Peer) -> None:
        peer.say(FrameType.OFFER, pack_message(peer.state.offer()))
        _, payload = peer.link.recv_message(peer.opener, FrameType.HAVE)
        assert msgspec.msgpack.decode(payload)["n"] == kept

    assert talk(again) == "link_lost"
