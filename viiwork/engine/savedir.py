"""The private folder a backend's engine writes its slots to."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from pathlib import Path

from viiwork.errors import EngineError


def save_dir_path(root: Path, model: str, index: int) -> Path:
    """Where it is: readable, and distinct for every name a model may have."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", model).lstrip(".")[:40]
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return root / f"{readable}-{digest}-{index}"


def prepare_save_dir(folder: Path) -> None:
    """An empty folder only this user can enter; what an earlier engine left in it is removed.

    The root may be in a place everybody can write to (/dev/shm), so a link or somebody else's folder is
    refused. Raises `EngineError`.
    """
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise EngineError(f"{folder} is not a folder of this user")
        folder.chmod(0o700)
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise EngineError(f"no folder for slot files: {folder}: {error.strerror}") from error
