"""Saying a thing once instead of a thousand times. Pure: `now` comes in."""

from __future__ import annotations

from viiwork.limits import LOG_KEYS_MAX, LOG_REPEAT_S, MESH_PROBLEM_KEPT_S, MESH_PROBLEMS_MAX

_LINE_MAX_CHARS = 300


class Repeats:
    """Lets the same key through once per interval; remembers a bounded number of keys."""

    def __init__(self, every_s: float = LOG_REPEAT_S, max_keys: int = LOG_KEYS_MAX) -> None:
        self._every_s = every_s
        self._max_keys = max_keys
        self._last: dict[str, float] = {}  # oldest first

    def is_due(self, key: str, now: float) -> bool:
        """True if `key` was not let through for the interval; it counts as let through then.

        When all places are taken by keys that are still young, a new key is not let through: whoever
        invents names must not be able to fill the log with them.
        """
        last = self._last.get(key)
        if last is not None:
            if now - last < self._every_s:
                return False
            del self._last[key]  # goes to the end of the order
        elif len(self._last) >= self._max_keys:
            oldest = next(iter(self._last))
            if now - self._last[oldest] < self._every_s:
                return False
            del self._last[oldest]
        self._last[key] = now
        return True


class Problems:
    """Current problems, one line each, newest text per key; a problem not seen for a while is over."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[float, str]] = {}
        self._repeats = Repeats()

    def add(self, key: str, line: str, now: float) -> bool:
        """Note a problem; True if it should be logged now."""
        self._lines.pop(key, None)
        if len(self._lines) >= MESH_PROBLEMS_MAX:
            del self._lines[next(iter(self._lines))]
        self._lines[key] = (now, one_line(line))
        return self._repeats.is_due(key, now)

    def clear(self, key: str) -> None:
        self._lines.pop(key, None)

    def lines(self, now: float) -> list[str]:
        return [line for at, line in self._lines.values() if now - at < MESH_PROBLEM_KEPT_S]


def one_line(text: str) -> str:
    """`text` fit for a log line and a terminal: no control characters, bounded."""
    plain = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: _LINE_MAX_CHARS + 1]
    )
    return plain if len(plain) <= _LINE_MAX_CHARS else plain[: _LINE_MAX_CHARS - 1] + "…"
