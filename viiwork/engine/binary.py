"""Which program runs a model, and which flags it knows."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass

from viiwork.engine.command import EMBEDDED_FLAGS, EngineFlags
from viiwork.errors import EngineUsageError
from viiwork.limits import ENGINE_HELP_MAX_BYTES

EMBEDDED = "embedded"
_NATIVE = "llama-server"
_HELP_TIMEOUT_S = 20.0  # a CUDA build looks at every card before it prints
_HELP_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Binary:
    """A resolved `llamacpp.binary`."""

    program: tuple[str, ...]  # what goes in front of the arguments
    embedded: bool


def resolve_binary(wanted: str) -> Binary:
    """`wanted` is a path, a name, `embedded`, or "" for the best there is. Raises `EngineUsageError`."""
    if wanted == EMBEDDED:
        return _embedded()
    if wanted:
        found = shutil.which(os.path.expanduser(wanted))
        if found is None:
            raise EngineUsageError(f"llamacpp.binary: {wanted} is not an executable file and not on PATH")
        return Binary((os.path.abspath(found),), False)
    found = shutil.which(_NATIVE)
    if found is not None:
        return Binary((os.path.abspath(found),), False)
    if _has_embedded():
        return _embedded()
    raise EngineUsageError(
        f"no engine: {_NATIVE} is not on PATH and the embedded one is not installed "
        "(pip install 'viiwork[embedded]'); or set llamacpp.binary to a path"
    )


def _embedded() -> Binary:
    if not _has_embedded():
        raise EngineUsageError("llamacpp.binary: embedded needs the extra: pip install 'viiwork[embedded]'")
    return Binary((sys.executable, "-m", "viiwork.engine.embedded"), True)


def _has_embedded() -> bool:
    # Looked for, not imported: it would load the whole engine into the node.
    return importlib.util.find_spec("xllamacpp") is not None


class FlagProbe:
    """Asks each binary once what it knows; an unreadable one is asked again after half a minute."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], EngineFlags] = {}
        self._failed_at: dict[tuple[str, ...], float] = {}
        self._lock = asyncio.Lock()

    async def flags(self, binary: Binary) -> EngineFlags:
        """Flags of `binary`; none when its help cannot be read, which every build accepts."""
        if binary.embedded:
            return EMBEDDED_FLAGS
        async with self._lock:
            known = self._known.get(binary.program)
            failed_at = self._failed_at.get(binary.program)
            if known is not None:
                return known
            if failed_at is not None and time.monotonic() < failed_at + _HELP_RETRY_S:
                return EngineFlags()
            text = await _help_text(binary.program)
            if not text:
                self._failed_at[binary.program] = time.monotonic()
                return EngineFlags()
            self._known[binary.program] = EngineFlags.from_help(text)
            return self._known[binary.program]


async def _help_text(program: tuple[str, ...]) -> str:
    """What `--help` prints, bounded in size and time; "" when it does not."""
    try:
        process = await asyncio.create_subprocess_exec(
            *program,
            "--help",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return ""
    assert process.stdout is not None
    text = bytearray()
    try:
        async with asyncio.timeout(_HELP_TIMEOUT_S):
            while len(text) < ENGINE_HELP_MAX_BYTES and (part := await process.stdout.read(65536)):
                text += part
    except TimeoutError:
        text.clear()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return text.decode("utf-8", "replace")
