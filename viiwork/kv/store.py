"""The replica folder of one worker: budget, eviction, and commits that are whole or not there.

Replicas live as long as the process: the folder is emptied at start and at stop. File names are hashes.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from viiwork.errors import KvError
from viiwork.kv.files import pread_of
from viiwork.kv.link import file_errors
from viiwork.limits import KV_DISK_RESERVE_BYTES, KV_MESSAGE_MAX_BYTES, KV_REPLICAS_MAX
from viiwork.wire.replica import Manifest, Offer, line_of, replica_name, seal, unseal
from viiwork.wire.whole_file import PRead, SaveInfo

_OURS = re.compile(r"[0-9a-f]{32}\.(part|state|sealing|manifest)")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Entry:
    line: bytes
    generation: int
    size: int
    info: SaveInfo


@dataclass(frozen=True, slots=True)
class Incoming:
    """Room for a replica that is being received; ends with `commit` or `abort`."""

    name: str
    offer: Offer
    fd: int
    evicted: tuple[str, ...]

    @property
    def pread(self) -> PRead:
        return pread_of(self.fd)


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica being read; stays readable when it is dropped meanwhile. The holder closes `fd`."""

    name: str
    manifest: Manifest
    info: SaveInfo
    fd: int


def wipe(root: Path) -> None:
    """Remove the replicas a killed worker left in `root`."""
    with suppress(FileNotFoundError):
        for path in root.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)


class ReplicaStore:
    """Sole owner of its folder; all methods may be called from any thread and raise `KvError`."""

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        *,
        max_replicas: int = KV_REPLICAS_MAX,
        disk_reserve_bytes: int = KV_DISK_RESERVE_BYTES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._max, self._disk_reserve = max_replicas, disk_reserve_bytes
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}  # in order of commit, oldest first
        self._incoming: dict[str, Incoming] = {}
        with file_errors():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._dir = os.open(root, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            self._claim(root)
        except BaseException:
            os.close(self._dir)
            raise

    def _claim(self, root: Path) -> None:
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
                self._unlink(name)

    def reserve(self, offer: Offer) -> Incoming:
        """Make room, evicting the oldest replicas; reasons: have_newer, busy, no_space."""
        name, line = replica_name(offer), line_of(offer)
        with self._lock:
            self._refuse_older(line, offer)
            if name in self._incoming:
                raise KvError("busy", "this generation is being received already")
            evicted = self._make_room(offer.total_bytes)
            with file_errors():
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS
                fd = os.open(f"{name}.part", flags, 0o600, dir_fd=self._dir)
                try:
                    os.ftruncate(fd, offer.total_bytes)
                except OSError:
                    os.close(fd)
                    self._unlink(f"{name}.part")
                    raise
            incoming = Incoming(name, offer, fd, tuple(evicted))
            self._incoming[name] = incoming
            return incoming

    def commit(self, incoming: Incoming, root: bytes, info: SaveInfo) -> tuple[Manifest, tuple[str, ...]]:
        """Make it a replica; also the names it replaced. The caller has verified every byte."""
        offer, name = incoming.offer, incoming.name
        manifest = Manifest(offer=offer, root=root)
        line = line_of(offer)
        with self._lock:
            self._refuse_older(line, offer)
            with file_errors():
                os.rename(f"{name}.part", f"{name}.state", src_dir_fd=self._dir, dst_dir_fd=self._dir)
                try:
                    self._write_manifest(name, seal(manifest))
                except OSError:
                    self._unlink_all(name)
                    raise
            replaced = [other for other, entry in self._entries.items() if entry.line == line]
            for other in replaced:
                self._remove(other)
            self._entries[name] = _Entry(line, offer.generation, offer.total_bytes, info)
            self._release(incoming)
        return manifest, tuple(replaced)

    def abort(self, incoming: Incoming) -> None:
        """Give the room back; after `commit` it does nothing."""
        with self._lock:
            if self._incoming.get(incoming.name) is incoming:
                self._unlink(f"{incoming.name}.part")
                self._release(incoming)

    def open(self, name: str) -> Opened:
        """Raises `KvError` (`no_replica`, `bad_manifest`)."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                raise KvError("no_replica", "the replica is not here (any more)")
            with file_errors():
                sealed = os.open(f"{name}.manifest", os.O_RDONLY | _FLAGS, dir_fd=self._dir)
                try:
                    manifest = unseal(os.read(sealed, KV_MESSAGE_MAX_BYTES + 1))
                finally:
                    os.close(sealed)
                fd = os.open(f"{name}.state", os.O_RDONLY | _FLAGS, dir_fd=self._dir)
        return Opened(name, manifest, entry.info, fd)

    def drop(self, name: str) -> bool:
        with self._lock:
            found = name in self._entries
            if found:
                self._remove(name)
            return found

    def counts(self) -> tuple[int, int, int, int]:
        """Replicas, their bytes, transfers coming in, their bytes."""
        with self._lock:
            return len(self._entries), self._held(), len(self._incoming), self._reserved()

    # -- called with the lock held

    def _refuse_older(self, line: bytes, offer: Offer) -> None:
        if any(e.line == line and e.generation >= offer.generation for e in self._entries.values()):
            raise KvError("have_newer", "the replica here is as new")

    def _make_room(self, size: int) -> list[str]:
        """Evict oldest first, but nothing when even an empty store would be too small."""
        reserved = self._reserved()
        disk = os.fstatvfs(self._dir)
        # Transfers that run have not filled their reservation yet: count them as if they had.
        free = disk.f_bavail * disk.f_frsize - self._disk_reserve - self._unwritten()
        over_budget = self._held() + reserved + size - self.budget_bytes
        over_disk = size - free
        over_count = len(self._entries) + len(self._incoming) + 1 - self._max
        if max(over_budget, over_disk) > self._held() or over_count > len(self._entries):
            raise KvError("no_space", f"no room for {size} bytes")
        evicted = []
        for name in list(self._entries):
            if max(over_budget, over_disk, over_count) <= 0:
                break
            freed = self._entries[name].size
            self._remove(name)
            evicted.append(name)
            over_budget, over_disk, over_count = over_budget - freed, over_disk - freed, over_count - 1
        return evicted

    def _held(self) -> int:
        return sum(entry.size for entry in self._entries.values())

    def _reserved(self) -> int:
        return sum(incoming.offer.total_bytes for incoming in self._incoming.values())

    def _unwritten(self) -> int:
        return sum(
            max(0, incoming.offer.total_bytes - os.fstat(incoming.fd).st_blocks * 512)
            for incoming in self._incoming.values()
        )

    def _release(self, incoming: Incoming) -> None:
        del self._incoming[incoming.name]
        os.close(incoming.fd)

    def _remove(self, name: str) -> None:
        del self._entries[name]
        self._unlink_all(name)

    def _unlink_all(self, name: str) -> None:
        # The manifest first: without one a state does not exist.
        for suffix in ("manifest", "sealing", "state"):
            self._unlink(f"{name}.{suffix}")

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._dir)

    def _write_manifest(self, name: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
        with open(os.open(f"{name}.sealing", flags, 0o600, dir_fd=self._dir), "wb") as file:
            file.write(data)
        os.rename(f"{name}.sealing", f"{name}.manifest", src_dir_fd=self._dir, dst_dir_fd=self._dir)
