"""What is wrong at one key, and how it is said in one line."""

from __future__ import annotations

import re

from viiwork.limits import CONFIG_ECHO_MAX_CHARS

# The base64 of 32 bytes: what a mesh secret looks like wherever it was pasted by mistake.
_BASE64 = "[A-Za-z0-9+/_-]"
_LIKE_A_SECRET = re.compile(f"(?<!{_BASE64}){_BASE64}{{43}}(?:=|(?!{_BASE64}))")


class Fault(Exception):
    """One broken rule: key path, what was expected, what was there; `line` 0 = the line of the key."""

    def __init__(self, path: str, expected: str, got: str, *, line: int = 0) -> None:
        super().__init__(path, expected, got, line)
        self.path = path
        self.expected = expected
        self.got = got
        self.line = line

    def __str__(self) -> str:
        said = f"expected {self.expected}, got {self.got}"
        return f"{self.path}: {said}" if self.path else said


def shown(text: str) -> str:
    """`text` as it may stand in an error: short, one line, and never something like a secret."""
    if _LIKE_A_SECRET.search(text):
        return "text that looks like a secret"
    return printable(text if len(text) <= CONFIG_ECHO_MAX_CHARS else text[:CONFIG_ECHO_MAX_CHARS] + "...")


def printable(text: str) -> str:
    """`text` with every control character escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def joined(path: str, key: str) -> str:
    """The path of `key` inside the mapping at `path`."""
    return f"{path}.{shown(key)}" if path else shown(key)
