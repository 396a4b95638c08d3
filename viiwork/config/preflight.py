"""What a valid config would still stumble over on this machine when the node starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
from pathlib import Path

from viiwork.config.fault import printable
from viiwork.config.model import Config, LlamacppSection


def startup_problems(config: Config) -> list[str]:
    """One line each, as the calling user would meet them; looks at files only and changes nothing."""
    found = [_not_writable("node.state_dir", config.node.state_dir)]
    if config.kv_share.enabled and config.kv_share.dir:
        found.append(_not_writable("kv_share.dir", config.kv_share.dir))
    for i, model in enumerate(config.models):
        if model.engine == "external":
            continue
        found.append(_unreadable(f"models[{i}].path", model.path))
        found.append(_no_engine(f"models[{i}].llamacpp.binary", model.llamacpp))
    return [problem for problem in found if problem]


def _unreadable(key: str, path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return f"{key}: {printable(path)}: {_why(error)}"
    if stat.S_ISDIR(mode):
        return f"{key}: {printable(path)} is a directory; name the model file in it"
    if not stat.S_ISREG(mode):
        return f"{key}: {printable(path)} is not a file"
    if not os.access(path, os.R_OK):
        return f"{key}: {printable(path)} cannot be read"
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        return f"{key}: {printable(path)}: {_why(error)}"
    return "" if magic == b"GGUF" else f"{key}: {printable(path)} is not a GGUF file"


def _not_writable(key: str, path: str) -> str:
    """The folder, or the nearest one above it, must let this user write."""
    folder = Path(path)
    try:
        while not folder.exists():
            folder = folder.parent
    except (OSError, ValueError) as error:
        return f"{key}: {printable(path)}: {_why(error)}"
    if not folder.is_dir():
        return f"{key}: {printable(str(folder))} is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{key}: {printable(path)} cannot be written, as {printable(str(folder))} stands"
    return ""


def _no_engine(key: str, llamacpp: LlamacppSection) -> str:
    binary = llamacpp.binary
    embedded = importlib.util.find_spec("xllamacpp") is not None
    if binary == "embedded":
        return (
            ""
            if embedded
            else f"{key}: embedded needs the package xllamacpp: pip install 'viiwork[embedded]'"
        )
    if shutil.which(binary or "llama-server") or (not binary and embedded):
        return ""
    if not binary:
        return f"{key}: no llama-server on PATH, and xllamacpp is not installed"
    return f"{key}: {printable(binary)} is not a program that can be run"


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or "cannot be looked at"
