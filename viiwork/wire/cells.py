"""The cell list of a cache in a save-file: which position stands in which cell, checked."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from viiwork.errors import SaveFileError
from viiwork.limits import KV_RUNS_MAX, KV_STREAMS_MAX
from viiwork.wire.sections import CELL_BYTES, CELLS_AT_ONCE, EXT_BYTES, PRead, words_of
from viiwork.wire.state import Run


@dataclass(frozen=True, slots=True)
class Cells:
    lo: int  # the cells hold [lo, lo + n), each once
    runs: tuple[Run, ...]  # by position
    seq_id: int


def read_cells(pread: PRead, offset: int, n: int, ext: bool, tokens: array[int]) -> Cells:
    """Raises `SaveFileError`: the cells are not those of one sequence without a gap, or of a form not moved.

    Cells that carry more than their position must carry what a text's do: both other M-RoPE positions equal
    to the first, and the token itself. So they can be made anew and need not be stored.
    """
    step = (CELL_BYTES + (EXT_BYTES if ext else 0)) // 4
    runs: list[Run] = []
    seq_id = -1
    for first in range(0, n, CELLS_AT_ONCE):
        count = min(CELLS_AT_ONCE, n - first)
        words = words_of(pread(offset + 4 * step * first, 4 * step * count))
        positions, sequences = words[0::step], words[step - 1 :: step]
        if seq_id < 0:
            seq_id = sequences[0]
        if words[1::step].count(1) != count or sequences.count(seq_id) != count:
            raise SaveFileError("bad_file", "cells belong to more than one sequence")
        if ext:
            _check_ext(words, positions, tokens)
        _add_runs(runs, positions, first)
        if len(runs) > KV_RUNS_MAX:
            raise SaveFileError("not_portable", "the cache is too fragmented")
    if not 0 <= seq_id < KV_STREAMS_MAX:
        raise SaveFileError("bad_file", f"sequence id {seq_id}")
    runs.sort(key=lambda run: run.pos)
    due = runs[0].pos
    for run in runs:
        if run.pos != due or run.pos < 0:
            raise SaveFileError("bad_file", "the positions have gaps or stand twice")
        due += run.n
    return Cells(runs[0].pos, tuple(runs), seq_id)


def _check_ext(words: array[int], positions: array[int], tokens: array[int]) -> None:
    if words[2::6] != positions or words[3::6] != positions:
        raise SaveFileError(
            "not_portable", "cells have positions of their own in two dimensions, as media do"
        )
    if min(positions) < 0 or max(positions) >= len(tokens):
        raise SaveFileError("bad_file", "a cell's position is beyond the tokens")
    if words[4::6] != array("i", map(tokens.__getitem__, positions)):
        raise SaveFileError("bad_file", "a cell names another token than the session has there")


def _add_runs(runs: list[Run], positions: array[int], cell: int) -> None:
    """Append the runs of these cells."""
    start, n = 0, len(positions)
    while start < n and len(runs) <= KV_RUNS_MAX:
        end = _end_of_run(positions, start)
        last = runs[-1] if runs else None
        if last is not None and start == 0 and last.pos + last.n == positions[0]:
            runs[-1] = Run(last.pos, last.cell, last.n + end)
        else:
            runs.append(Run(positions[start], cell + start, end - start))
        start = end


def _end_of_run(positions: array[int], start: int) -> int:
    first, n = positions[start], len(positions)
    # Nearly every block is one run, and is found to be one without a loop in Python.
    if start == 0 and positions[-1] == first + n - 1 and positions == array("i", range(first, first + n)):
        return n
    end = start + 1
    while end < n and positions[end] == positions[end - 1] + 1:
        end += 1
    return end
