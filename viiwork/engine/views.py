"""What the rest of the node sees of a backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BackendView:
    """A snapshot of one backend. Unknown is None, never zero."""

    id: str  # "<model>/<index>"
    model: str
    status: str  # starting | healthy | unhealthy | respawn | dead | draining | stopped
    phase: str  # queued | loading | warming up | silent | proving | waiting | ""
    pid: int | None
    url: str | None  # while a process is there
    epoch: int  # spawns so far; a new epoch means nothing is held in its slots
    n_slots: int
    ctx: int  # tokens per slot, the smallest one's
    busy: int | None  # slots the engine says are processing; None = not known for 3 s
    tok_decoded: int | None  # of the busy slots' tasks, summed
    tok_remain: int | None
    gpus: tuple[int, ...]
    rss_bytes: int | None  # the whole process tree's
    respawns: int  # spent of `health.max_respawns`
    uptime_s: float  # of the process
    last_lines: tuple[str, ...]
    reason: str  # one line why it is not healthy, "" when it is
    save_dir: Path | None
    embedded: bool
