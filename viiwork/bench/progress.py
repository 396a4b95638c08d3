"""How far a measurement is: a bar with the remaining time on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_EVERY_LINES = 10  # of the plain lines: one for so many steps, and one at the end


class BenchProgress:
    """Steps that are done of those that are planned, on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        is_live = self._console.is_terminal
        bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
        self._bar = bar if is_live else None
        self._task = bar.add_task("starting", total=None) if is_live else None
        self._planned = self._done = 0

    def __enter__(self) -> BenchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def plan(self, steps: int) -> None:
        """So many more steps will come."""
        self._planned += steps
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._planned)

    def step(self, what: str) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=what)
        elif self._done % _EVERY_LINES == 0 or self._done == self._planned:
            self.say(f"{self._done} of {self._planned}: {what}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._bar is None:
            sys.stderr.flush()
