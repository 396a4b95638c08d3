"""Watches an answer go by: first content, token counts, the end marker, errors. Changes nothing."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from viiwork.core.turn import Usage
from viiwork.limits import SSE_LINE_MAX_BYTES, SSE_TAIL_BYTES

# A chunk without any of these after the first content can only be more content. Inside JSON strings
# quotes are escaped, so these rarely match by accident, and a match only means a closer look.
_TELLING = (
    b'"timings"',
    b'"usage"',
    b"[DONE]",
    b'"error"',
    b"error:",
    b"message_stop",
    b'"stop":true',
    b"response.completed",
    b"response.incomplete",
    b"response.failed",
)
_TIMINGS = re.compile(rb'"timings"\s*:\s*(\{[^{}]*\})')
_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
_SPOKEN = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "refusal")
_FINAL_TYPES = frozenset(("message_stop", "response.completed", "response.incomplete", "response.failed"))
_BOUNDARIES = (b"\n\n", b"\r\r", b"\r\n\r\n")

_decode = msgspec.json.Decoder().decode


class StreamScanner:
    """Reads an event stream in pieces of any size.

    Holds at most one line of `SSE_LINE_MAX_BYTES`; of a longer one its beginning is forgotten.
    """

    __slots__ = (
        "_carry",
        "_data",
        "_end",
        "_in_comment",
        "began",
        "content_seen",
        "error_seen",
        "finished",
        "usage",
    )

    def __init__(self) -> None:
        self.began = False  # more than comments went by
        self.content_seen = False
        self.finished = False  # the stream's own end marker went by
        self.error_seen = False
        self.usage: Usage | None = None
        self._carry = bytearray()  # a line whose end has not come
        self._data: list[bytes] = []  # data lines of an event whose blank line has not come
        self._end = b"\n\n"  # the last bytes; nothing sent counts as a boundary
        self._in_comment = False

    @property
    def at_boundary(self) -> bool:
        """Whether an event of our own could follow without being glued to a half one."""
        return self._end.endswith(_BOUNDARIES)

    def feed(self, chunk: bytes) -> None:
        self._end = chunk[-4:] if len(chunk) >= 4 else (self._end + chunk)[-4:]
        if not self.began:
            self._look_for_more_than_comments(chunk)
        if self.content_seen and not self._carry and not self._data and chunk.endswith(b"\n"):
            chunk = _telling_part(chunk)
            if not chunk:
                return
        if b"\r" in chunk:
            # A pair cut in two leaves one empty line too many, which ends nothing that is open.
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        cut = chunk.rfind(b"\n") + 1
        if cut:
            lines = bytes(self._carry) + chunk[:cut] if self._carry else chunk[:cut]
            self._carry = bytearray(chunk[cut:])
            self._scan(lines)
        else:
            self._carry += chunk
        if len(self._carry) > SSE_LINE_MAX_BYTES:
            del self._carry[: len(self._carry) - SSE_TAIL_BYTES]

    def _look_for_more_than_comments(self, chunk: bytes) -> None:
        lines = chunk.replace(b"\r", b"\n").split(b"\n")
        if self._in_comment:
            lines[0] = b":" + lines[0]
        self.began = any(line and not line.startswith(b":") for line in lines)
        self._in_comment = lines[-1].startswith(b":")

    def _scan(self, lines: bytes) -> None:
        if self.content_seen and not self._data:
            lines = _telling_part(lines)
        at = 0
        while (end := lines.find(b"\n", at)) >= 0:
            line = lines[at:end]
            at = end + 1
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif not line:
                if self._data:
                    data = b"\n".join(self._data).strip()
                    self._data.clear()
                    silent = not self.content_seen
                    self._event(data)
                    if silent and self.content_seen:  # from here on most events are of no interest
                        lines, at = _telling_part(lines[at:]), 0
            elif line.startswith(b"error:"):  # old engines put errors into a field of their own
                self.error_seen = True
            elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
                self._cut_line(line)
        if len(self._data) > 1 and sum(map(len, self._data)) > SSE_LINE_MAX_BYTES:
            self._data.clear()

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, RecursionError):
            self._cut_line(data)
            return
        if not isinstance(event, dict):
            return
        kind = event.get("type")
        if event.get("error") or kind in ("error", "response.failed"):
            self.error_seen = True
        if kind in _FINAL_TYPES or (event.get("stop") is True and "content" in event):
            self.finished = True
        if not self.content_seen and _speaks(event):
            self.content_seen = True
        self.usage = _merged(self.usage, _usage_of_event(event))

    def _cut_line(self, line: bytes) -> None:
        """What is left of a line too long to hold, or of one that is not JSON."""
        if len(line) >= SSE_TAIL_BYTES:
            self.content_seen = True
        self.usage = _merged(self.usage, usage_of_tail(line))


def _telling_part(lines: bytes) -> bytes:
    """What is left of `lines` without the events before the first that may matter; b"" when none may."""
    first = len(lines)
    for word in _TELLING:
        at = lines.find(word, 0, first)
        if at >= 0:
            first = at
    if first == len(lines):
        return b""
    return lines[lines.rfind(b"\n\n", 0, first) + 2 :] if b"\n\n" in lines[:first] else lines


def usage_of_tail(tail: bytes) -> Usage | None:
    """Token counts found in the last bytes of an answer; engines write them at the end."""
    found: dict[str, Any] = {}
    for name, pattern in (("timings", _TIMINGS), ("usage", _USAGE)):
        matches = pattern.findall(tail)
        if matches:
            try:
                found[name] = _decode(matches[-1])
            except msgspec.DecodeError:
                continue
    return _usage_of_event(found) if found else None


def _speaks(event: dict[str, Any]) -> bool:
    """Whether an event carries a generated token of any kind: text, reasoning or a tool call."""
    choices = event.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if isinstance(choice, dict):
                delta = choice.get("delta")
                if choice.get("text") or (isinstance(delta, dict) and any(map(delta.get, _SPOKEN))):
                    return True
        return False
    kind = event.get("type")
    delta = event.get("delta")
    if kind == "content_block_delta" and isinstance(delta, dict):
        return bool(delta.get("text") or delta.get("thinking") or delta.get("partial_json"))
    if kind == "content_block_start":
        block = event.get("content_block")
        return isinstance(block, dict) and block.get("type") == "tool_use"
    if isinstance(kind, str):
        return kind.startswith("response.") and kind.endswith(".delta") and bool(delta)
    return bool(event.get("content"))


def _usage_of_event(event: dict[str, Any]) -> Usage | None:
    timings = event.get("timings")
    if isinstance(timings, dict):
        return Usage(_count(timings, "cache_n"), _count(timings, "prompt_n"), _count(timings, "predicted_n"))
    for holder in (event, event.get("message"), event.get("response")):
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            return _usage_of_counts(usage)
    return None


def _usage_of_counts(usage: dict[str, Any]) -> Usage:
    if "cache_read_input_tokens" in usage:  # here `input_tokens` counts only what was not cached
        return Usage(
            _count(usage, "cache_read_input_tokens"),
            _count(usage, "input_tokens"),
            _count(usage, "output_tokens"),
        )
    prompt = _count(usage, "prompt_tokens")
    details = usage.get("prompt_tokens_details")
    generated = _count(usage, "completion_tokens")
    if prompt is None and generated is None:
        prompt, details = _count(usage, "input_tokens"), usage.get("input_tokens_details")
        generated = _count(usage, "output_tokens")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    # Without the cached count nobody knows how the prompt was split: unknown, not zero.
    prefilled = None if prompt is None or cached is None else max(prompt - cached, 0)
    return Usage(cached, prefilled, generated)


def _count(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _merged(old: Usage | None, new: Usage | None) -> Usage | None:
    """The newer count wins where it says something; `message_delta` only repeats the output."""
    if old is None or new is None:
        return new or old
    return Usage(
        old.cached if new.cached is None else new.cached,
        old.prefilled if new.prefilled is None else new.prefilled,
        old.generated if new.generated is None else new.generated,
    )


class _Counts(msgspec.Struct):
    timings: Any = None
    usage: Any = None


_decode_counts = msgspec.json.Decoder(_Counts).decode


def usage_of_body(body: bytes) -> Usage | None:
    """Token counts of a whole, non-streamed answer."""
    try:
        counts = _decode_counts(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _usage_of_event({"timings": counts.timings, "usage": counts.usage})
