"""The arrival trace: one JSON line a decision, with all it was decided from; first a line with the policy."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from viiwork.core.choice import Choice, Policy, Question
from viiwork.errors import TraceError
from viiwork.limits import TRACE_LINE_MAX_BYTES

VERSION = 1


class Head(Struct, frozen=True, tag_field="line", tag="head"):
    """First line of a file, and again after each start of the node."""

    v: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    node: str
    policy: Policy


class Arrival(Struct, frozen=True, tag_field="line", tag="decision"):
    """One decision."""

    at_unix_ms: int
    request: str
    question: Question
    choice: Choice


_LINE = msgspec.json.Decoder(Head | Arrival)


def encode_line(value: Head | Arrival) -> bytes:
    """One line with its newline."""
    return msgspec.json.encode(value) + b"\n"


def decode_line(line: bytes) -> Head | Arrival:
    """Raises `TraceError` with what is wrong with the line."""
    if len(line) > TRACE_LINE_MAX_BYTES:
        raise TraceError(f"longer than {TRACE_LINE_MAX_BYTES} bytes")
    try:
        return _LINE.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"not a line of a trace: {error}") from None
