"""A link that ends after any byte, in either direction: what is held is right, and the next try is whole."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from viiwork.errors import KvError
from viiwork.kv.jobs import KeepJob, ReceiveDone, RenderJob, SendDone
from viiwork.kv.keep import keep_state
from viiwork.kv.link import Cancel
from viiwork.kv.receiver import receive_state
from viiwork.kv.render import render
from viiwork.kv.sender import send_state
from viiwork.kv.store import ReplicaStore
from viiwork.wire.replica import Mark

BEFORE, AFTER = 300, 700  # tokens held, and tokens sent
NEVER = 1 << 40


@dataclass
class Moved:
    """Reason words of both ends, and bytes that passed in both directions."""

    sent: SendDone | str
    received: ReceiveDone | str
    there: int
    back: int


class Mover:
    """Moves a session from the state after `BEFORE` tokens to that after `AFTER` over a link that is cut."""

    def __init__(self, kit: Any, tmp_path: Path, store: ReplicaStore, encrypt: bool) -> None:
        self.kit, self.store, self.encrypt = kit, store, encrypt
        self.paths = {n: tmp_path / f"state-{n}" for n in (BEFORE, AFTER)}
        self.data = {n: kit.make_turn(n, n_layer=4, row=64) for n in (BEFORE, AFTER)}
        for n, path in self.paths.items():
            path.write_bytes(self.data[n])
        self.out = tmp_path / "out"

    def hold(self, session: bytes) -> str:
        file = self.kit.state_file(self.paths[BEFORE], session=session)
        return keep_state(KeepJob(file=file), self.store, Cancel()).replica

    def move(self, session: bytes, there: int = NEVER, back: int = NEVER) -> Moved:
        """`there`, `back`: bytes after which the link ends."""
        near, near_mid = self.kit.tcp_pair()
        far_mid, far = self.kit.tcp_pair()
        known = (Mark(generation=1, source="a", keep=BEFORE),)
        facts = {"session": session, "generation": 2, "known": known, "encrypt": self.encrypt}
        job = self.kit.send_job(self.paths[AFTER], **facts)
        grant = self.kit.grant_for(self.data[AFTER])
        ends: dict[str, Any] = {}

        def run(what: str, work: Any) -> None:
            try:
                ends[what] = work()
            except KvError as error:
                ends[what] = error.reason

        def pump(what: str, source: socket.socket, target: socket.socket, limit: int) -> None:
            passed = 0
            try:
                while passed < limit and (data := source.recv(min(1 << 16, limit - passed))):
                    target.sendall(data)
                    passed += len(data)
            except OSError:
                pass  # the other direction was cut
            ends[what] = passed
            for sock, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR if passed >= limit else how)

        threads = [
            threading.Thread(target=pump, args=("there", near_mid, far_mid, there)),
            threading.Thread(target=pump, args=("back", far_mid, near_mid, back)),
            threading.Thread(target=run, args=("sent", lambda: send_state(near, job, Cancel()))),
            threading.Thread(
                target=run, args=("received", lambda: receive_state(far, grant, self.store, Cancel()))
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        near_mid.close()
        far_mid.close()
        return Moved(**ends)

    def rendered(self, replica: str) -> bytes | None:
        """None = not held."""
        try:
            opened = self.store.open(replica)
        except KvError as error:
            assert error.reason == "no_replica"
            return None
        target = self.kit.target_for(self.data[AFTER])
        try:
            render(opened, RenderJob(replica=replica, target=target, out=str(self.out)), Cancel())
            return self.out.read_bytes()
        finally:
            opened.close()
            self.out.unlink(missing_ok=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplicaStore]:
    store = ReplicaStore(tmp_path / "store", 1 << 30)
    yield store
    store.close()


def cuts(size: int, rng: random.Random) -> list[int]:
    """Every part of the handshake and of the first frames, places all over the rest, and the last bytes."""
    front = range(0, min(size, 1600), 37)
    return sorted({*front, *(rng.randrange(size) for _ in range(30)), *(size - n for n in (1, 16, 64, 80))})


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("way", ["there", "back"])
def test_wherever_the_link_is_cut_what_is_held_is_right_and_the_next_try_completes_it(
    kit: Any, tmp_path: Path, store: ReplicaStore, encrypt: bool, way: str
) -> None:
    mover = Mover(kit, tmp_path, store, encrypt)
    mover.hold(b"w" * 32)
    whole = mover.move(b"w" * 32)
    assert isinstance(whole.sent, SendDone) and isinstance(whole.received, ReceiveDone)
    assert whole.sent.kept == BEFORE and mover.rendered(whole.received.replica) == mover.data[AFTER]
    store.drop(whole.received.replica)
    resumed = committed = 0
    for cut in cuts(getattr(whole, way), random.Random(5)):
        session = cut.to_bytes(32, "big")
        old = mover.hold(session)
        broken = mover.move(session, **{way: cut})
        assert broken.sent == "link_lost", cut
        assert store.counts()[3] == 0
        if isinstance(broken.received, ReceiveDone):  # only the acknowledgement was lost
            committed += 1
            again, name = broken, broken.received.replica
        else:
            assert broken.received == "link_lost", cut
            assert mover.rendered(old) == mover.data[BEFORE], cut
            again = mover.move(session)
            assert isinstance(again.sent, SendDone) and isinstance(again.received, ReceiveDone), cut
            assert again.sent.kept >= BEFORE
            resumed += again.sent.kept > BEFORE
            name = again.received.replica
        assert mover.rendered(name) == mover.data[AFTER], cut
        assert store.drop(name)
        assert list((tmp_path / "store").iterdir()) == [], cut
    if way == "there":
        assert resumed >= 10  # whole groups that had come were not sent again
    else:
        assert committed >= 3
