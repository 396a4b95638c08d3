"""The replica folder of one worker: budget, eviction, age, and commits that are whole or not there.

Replicas live as long as the process: the folder is emptied at start and at stop. File names are hashes.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from viiwork.errors import KvError
from viiwork.kv.link import Cancel, file_errors
from viiwork.limits import (
    KV_DISK_RESERVE_BYTES,
    KV_MANIFEST_MAX_BYTES,
    KV_REPLICA_AGE_S,
    KV_REPLICAS_MAX,
    KV_SUPERSEDE_S,
)
from viiwork.wire.groups import cache_bytes
from viiwork.wire.replica import (
    TOKEN_BYTES,
    BlobFacts,
    BlobManifest,
    Manifest,
    Offer,
    line_of,
    replica_name,
    seal,
    unseal,
)

_OURS = re.compile(r"[0-9a-f]{32}\.(rows-[01]|manifest|journal|sealing|(recurrent|checkpoint)-\d+(\.part)?)")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Known:
    """A manifest on disk, as far as it is kept in memory."""

    name: str
    generation: int
    n_tokens: int


@dataclass(slots=True)
class Entry:
    """One session on one model: a replica, the verified rows of an unfinished one, or both."""

    stem: str
    committed: Known | None = None
    unfinished: Known | None = None
    size: int = 0  # bytes allocated on disk, while no transfer runs
    touched_s: float = 0.0
    readers: int = 0
    incoming: Claim | None = None


@dataclass(slots=True)
class Claim:
    """Room for a transfer into an entry; ends with `release`."""

    entry: Entry
    line: bytes
    generation: int
    extra: int  # bytes it may add
    evicted: tuple[str, ...]
    cancel: Cancel
    before: int = 0  # bytes allocated when it began
    files: list[int] = field(default_factory=list)  # row files, one a cache

    @property
    def stem(self) -> str:
        return self.entry.stem


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica being read; it stays as it is until `close`, whatever happens to the entry."""

    name: str
    manifest: Manifest
    rows: tuple[int, ...]
    blobs: tuple[int, ...]  # as in the manifest
    close: Callable[[], None]


def wipe(root: Path) -> None:
    """Remove the replicas a killed worker left in `root`."""
    with suppress(FileNotFoundError):
        for path in root.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)


def blob_file(stem: str, blob: BlobFacts) -> str:
    return f"{stem}.{blob.kind}-{blob.n_tokens}"


class ReplicaStore:
    """Sole owner of its folder; all methods may be called from any thread and raise `KvError`."""

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        *,
        max_replicas: int = KV_REPLICAS_MAX,
        disk_reserve_bytes: int = KV_DISK_RESERVE_BYTES,
        age_s: float = KV_REPLICA_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._max, self._disk_reserve = max_replicas, disk_reserve_bytes
        self._age_s, self._clock = age_s, clock
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._entries: dict[bytes, Entry] = {}  # by line, the one touched longest ago first
        with file_errors():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._dir = os.open(root, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            self._claim_folder(root)
        except BaseException:
            os.close(self._dir)
            raise

    def _claim_folder(self, root: Path) -> None:
        if os.fstat(self._dir).st_uid != os.geteuid():
            raise KvError("store", f"{root} belongs to another user")
        with file_errors():
            os.fchmod(self._dir, 0o700)
        try:
            fcntl.flock(self._dir, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KvError("store", f"{root} is in use by another worker") from None
        self._wipe()

    def close(self) -> None:
        """Remove every replica and let go of the folder."""
        with self._lock:
            self._entries.clear()
            self._wipe()
            os.close(self._dir)

    def _wipe(self) -> None:
        for name in os.listdir(self._dir):
            if _OURS.fullmatch(name):
                self.unlink(name)

    # -- transfers

    def claim(self, offer: Offer, cancel: Cancel) -> Claim:
        """Make room for a transfer, evicting the oldest replicas; reasons: have_newer, busy, no_space.

        An unfinished transfer of the session that is not newer is cancelled and waited for.
        """
        line = line_of(offer)
        with self._lock:
            swept = self._sweep()
            entry = self._entries.get(line) or Entry(line.hex()[:32])
            self._refuse_older(entry, offer)
            if entry.incoming is not None:
                entry.incoming.cancel.set("superseded")
                if not self._released.wait_for(lambda: entry.incoming is None, KV_SUPERSEDE_S):
                    raise KvError("busy", "an unfinished state of this session does not let go")
                entry = self._entries.get(line) or Entry(line.hex()[:32])
                self._refuse_older(entry, offer)
                if entry.incoming is not None:
                    raise KvError("busy", "another state of this session came first")
            extra = max(0, _bytes_of(offer) - entry.size)
            evicted = self._make_room(entry, extra)
            claim = Claim(entry, line, offer.generation, extra, (*swept, *evicted), cancel, entry.size)
            with file_errors():
                try:
                    for index in range(len(offer.shape.caches)):
                        flags = os.O_RDWR | os.O_CREAT | _FLAGS
                        claim.files.append(
                            os.open(f"{entry.stem}.rows-{index}", flags, 0o600, dir_fd=self._dir)
                        )
                except OSError:
                    self._close_files(claim)
                    if line not in self._entries:
                        self._unlink_all(entry)
                    raise
            entry.incoming = claim
            self._entries[line] = entry
            return claim

    def _refuse_older(self, entry: Entry, offer: Offer) -> None:
        running = entry.incoming
        newer = entry.committed is not None and entry.committed.generation >= offer.generation
        if newer or (running is not None and running.generation > offer.generation):
            raise KvError("have_newer", "the replica here is as new")

    def release(self, claim: Claim) -> None:
        """The transfer is over, whatever came of it; an entry without any manifest is removed."""
        with self._lock:
            entry = claim.entry
            if entry.incoming is not claim:
                return
            entry.incoming = None
            self._close_files(claim)
            for name in os.listdir(self._dir):
                if name.startswith(entry.stem) and name.endswith((".part", ".sealing")):
                    self.unlink(name)
            if entry.committed is None and entry.unfinished is None:
                self._remove(claim.line)
            else:
                entry.size = self._allocated(entry)
            self._released.notify_all()

    def committed(self, claim: Claim, manifest: Manifest, cut_rows: Callable[[], None]) -> str:
        """Write the manifest: the commit. The name of the replica it replaced, "" = none."""
        with self._lock:
            entry = claim.entry
            old = entry.committed
            self._write(f"{entry.stem}.manifest", seal(manifest))
            entry.committed = Known(replica_name(manifest), manifest.generation, manifest.n_tokens)
            entry.touched_s = self._clock()
            self._entries[claim.line] = self._entries.pop(claim.line)
            self._forget_unfinished(entry)
            self._drop_blobs(entry, manifest.blobs)
            cut_rows()
            return old.name if old is not None and old.name != entry.committed.name else ""

    def truncated(self, claim: Claim, manifest: Manifest | None, blobs: tuple[BlobManifest, ...]) -> None:
        """Rows behind the manifest's are about to be overwritten, None = all of them; these blobs stay.

        Reason `busy` while the replica is being read.
        """
        with self._lock:
            entry = claim.entry
            if entry.readers:
                raise KvError("busy", "the replica is being read")
            if manifest is None:
                entry.committed = None
                self.unlink(f"{entry.stem}.manifest")
                self._drop_blobs(entry, blobs)
                return
            self._write(f"{entry.stem}.manifest", seal(manifest))
            entry.committed = Known(replica_name(manifest), manifest.generation, manifest.n_tokens)
            self._drop_blobs(entry, blobs)

    def journal(self, claim: Claim, manifest: Manifest) -> None:
        """Keep the verified rows of a transfer that broke."""
        with self._lock:
            entry = claim.entry
            self._write(f"{entry.stem}.journal", seal(manifest))
            entry.unfinished = Known(replica_name(manifest), manifest.generation, manifest.n_tokens)
            entry.touched_s = self._clock()

    def forget_unfinished(self, claim: Claim) -> None:
        with self._lock:
            self._forget_unfinished(claim.entry)

    def spoil(self, claim: Claim) -> None:
        """What the entry holds is not what was thought: nothing of it may be used again."""
        with self._lock:
            claim.entry.committed = None
            self._forget_unfinished(claim.entry)

    def held(self, claim: Claim) -> tuple[Manifest, ...]:
        """What the entry's files hold: of an unfinished transfer first, then the replica."""
        with self._lock:
            unfinished = claim.entry.unfinished
            found = (self._read(f"{claim.stem}.journal") if unfinished else None, self._replica(claim))
        return tuple(manifest for manifest in found if manifest is not None)

    def replica(self, claim: Claim) -> Manifest | None:
        with self._lock:
            return self._replica(claim)

    def _replica(self, claim: Claim) -> Manifest | None:
        return self._read(f"{claim.stem}.manifest") if claim.entry.committed else None

    def create_part(self, claim: Claim, blob: BlobFacts) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | _FLAGS
        with file_errors():
            return os.open(f"{blob_file(claim.stem, blob)}.part", flags, 0o600, dir_fd=self._dir)

    def place_part(self, claim: Claim, blob: BlobFacts) -> None:
        name = blob_file(claim.stem, blob)
        with file_errors():
            os.rename(f"{name}.part", name, src_dir_fd=self._dir, dst_dir_fd=self._dir)

    # -- replicas

    def open(self, name: str) -> Opened:
        """Raises `KvError` (`no_replica`, `bad_manifest`)."""
        with self._lock:
            entry = self._named(name)
            if entry is None:
                raise KvError("no_replica", "the replica is not here (any more)")
            manifest = self._read(f"{entry.stem}.manifest")
            fds: list[int] = []
            try:
                with file_errors():
                    for index in range(len(manifest.caches)):
                        fds.append(
                            os.open(f"{entry.stem}.rows-{index}", os.O_RDONLY | _FLAGS, dir_fd=self._dir)
                        )
                    for blob in manifest.blobs:
                        path = blob_file(entry.stem, blob.facts)
                        fds.append(os.open(path, os.O_RDONLY | _FLAGS, dir_fd=self._dir))
            except KvError:
                for fd in fds:
                    os.close(fd)
                raise
            entry.readers += 1
        rows, blobs = tuple(fds[: len(manifest.caches)]), tuple(fds[len(manifest.caches) :])

        def close() -> None:
            for fd in fds:
                os.close(fd)
            with self._lock:
                entry.readers -= 1

        return Opened(name, manifest, rows, blobs, close)

    def drop(self, name: str) -> bool:
        """Remove a replica; a transfer that extends it goes on."""
        with self._lock:
            for line, entry in self._entries.items():
                if entry.committed is None or entry.committed.name != name:
                    continue
                if entry.incoming is None:
                    self._remove(line)
                else:
                    entry.committed = None
                    self.unlink(f"{entry.stem}.manifest")
                return True
            return False

    def counts(self) -> tuple[int, int, int, int]:
        """Replicas, bytes on disk, unfinished transfers, transfers coming in."""
        with self._lock:
            self._sweep()
            entries = self._entries.values()
            return (
                sum(entry.committed is not None for entry in entries),
                sum(self._size(entry) for entry in entries),
                sum(entry.unfinished is not None for entry in entries),
                sum(entry.incoming is not None for entry in entries),
            )

    # -- called with the lock held

    def _named(self, name: str) -> Entry | None:
        return next((e for e in self._entries.values() if e.committed and e.committed.name == name), None)

    def _sweep(self) -> list[str]:
        """Remove what is older than a replica may become; the names of replicas among it."""
        limit = self._clock() - self._age_s
        old = [line for line, entry in self._entries.items() if entry.touched_s < limit and _is_idle(entry)]
        return [name for line in old if (name := self._remove(line))]

    def _make_room(self, entry: Entry, extra: int) -> list[str]:
        """Evict oldest first, but nothing when even that would not be enough."""
        running = [e.incoming for e in self._entries.values() if e.incoming is not None]
        disk = os.fstatvfs(self._dir)
        # Transfers that run have not filled their room yet: count them as if they had.
        unwritten = sum(max(0, c.extra - (self._allocated(c.entry) - c.before)) for c in running)
        free = disk.f_bavail * disk.f_frsize - self._disk_reserve - unwritten
        held = sum(e.size for e in self._entries.values()) + sum(c.extra for c in running)
        over_budget, over_disk = held + extra - self.budget_bytes, extra - free
        over_count = len(self._entries) + (entry.committed is None) - self._max
        idle = {line: e for line, e in self._entries.items() if e is not entry and _is_idle(e)}
        if max(over_budget, over_disk) > sum(e.size for e in idle.values()) or over_count > len(idle):
            raise KvError("no_space", f"no room for {extra} bytes")
        evicted = []
        for line, other in idle.items():
            if max(over_budget, over_disk, over_count) <= 0:
                break
            over_budget, over_disk, over_count = (
                over_budget - other.size,
                over_disk - other.size,
                over_count - 1,
            )
            if name := self._remove(line):
                evicted.append(name)
        return evicted

    def _size(self, entry: Entry) -> int:
        return entry.size if entry.incoming is None else self._allocated(entry)

    def _allocated(self, entry: Entry) -> int:
        total = 0
        for name in self._files_of(entry):
            with suppress(FileNotFoundError):
                total += os.stat(name, dir_fd=self._dir, follow_symlinks=False).st_blocks * 512
        return total

    def _files_of(self, entry: Entry) -> list[str]:
        return [name for name in os.listdir(self._dir) if name.startswith(entry.stem)]

    def _remove(self, line: bytes) -> str:
        entry = self._entries.pop(line)
        self._unlink_all(entry)
        return entry.committed.name if entry.committed is not None else ""

    def _unlink_all(self, entry: Entry) -> None:
        # The manifest first: without one the rest does not exist.
        self.unlink(f"{entry.stem}.manifest")
        for name in self._files_of(entry):
            self.unlink(name)

    def _forget_unfinished(self, entry: Entry) -> None:
        entry.unfinished = None
        self.unlink(f"{entry.stem}.journal")

    def _drop_blobs(self, entry: Entry, blobs: tuple[BlobManifest, ...]) -> None:
        kept = {blob_file(entry.stem, blob.facts) for blob in blobs}
        for name in self._files_of(entry):
            if re.fullmatch(r"[0-9a-f]{32}\.(recurrent|checkpoint)-\d+", name) and name not in kept:
                self.unlink(name)

    def _close_files(self, claim: Claim) -> None:
        while claim.files:
            os.close(claim.files.pop())

    def unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._dir)

    def _read(self, name: str) -> Manifest:
        with file_errors():
            fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=self._dir)
            with open(fd, "rb") as file:
                return unseal(file.read(KV_MANIFEST_MAX_BYTES + 1))

    def _write(self, name: str, data: bytes) -> None:
        temporary = name.rpartition(".")[0] + ".sealing"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS
        with file_errors():
            with open(os.open(temporary, flags, 0o600, dir_fd=self._dir), "wb") as file:
                file.write(data)
            os.rename(temporary, name, src_dir_fd=self._dir, dst_dir_fd=self._dir)


def _is_idle(entry: Entry) -> bool:
    return entry.incoming is None and entry.readers == 0


def _bytes_of(offer: Offer) -> int:
    """What a replica of this state takes, within a few pages."""
    rows = sum(
        cache_bytes(cache) * (offer.n_tokens - low)
        for cache, low in zip(offer.shape.caches, offer.needed, strict=True)
    )
    return rows + TOKEN_BYTES * offer.n_tokens + sum(blob.size for blob in offer.blobs)
