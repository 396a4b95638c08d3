"""The node's folders: state, run files, save-files, replicas; and the lock that keeps a second node out."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from viiwork.config.model import Config
from viiwork.errors import StateDirError

SHM = Path("/dev/shm")
_PRIVATE = re.compile(r"viiwork-[0-9a-f]{16}(\.gone)?")


@dataclass(slots=True)
class Folders:
    """Open folders of one node; `close` removes what must not outlive it."""

    state: Path
    run: Path
    saves: Path | None  # root of the engines' --slot-save-path folders, None with kv_share off
    replicas: Path | None
    _lock: TextIO
    _private: Path | None
    _owner: TextIO | None  # lock in the private folder: its owner lives

    def close(self) -> None:
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        if self._owner is not None:
            self._owner.close()
        self._lock.close()


def open_folders(config: Config) -> Folders:
    """Make the folders and take the lock. Raises `StateDirError` with what to do."""
    state = Path(config.node.state_dir)
    try:
        state.mkdir(parents=True, exist_ok=True)
        run = state / "run"
        run.mkdir(exist_ok=True)
        lock = (run / "lock").open("w")
    except OSError as error:
        raise StateDirError(f"node.state_dir {state} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise StateDirError(f"another viiwork runs with node.state_dir {state}") from error
    private = private_folder(config, state)
    try:
        _clear(private)  # what an earlier run of this node left, whatever its config said
        if not config.kv_share.enabled:
            return Folders(state, run, None, None, lock, None, None)
        private.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(private.parent)
        private.mkdir(mode=0o700)
        owner = (private / "lock").open("w")
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (StateDirError, OSError) as error:
        lock.close()
        if isinstance(error, OSError):
            raise StateDirError(
                f"no folder for KV states (kv_share.dir): {private}: {error.strerror}"
            ) from error
        raise
    return Folders(state, run, private / "saves", private / "replicas", lock, private, owner)


def private_folder(config: Config, state: Path) -> Path:
    """Where KV states live: they are the conversations, so the folder is this node's alone."""
    # Named after the state folder, so that two nodes of one machine do not meet and a restart finds its own.
    name = "viiwork-" + hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:16]
    if config.kv_share.dir:
        return Path(config.kv_share.dir) / name
    if SHM.is_dir() and os.access(SHM, os.W_OK):
        return SHM / name
    return state / "kv"


def _clear(folder: Path) -> None:
    """Remove the folder, unless somebody else put it there."""
    if folder.is_symlink():
        raise StateDirError(f"{folder} is a link; remove it or set kv_share.dir")
    if folder.exists():
        if folder.lstat().st_uid != os.getuid():
            raise StateDirError(f"{folder} belongs to another user; remove it or set kv_share.dir")
        with suppress(FileNotFoundError):  # another node removes it as a leftover
            shutil.rmtree(folder)


def _clear_leftovers(parent: Path) -> None:
    """Remove what killed nodes of this user left there and will not come back for: it is in memory."""
    for folder in parent.iterdir():
        if not _PRIVATE.fullmatch(folder.name):
            continue
        with suppress(OSError):  # going by itself, or another user's
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its owner may start at this moment: it must not meet a folder that is half gone.
                gone = folder.with_name(f"{folder.name.removesuffix('.gone')}.gone")
                if gone != folder:
                    folder.rename(gone)
                shutil.rmtree(gone)
