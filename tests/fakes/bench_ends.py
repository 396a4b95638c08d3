"""Both ends of `viiwork bench kvshare` as processes of their own, on loopback or in network namespaces."""

from __future__ import annotations

import base64
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.node.nodes import free_port

ENDS_WITHIN_S = 300.0
SECRET = base64.b64encode(bytes(range(32))).decode()
OTHER_SECRET = base64.b64encode(bytes(32)).decode()


def command(*words: str, netns: str = "") -> list[str]:
    before = ["ip", "netns", "exec", netns] if netns else []
    return [*before, sys.executable, "-m", "viiwork", "bench", "kvshare", *words]


def env(secret: str = "", **more: str) -> dict[str, str]:
    """The environment with this mesh secret alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VIIWORK_")}
    return kept | ({"VIIWORK_MESH_SECRET": secret} if secret else {}) | more


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What was said of the failure, and that it was one line."""
        lines = [line for line in self.err.splitlines() if line.startswith("viiwork: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


class Far:
    """The listening end, from its first line on."""

    def __init__(
        self, folder: Path, *, secret: str = "", netns: str = "", port: int = 0, more: Sequence[str] = ()
    ) -> None:
        self.folder, self.port = folder, port or free_port("127.0.0.1")
        folder.mkdir(exist_ok=True)
        words = command("--listen", "--port", str(self.port), "--dir", str(folder), *more, netns=netns)
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=env(secret), text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> Far:
        first = self._lines.get(timeout=ENDS_WITHIN_S)
        assert first.startswith("listening"), first
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(ENDS_WITHIN_S)
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def until_says(self, text: str) -> str:
        """The line in which it says so."""
        while line := self._lines.get(timeout=ENDS_WITHIN_S):
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}")


def near(*words: str, secret: str = "", netns: str = "", **more: str) -> Ended:
    """Run the asking end, or any other, to its end."""
    done = subprocess.run(
        command(*words, netns=netns),
        capture_output=True,
        env=env(secret, **more),
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)
