"""Values as people write them: whole numbers, durations, sizes, tri-state words; and back to text."""

from __future__ import annotations

import re
from fractions import Fraction

from viiwork.config.model import Bytes, Seconds, Tri
from viiwork.limits import DURATION_MAX_S, KIB, SIZE_MAX_BYTES

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,12})?")
_DURATION_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(h|ms|m|s|us|µs)")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,12})?)(B|KiB|MiB|GiB|TiB)?")

_US_PER = {"h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1, "µs": 1}
_BYTES_PER = {"TiB": KIB**4, "GiB": KIB**3, "MiB": KIB**2, "KiB": KIB, "B": 1}
TRI_WORDS = {"auto": "auto", "on": "on", "true": "on", "yes": "on", "off": "off", "false": "off", "no": "off"}


class NotThat(ValueError):
    """The text is not a value of the kind; `str(error)` is a hint or empty."""


def parse_integer(text: str) -> int:
    """Plain decimal digits only: `010`, `1_000`, `0x10`, `1e3` and `8086.0` are refused, never converted."""
    if not _INTEGER.fullmatch(text):
        raise NotThat("leading zero" if re.fullmatch(r"-?0[0-9]+", text) else "")
    return int(text)


def parse_decimal(text: str) -> float:
    if not _DECIMAL.fullmatch(text):
        raise NotThat
    return float(text)


def parse_duration(text: str) -> Seconds:
    """A Go-style duration, exact to the microsecond."""
    if text == "0":
        return Seconds(0)
    at, total_us = 0, Fraction(0)
    while at < len(text) and (part := _DURATION_PART.match(text, at)):
        total_us += Fraction(part[1]) * _US_PER[part[2]]
        at = part.end()
    if at == 0 or at < len(text):
        raise NotThat("the unit is missing" if _DECIMAL.fullmatch(text) else "")
    if total_us.denominator != 1:
        raise NotThat("finer than a microsecond")
    if total_us > DURATION_MAX_S * 1_000_000:
        raise NotThat(f"longer than {DURATION_MAX_S // 3600}h")
    return Seconds(int(total_us) / 1_000_000)


def format_duration(value: float) -> str:
    left_us = round(value * 1_000_000)
    if left_us == 0:
        return "0"
    text = ""
    for unit in ("h", "m", "s", "ms", "us"):
        n, left_us = divmod(left_us, _US_PER[unit])
        text += f"{n}{unit}" if n else ""
    return text


def parse_size(text: str) -> Bytes:
    """A plain number of bytes, or one with a binary unit; `8GB` is refused since people mean both by it."""
    found = _SIZE.fullmatch(text)
    if not found:
        raise NotThat("write GiB" if re.fullmatch(r"[0-9.]+ ?(?:[Gg][Bb]?|gib)", text) else "")
    n_bytes = Fraction(found[1]) * _BYTES_PER[found[2] or "B"]
    if n_bytes.denominator != 1:
        raise NotThat("not a whole number of bytes")
    if n_bytes > SIZE_MAX_BYTES:
        raise NotThat(f"larger than {format_size(SIZE_MAX_BYTES)}")
    return Bytes(int(n_bytes))


def format_size(value: int) -> str:
    for unit, n_bytes in _BYTES_PER.items():
        if value and value % n_bytes == 0 and n_bytes > 1:
            return f"{value // n_bytes}{unit}"
    return str(value)


def parse_tri(text: str) -> Tri:
    if text not in TRI_WORDS:
        raise NotThat
    return Tri(TRI_WORDS[text])


def format_decimal(value: float) -> str:
    """Digits that read back as the same value, never an exponent."""
    text = f"{value:.12f}".rstrip("0").rstrip(".")
    return text or "0"
