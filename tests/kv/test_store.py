from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from viiwork.errors import KvError
from viiwork.kv.store import Incoming, ReplicaStore
from viiwork.wire.replica import Offer

SIZE = 100_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[ReplicaStore]:
    store = ReplicaStore(root, 10 * SIZE, max_replicas=5)
    yield store
    store.close()


@pytest.fixture
def offer(kit: Any) -> Callable[..., Offer]:
    info = kit.info_of(kit.make_save(10))

    def make(session: int, generation: int = 1, size: int = SIZE) -> Offer:
        return Offer(
            session=session.to_bytes(32, "big"),
            model_fp=b"m" * 32,
            shape=info.shape,
            n_tokens=10,
            tokens_digest=info.tokens_digest,
            total_bytes=size,
            chunk_bytes=1 << 20,
            generation=generation,
            source="a",
            created_unix_s=0.0,
        )

    return make


@pytest.fixture
def put(store: ReplicaStore, offer: Any, kit: Any) -> Callable[..., tuple[str, tuple[str, ...]]]:
    """Commit one replica; its name and what had to go."""
    info = kit.info_of(kit.make_save(10))

    def run(session: int, generation: int = 1, size: int = SIZE) -> tuple[str, tuple[str, ...]]:
        incoming = store.reserve(offer(session, generation, size))
        _, replaced = store.commit(incoming, b"r" * 32, info)
        return incoming.name, (*incoming.evicted, *replaced)

    return run


def refused(store: ReplicaStore, offer: Offer) -> str:
    with pytest.raises(KvError) as caught:
        store.reserve(offer)
    return caught.value.reason


def test_the_folder_and_its_files_are_private(root: Path, put: Any) -> None:
    name, _ = put(1)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert sorted(path.name for path in root.iterdir()) == [f"{name}.manifest", f"{name}.state"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}


def test_the_oldest_replicas_make_room(store: ReplicaStore, put: Any, root: Path) -> None:
    names = [put(session, size=3 * SIZE)[0] for session in range(3)]
    _, dropped = put(3, size=5 * SIZE)
    assert dropped == (names[0], names[1])
    assert store.counts() == (2, 8 * SIZE, 0, 0)
    assert len(list(root.iterdir())) == 4


def test_a_state_that_can_never_fit_evicts_nobody(store: ReplicaStore, put: Any, offer: Any) -> None:
    put(1)
    assert refused(store, offer(2, size=10 * SIZE + 1)) == "no_space"
    assert store.counts()[0] == 1


def test_what_is_being_received_counts_and_is_not_evicted(store: ReplicaStore, offer: Any) -> None:
    incoming = store.reserve(offer(1, size=6 * SIZE))
    assert refused(store, offer(2, size=5 * SIZE)) == "no_space"
    store.abort(incoming)
    assert store.counts() == (0, 0, 0, 0)
    store.abort(store.reserve(offer(2, size=5 * SIZE)))


def test_the_number_of_replicas_is_bounded(store: ReplicaStore, put: Any) -> None:
    first, _ = put(0)
    for session in range(1, 5):
        assert put(session)[1] == ()
    assert put(5)[1] == (first,)


def test_generations_only_go_up(store: ReplicaStore, put: Any, offer: Any) -> None:
    old, _ = put(1, generation=5)
    assert refused(store, offer(1, generation=5)) == "have_newer"
    assert refused(store, offer(1, generation=4)) == "have_newer"
    new, dropped = put(1, generation=6)
    assert dropped == (old,) and store.counts()[0] == 1
    assert store.open(new).manifest.offer.generation == 6


def test_the_older_of_two_that_arrive_together_gives_way(
    store: ReplicaStore, offer: Any, kit: Any, root: Path
) -> None:
    info = kit.info_of(kit.make_save(10))
    older, newer = store.reserve(offer(1, generation=1)), store.reserve(offer(1, generation=2))
    store.commit(newer, b"r" * 32, info)
    with pytest.raises(KvError) as caught:
        store.commit(older, b"r" * 32, info)
    assert caught.value.reason == "have_newer"
    store.abort(older)
    assert store.counts() == (1, SIZE, 0, 0)
    assert len(list(root.iterdir())) == 2


def test_the_same_generation_is_received_once_at_a_time(store: ReplicaStore, offer: Any) -> None:
    incoming = store.reserve(offer(1))
    assert refused(store, offer(1)) == "busy"
    store.abort(incoming)


def test_a_replica_in_use_can_be_dropped_and_read_on(store: ReplicaStore, put: Any) -> None:
    name, _ = put(1)
    opened = store.open(name)
    assert store.drop(name) and not store.drop(name)
    assert len(os.pread(opened.fd, SIZE, 0)) == SIZE
    os.close(opened.fd)
    with pytest.raises(KvError) as caught:
        store.open(name)
    assert caught.value.reason == "no_replica"


def test_a_damaged_manifest_is_no_replica(store: ReplicaStore, put: Any, root: Path) -> None:
    name, _ = put(1)
    (root / f"{name}.manifest").write_bytes(b"something else")
    with pytest.raises(KvError) as caught:
        store.open(name)
    assert caught.value.reason == "bad_manifest"


def test_leftovers_go_at_the_start_and_foreign_files_stay(root: Path) -> None:
    root.mkdir()
    (root / f"{'a' * 32}.state").write_bytes(b"old")
    (root / f"{'b' * 32}.part").write_bytes(b"old")
    (root / "README").write_text("not ours")
    store = ReplicaStore(root, SIZE)
    assert [path.name for path in root.iterdir()] == ["README"]
    store.close()


def test_a_folder_has_one_owner(store: ReplicaStore, root: Path) -> None:
    with pytest.raises(KvError, match="in use"):
        ReplicaStore(root, SIZE)


def test_a_link_is_not_taken_for_the_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(KvError):
        ReplicaStore(tmp_path / "link", SIZE)


def test_a_planted_link_is_not_written_through(
    store: ReplicaStore, offer: Any, root: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    probe: Incoming = store.reserve(offer(1))
    store.abort(probe)
    (root / f"{probe.name}.part").symlink_to(victim)
    assert refused(store, offer(1)) == "io_error"
    assert victim.read_text() == "keep"


def test_the_disk_keeps_its_reserve(root: Path, offer: Any) -> None:
    store = ReplicaStore(root, 1 << 60, disk_reserve_bytes=1 << 60)
    try:
        assert refused(store, offer(1)) == "no_space"
    finally:
        store.close()
