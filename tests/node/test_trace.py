from __future__ import annotations

from pathlib import Path

from viiwork.core.choice import Candidate, Choice, Policy, Question
from viiwork.limits import TRACE_LINES_MAX
from viiwork.node.trace import TraceFile
from viiwork.wire.trace import Arrival, Head, decode_line

QUESTION = Question("a", "m", 1000, (Candidate("a", 1), Candidate("b", 0)))
CHOICE = Choice("a", "entry")


def trace(path: Path, **more) -> TraceFile:
    return TraceFile(path, "a", Policy(), wall_ms=lambda: 7, **more)


def lines(path: Path) -> list[Head | Arrival]:
    return [decode_line(line) for line in path.read_bytes().splitlines()]


async def test_decisions_are_written_after_the_policy_they_were_made_under(tmp_path: Path):
    path = tmp_path / "trace"
    file = trace(path)
    for name in ("1", "2"):
        file.add(name, QUESTION, CHOICE)
        await file.flush()
    assert lines(path) == [Head(1, "a", Policy()), *(Arrival(7, n, QUESTION, CHOICE) for n in ("1", "2"))]
    assert path.stat().st_mode & 0o777 == 0o600
    again = trace(path)  # the node was started again
    again.add("3", QUESTION, CHOICE)
    await again.flush()
    assert [type(line) for line in lines(path)] == [Head, Arrival, Arrival, Head, Arrival]


async def test_a_full_file_is_moved_aside_and_there_are_never_more_than_two(tmp_path: Path):
    path = tmp_path / "trace"
    file = trace(path, max_bytes=2000)
    for n in range(40):
        file.add(f"{n}", QUESTION, CHOICE)
        await file.flush()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace", "trace.1"]
    assert all(p.stat().st_size <= 2000 for p in tmp_path.iterdir())
    kept = [*lines(tmp_path / "trace.1"), *lines(path)]
    assert isinstance(lines(path)[0], Head) and kept[-1] == Arrival(7, "39", QUESTION, CHOICE)
    numbers = [int(line.request) for line in kept if isinstance(line, Arrival)]
    assert numbers == list(range(numbers[0], 40))


async def test_more_than_can_be_written_is_dropped_and_counted(tmp_path: Path, caplog):
    file = trace(tmp_path / "trace")
    for n in range(TRACE_LINES_MAX + 5):
        file.add(f"{n}", QUESTION, CHOICE)
    await file.flush()
    assert len(lines(tmp_path / "trace")) == TRACE_LINES_MAX + 1
    assert ["trace.dropped lines=5" in r.message for r in caplog.records] == [True]


async def test_a_disk_that_refuses_is_told_once_and_costs_no_request(tmp_path: Path, caplog):
    file = trace(tmp_path / "nowhere" / "trace")
    for n in range(3):
        file.add(f"{n}", QUESTION, CHOICE)
        await file.flush()
    assert [r.message.split()[0] for r in caplog.records] == ["trace.unwritten"]
    (tmp_path / "nowhere").mkdir()
    file.add("4", QUESTION, CHOICE)
    await file.flush()
    assert lines(tmp_path / "nowhere" / "trace")[-1] == Arrival(7, "4", QUESTION, CHOICE)
