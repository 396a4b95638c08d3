"""An engine's output as lines a person can read: assembled, escaped, cut, and bounded in number. No I/O."""

from __future__ import annotations

import re
from collections import deque

from viiwork.limits import ENGINE_LAST_LINES, ENGINE_LINE_MAX_CHARS, ENGINE_LOG_LINES_PER_S

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# What llama.cpp says before it exits because of its command line; its exit code for that is 1, like for a
# crash.
_USAGE_LINE = re.compile(
    r"error: (?:invalid|unknown|unrecognized|unsupported)\b.*argument"
    r"|error while handling argument"
    r"|invalid value for argument"
    r"|expected value for argument"
    r"|\busage: .*\berror: ",
    re.IGNORECASE,
)
_USAGE_EXIT_CODES = (2, 126, 127)  # argparse and the launcher: bad usage, not executable, not found


class LineAssembler:
    """Bytes in, finished lines out; holds at most one unfinished line of bounded length."""

    def __init__(self, max_chars: int = ENGINE_LINE_MAX_CHARS) -> None:
        self._max = max_chars
        self._head = b""  # of the unfinished line, already cut
        self._cut = 0  # bytes of it that were thrown away

    def feed(self, data: bytes) -> list[str]:
        """The lines `data` finishes; what follows the last newline waits."""
        *finished, rest = data.split(b"\n")
        lines = []
        for part in finished:
            self._extend(part)
            lines.append(self._take())
        self._extend(rest)
        return [line for line in lines if line]

    def flush(self) -> list[str]:
        """The unfinished line, at the end of the output."""
        line = self._take()
        return [line] if line else []

    def _extend(self, part: bytes) -> None:
        room = self._max - len(self._head)
        self._head += part[:room]
        self._cut += max(0, len(part) - room)

    def _take(self) -> str:
        text = escape(self._head.rstrip(b"\r").decode("utf-8", "backslashreplace"))
        if self._cut:
            text = f"{text} ... [{self._cut} bytes cut]"
        self._head, self._cut = b"", 0
        return text


def escape(text: str) -> str:
    """Control characters as `\\x1b`: an engine's output must not steer a terminal or forge log lines."""
    return _UNPRINTABLE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class LogTail:
    """The newest lines of one engine, and which of them may still go into the node's log this second."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=ENGINE_LAST_LINES)
        self._second = -1
        self._shown = 0
        self._withheld = 0

    def add(self, line: str, now: float) -> list[str]:
        """Keep the line; answer with what to log for it: nothing when the engine is too talkative."""
        self._lines.append(line)
        said = []
        if int(now) != self._second:
            if self._withheld:
                said.append(f"({self._withheld} lines of output not shown)")
            self._second, self._shown, self._withheld = int(now), 0, 0
        if self._shown >= ENGINE_LOG_LINES_PER_S:
            self._withheld += 1
            return said
        self._shown += 1
        return [*said, line]

    def newest(self, count: int = ENGINE_LAST_LINES) -> tuple[str, ...]:
        return tuple(self._lines)[-count:]


def usage_error(exit_code: int, lines: tuple[str, ...]) -> str:
    """Why an engine that ended before it was ready can never start as configured; "" when it might."""
    for line in reversed(lines):
        if _USAGE_LINE.search(line):
            return line.strip()[:400]
    if exit_code in _USAGE_EXIT_CODES:
        return lines[-1].strip()[:400] if lines else f"exit code {exit_code}"
    return ""
