"""The replica folder: budget, age, rights, and a store that agrees with a plain model."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from viiwork.errors import KvError
from viiwork.kv.extract import open_state
from viiwork.kv.incoming import Incoming
from viiwork.kv.jobs import KeepJob, RenderJob
from viiwork.kv.keep import keep_state
from viiwork.kv.link import Cancel
from viiwork.kv.render import render
from viiwork.kv.store import ReplicaStore
from viiwork.wire.channel import FrameType
from viiwork.wire.delta import keep_of, pieces_of
from viiwork.wire.replica import Mark, Offer, replica_name

SHAPE = {"n_layer": 2, "row": 64}
ROWS = 400  # of a state: 100 KB of rows and some tokens
ROOM = 10 * 110_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


@pytest.fixture
def store(root: Path, clock: list[float]) -> Iterator[ReplicaStore]:
    store = ReplicaStore(root, ROOM, max_replicas=5, age_s=100.0, clock=lambda: clock[0])
    yield store
    store.close()


@pytest.fixture
def put(store: ReplicaStore, kit: Any, tmp_path: Path) -> Callable[..., Any]:
    """Keep one state of a session."""

    def run(session: int, generation: int = 1, n: int = ROWS, **changes: Any) -> Any:
        path = tmp_path / "own.bin"
        path.write_bytes(kit.make_turn(n, ((0, session),), **SHAPE))
        key = session.to_bytes(32, "big")
        file = kit.state_file(path, session=key, generation=generation, **changes)
        return keep_state(KeepJob(file=file), store, Cancel())

    return run


@pytest.fixture
def offer(kit: Any, tmp_path: Path) -> Callable[..., Offer]:
    def make(session: int, generation: int = 1, n: int = ROWS) -> Offer:
        path = tmp_path / "offered.bin"
        path.write_bytes(kit.make_turn(n, ((0, session),), **SHAPE))
        file = kit.state_file(path, session=session.to_bytes(32, "big"), generation=generation)
        with open_state(file) as state:
            return state.offer()

    return make


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_folder_and_files_are_for_the_owner_only(store: ReplicaStore, put: Any, root: Path) -> None:
    put(1)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}


def test_an_opened_replica_is_read_after_it_was_dropped(store: ReplicaStore, put: Any, root: Path) -> None:
    name = put(1).replica
    opened = store.open(name)
    assert store.drop(name)
    assert names(root) == set()
    assert os.fstat(opened.rows[0]).st_size > 0
    opened.close()
    with pytest.raises(KvError) as caught:
        store.open(name)
    assert caught.value.reason == "no_replica"


def test_a_changed_manifest_is_not_opened(store: ReplicaStore, put: Any, root: Path) -> None:
    name = put(1).replica
    (path,) = root.glob("*.manifest")
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(KvError) as caught:
        store.open(name)
    assert caught.value.reason == "bad_manifest"


def test_the_oldest_go_when_the_count_or_the_budget_is_reached(store: ReplicaStore, put: Any) -> None:
    kept = [put(session).replica for session in range(5)]
    assert put(5).dropped == (kept[0],)
    assert put(1, generation=2).dropped == (kept[1],)  # replaced, and now the newest
    assert put(6).dropped == (kept[2],)
    large = put(7, n=3000)
    assert kept[3] in large.dropped and store.counts()[1] <= ROOM


def test_a_replica_that_is_read_or_received_is_not_evicted(store: ReplicaStore, put: Any, offer: Any) -> None:
    kept = [put(session).replica for session in range(5)]
    opened = store.open(kept[0])
    extending = Incoming(store, offer(1, generation=2, n=ROWS + 1), Cancel())
    assert put(5).dropped == (kept[2],)
    opened.close()
    extending.close()
    assert put(6).dropped == (kept[0],)
    assert store.open(kept[1]).manifest.n_tokens == ROWS


def test_a_state_that_can_never_fit_evicts_nobody(store: ReplicaStore, put: Any) -> None:
    put(1)
    with pytest.raises(KvError) as caught:
        put(2, n=5000)
    assert caught.value.reason == "no_space"
    assert store.counts()[0] == 1


def test_a_full_disk_counts_as_no_space(root: Path, offer: Any) -> None:
    store = ReplicaStore(root, ROOM, disk_reserve_bytes=1 << 60)
    with pytest.raises(KvError) as caught:
        store.claim(offer(1), Cancel())
    assert caught.value.reason == "no_space"
    assert names(root) == set()
    store.close()


def test_replicas_nobody_renewed_are_removed(store: ReplicaStore, put: Any, clock: list[float]) -> None:
    put(1)
    clock[0] += 60
    young = put(2).replica
    clock[0] += 60
    assert store.counts()[0] == 1
    opened = store.open(young)
    clock[0] += 60
    assert store.counts()[0] == 1  # it is being read
    opened.close()
    assert put(3).dropped == (young,)


def test_a_newer_state_takes_the_place_of_an_unfinished_one(store: ReplicaStore, offer: Any) -> None:
    first_cancel = Cancel()
    first = Incoming(store, offer(1, generation=2), first_cancel)
    first_cancel.watch(threading.Thread(target=first.close).start)
    second = Incoming(store, offer(1, generation=3), Cancel())
    assert first_cancel.reason == "superseded"
    with pytest.raises(KvError) as caught:
        Incoming(store, offer(1, generation=2), Cancel())
    assert caught.value.reason == "have_newer"
    second.close()
    assert store.counts() == (0, 0, 0, 0)


def test_rows_are_not_overwritten_under_a_reader(store: ReplicaStore, put: Any, kit: Any) -> None:
    opened = store.open(put(1).replica)
    with pytest.raises(KvError) as caught:
        put(1, generation=2, n=ROWS - 1, known=())  # its last group is another one
    assert caught.value.reason == "busy"
    known = (Mark(generation=1, source="a", keep=ROWS),)
    assert put(1, generation=2, n=ROWS + 10, known=known).kept == ROWS  # appending is fine
    opened.close()


def test_what_a_killed_worker_left_is_removed_and_other_files_stay(root: Path) -> None:
    root.mkdir()
    for suffix in ("rows-0", "rows-1", "manifest", "journal", "sealing", "recurrent-7", "checkpoint-9.part"):
        (root / f"{'0' * 32}.{suffix}").write_bytes(b"x")
    (root / "notes.txt").write_text("mine")
    store = ReplicaStore(root, ROOM)
    assert names(root) == {"notes.txt"}
    store.close()


def test_a_link_in_the_place_of_a_row_file_is_not_followed(
    store: ReplicaStore, put: Any, offer: Any, root: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    put(1)
    (rows,) = root.glob("*.rows-0")
    rows.unlink()
    rows.symlink_to(victim)
    with pytest.raises(KvError):
        Incoming(store, offer(1, generation=2), Cancel())
    assert victim.read_text() == "keep"


def test_a_folder_in_use_is_refused(store: ReplicaStore, root: Path) -> None:
    with pytest.raises(KvError) as caught:
        ReplicaStore(root, ROOM)
    assert caught.value.reason == "store"


class AgainstAModel(RuleBasedStateMachine):
    """Random turns, forks, crashes and lies of one session; the model is the save-file itself."""

    kit: Any
    folder: Path

    @initialize()
    def begin(self) -> None:

        self.root = self.folder / os.urandom(8).hex()
        self.store = ReplicaStore(self.root, 1 << 30)
        self.turn: tuple[int, tuple[tuple[int, int], ...]] = (0, ((0, 1),))
        self.generation, self.branch = 0, 1
        self.marks: list[Mark] = []
        self.replica = ""
        self.committed: bytes = b""
        self.truncated = False

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    @rule(grow=st.integers(1, 600))
    def append(self, grow: int) -> None:
        self._turn(self.turn[0], self.turn[0] + grow, fork=False)

    @rule(share=st.floats(0, 1), grow=st.integers(1, 300))
    def edit(self, share: float, grow: int) -> None:
        kept = int(self.turn[0] * share)
        self._turn(kept, kept + grow, fork=True)

    @rule(share=st.floats(0.1, 1))
    def cut_back(self, share: float) -> None:
        n = max(1, int(self.turn[0] * share))
        self._turn(n, n, fork=False)

    def _turn(self, kept: int, n: int, *, fork: bool) -> None:
        branches = tuple(branch for branch in self.turn[1] if branch[0] < kept or branch[0] == 0)
        if fork:
            self.branch += 1
            branches = (*(b for b in branches if b[0] < kept), (kept, self.branch))
        self.turn = n, branches
        self.marks = [msgspec.structs.replace(mark, keep=min(mark.keep, kept)) for mark in self.marks]

    @rule(forget=st.booleans())
    def move(self, forget: bool) -> None:
        self._run(1.0, forget)

    @rule(share=st.floats(0, 1), forget=st.booleans())
    def break_off(self, share: float, forget: bool) -> None:
        self._run(share, forget)

    def _run(self, share: float, forget: bool) -> None:
        if self.turn[0] == 0:
            return
        self.generation += 1
        data = self.kit.make_turn(*self.turn, **SHAPE)
        path = self.folder / "own.bin"
        path.write_bytes(data)
        known = () if forget else tuple(self.marks[-8:])
        file = self.kit.state_file(path, generation=self.generation, known=known)
        with open_state(file) as state:
            offer = state.offer()
            incoming = Incoming(self.store, offer, Cancel())
            have = incoming.have()
            keep = keep_of(offer, state.tokens, have, state.same_rows(have.digests, have.n))
            incoming.begin(keep)
            pieces = list(pieces_of(offer, have, keep, incoming.starts))
            buffer = memoryview(bytearray(1 << 22))
            done = len(pieces) if share == 1.0 else int(share * len(pieces))
            tokens_open = True
            for piece in pieces[:done]:
                if tokens_open and piece.type is not FrameType.TOKENS:
                    incoming.tokens_done()
                    tokens_open = False
                view = state.read(piece, buffer)
                incoming.write(piece, view, blake3(view).digest())
            if share == 1.0:
                manifest, _ = incoming.commit()
                self.replica, self.committed, self.truncated = replica_name(manifest), data, False
            else:
                self.truncated = self.truncated or keep < self._n_committed()
            incoming.close()
        self.marks.append(Mark(generation=self.generation, source="a", keep=self.turn[0]))

    def _n_committed(self) -> int:
        return self.kit.info_of(self.committed).n_tokens if self.committed else 0

    @invariant()
    def what_is_rendered_is_what_was_committed(self) -> None:
        if not getattr(self, "committed", b""):
            return
        try:
            opened = self.store.open(self.replica)
        except KvError as error:
            assert error.reason == "no_replica" and self.truncated
            return
        out = self.folder / "rendered.bin"
        out.unlink(missing_ok=True)
        job = RenderJob(replica=self.replica, target=self.kit.target_for(self.committed), out=str(out))
        try:
            done = render(opened, job, Cancel())
        finally:
            opened.close()
        made, info = out.read_bytes(), self.kit.info_of(self.committed)
        if not self.truncated:
            assert made == self.committed
            return
        # A prefix of what was committed, row for row.
        cut = self.kit.info_of(made)
        assert cut.n_tokens == done.n_tokens <= info.n_tokens
        for at, of in zip(cut.caches[0].data, info.caches[0].data, strict=True):
            assert made[at : at + 64 * cut.n_tokens] == self.committed[of : of + 64 * cut.n_tokens]


def test_the_store_agrees_with_a_plain_model(kit: Any, tmp_path: Path) -> None:
    AgainstAModel.kit, AgainstAModel.folder = kit, tmp_path
    case = AgainstAModel.TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
