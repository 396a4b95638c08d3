"""An engine's output as bounded, printable lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from viiwork.engine.loglines import LineAssembler, LogTail, usage_error
from viiwork.limits import ENGINE_LAST_LINES, ENGINE_LINE_MAX_CHARS, ENGINE_LOG_LINES_PER_S


def test_lines_are_put_together_across_reads() -> None:
    lines = LineAssembler()
    assert lines.feed(b"load") == []
    assert lines.feed(b"ing\r\n\nthe mo") == ["loading"]
    assert lines.flush() == ["the mo"] and lines.flush() == []


def test_half_a_character_is_completed_by_the_next_read() -> None:
    lines = LineAssembler()
    lines.feed(b"caf\xc3")
    assert lines.feed(b"\xa9\n") == ["café"]


def test_line_without_end_is_cut_and_says_so() -> None:
    lines = LineAssembler()
    for _ in range(100):
        assert lines.feed(b"." * 50_000) == []
    (line,) = lines.feed(b"\nnext\n")[:1]
    assert line == "." * ENGINE_LINE_MAX_CHARS + f" ... [{5_000_000 - ENGINE_LINE_MAX_CHARS} bytes cut]"


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_any_bytes_become_printable_lines_whatever_the_reads(parts: list[bytes]) -> None:
    lines, whole = LineAssembler(64), LineAssembler(64)
    piecewise = [line for part in parts for line in lines.feed(part)] + lines.flush()
    assert piecewise == whole.feed(b"".join(parts)) + whole.flush()
    assert not any((ord(c) < 32 and c != "\t") or 0x7F <= ord(c) < 0xA0 for line in piecewise for c in line)


def test_newest_lines_are_kept_and_the_nodes_log_gets_no_more_than_its_rate() -> None:
    tail = LogTail()
    said = [line for n in range(1000) for line in tail.add(f"line {n}", now=5.5)]
    assert len(said) == ENGINE_LOG_LINES_PER_S
    assert tail.newest() == tuple(f"line {n}" for n in range(1000 - ENGINE_LAST_LINES, 1000))
    assert tail.add("later", now=6.0) == [
        f"({1000 - ENGINE_LOG_LINES_PER_S} lines of output not shown)",
        "later",
    ]


def test_usage_errors_are_told_from_crashes() -> None:
    assert usage_error(1, ("error: invalid argument: --foo", "usage ...")) == "error: invalid argument: --foo"
    assert usage_error(2, ("nonsense",)) == "nonsense"
    assert usage_error(127, ()) == "exit code 127"
    assert usage_error(1, ("ggml_cuda: out of memory",)) == ""
    assert usage_error(-9, ()) == ""
