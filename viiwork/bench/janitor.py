"""A process that undoes what its parent did, however the parent ends: `python -m viiwork.bench.janitor`.

It reads, line by line, what there is to undo, and begins when its input ends: because the parent closed
it, or because the parent is gone. Little is imported: it is started with every benchmark.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ENDS_WITHIN_S = 30.0
_KILL_WITHIN_S = 5.0
_LOOK_S = 0.3


class Janitor:
    """The parent's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "viiwork.bench.janitor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
            cwd="/",
        )

    def owes_folder(self, path: Path) -> None:
        """The folder and all in it is to go."""
        self._note("folder", str(path))

    def owes_namespace(self, name: str) -> None:
        """The network namespace and all processes in it are to go."""
        self._note("netns", name)

    def close(self) -> None:
        """Undo everything now, and wait for it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._note("done", "")  # our own processes have ended
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _note(self, what: str, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, name]).encode() + b"\n")
        self._process.stdin.flush()


def remove_namespace(name: str) -> None:
    """End the processes in a network namespace and remove it with its links; it may be gone already."""
    until = time.monotonic() + _KILL_WITHIN_S
    while pids := _pids_in(name):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(_LOOK_S / 10)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def keep_removing(names: list[str]) -> None:
    """Remove folders, and for a while end whatever was started on them: a process that was being started when
    its parent was killed shows its own command line, and makes its folder, only later.
    """
    until = time.monotonic() + _KILL_WITHIN_S
    while time.monotonic() < until:
        for name in names:
            for pid in _pids_naming(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(name, ignore_errors=True)
        time.sleep(_LOOK_S)


def _pids_naming(folder: str) -> list[int]:
    """Processes with the folder, whose name is like no other, on their command line; none without /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def _pids_in(name: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    owed = [json.loads(line) for line in sys.stdin]
    # Processes first: they would go on writing into the folders.
    for what, name in owed:
        if what == "netns":
            remove_namespace(name)
    for what, name in owed:
        if what == "folder":
            shutil.rmtree(name, ignore_errors=True)
    if ["done", ""] not in owed:
        keep_removing([name for what, name in owed if what == "folder"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
