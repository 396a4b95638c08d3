"""What kv_share did: every transfer as one value, its log line, and the sums for status and metrics."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from viiwork.core.logline import Value, line
from viiwork.core.replicas import Warmth
from viiwork.core.tally import BOUNDS_S, OTHER, Histogram
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.jobs import Stages
from viiwork.limits import KIB, KV_PEERS_COUNTED, KV_TRANSFERS_SHOWN, METRIC_WORDS_MAX

log = logging.getLogger(__name__)

What = Literal["send", "receive", "import", "keep"]
_EVENTS: dict[What, tuple[str, str]] = {
    "send": ("kv_share.sent", "kv_share.not_sent"),
    "receive": ("kv_share.received", "kv_share.not_received"),
    "import": ("kv_share.imported", "kv_share.not_imported"),
    "keep": ("kv_share.kept", "kv_share.not_kept"),
}
BOUNDS_BYTES = tuple(64.0 * KIB * 4**i for i in range(10))  # 64 KiB to 16 GiB
SHORT_CHARS = 8  # of a session's id, enough to follow one conversation in status and logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A state that was sent, received, restored into a slot or kept from a save, or should have been."""

    what: What
    session: str
    model: str
    reason: str = ""  # word for why it failed, "" = it did not
    detail: str = ""  # the same for people
    request: str = ""  # id of the turn that waited for it
    why: str = ""  # what a state was sent for: `turn`, `handover`, or the word of who asked for it
    generation: int = 0
    peer: str = ""
    path: str = ""  # address the bytes went to or came from
    encrypted: bool | None = None  # None = this side does not know
    tokens: int = 0
    kept: int = 0  # of them, those that were there already
    state_bytes: int = 0  # of the save-file or replica
    raw_bytes: int = 0  # of tokens, rows and blobs that moved
    wire_bytes: int = 0
    took_s: float = 0.0  # all of it, without queue and save
    stages_s: dict[str, float] = field(default_factory=dict)  # by stage; those of two threads overlap

    def as_json(self) -> dict[str, Any]:
        """Fields that mean nothing for this one are left out."""
        body: dict[str, Any] = {
            "what": self.what,
            "result": "failed" if self.reason else "done",
            "session": self.session[:SHORT_CHARS],
            "model": self.model,
        }
        known = {
            "reason": self.reason,
            "why": self.why,
            "generation": self.generation or None,
            "peer": self.peer,
            "path": self.path,
            "encrypted": self.encrypted,
            "compressed": self.wire_bytes < self.raw_bytes if self.wire_bytes else None,
            "took_s": round(self.took_s, 4) or None,
        }
        sizes = {
            "tokens": self.tokens,
            "kept": self.kept,
            "state_bytes": self.state_bytes,
            "raw_bytes": self.raw_bytes,
            "wire_bytes": self.wire_bytes,
        }
        body |= {key: value for key, value in known.items() if value not in (None, "")}
        if not self.reason:
            always = "" if self.what == "import" else "kept"
            body |= {key: value for key, value in sizes.items() if value or key == always}
            body |= {"mb_per_s": self.mb_per_s} if self.mb_per_s is not None else {}
        seconds = {f"{stage}_s": round(value, 4) for stage, value in self.stages_s.items()}
        return body | {stage: value for stage, value in seconds.items() if value}

    @property
    def mb_per_s(self) -> float | None:
        """Of what moved: on the wire, or into the slot."""
        moved = self.wire_bytes or self.state_bytes
        return round(moved / self.took_s / 1e6, 2) if moved and self.took_s > 0 else None

    @property
    def log_line(self) -> str:
        done, not_done = _EVENTS[self.what]
        fields: dict[str, Value] = {"request": self.request or None}
        for key, value in self.as_json().items():
            if key not in ("what", "result"):
                fields[key] = str(value).lower() if isinstance(value, bool) else value
        return line(not_done if self.reason else done, **fields, detail=self.detail or None)


def reason_of(error: BaseException) -> str:
    """The word by which a failure is counted."""
    if isinstance(error, KvError):
        return error.reason
    if isinstance(error, TimeoutError):
        return "too_slow"
    return error.code if isinstance(error, ViiworkError) else "io_error"


def stages_of(stages: Stages | None = None, **more: float) -> dict[str, float]:
    """The stages a job went through, and those of control around it."""
    if stages is not None:
        known = msgspec.structs.asdict(stages).items()
        more |= {key.removesuffix("_s"): float(value) for key, value in known if key != "total_s"}
    return {stage: value for stage, value in more.items() if value > 0}


@dataclass(slots=True)
class Tally:
    """One kind of work: how often it was done, how much that was, and why it was not."""

    done: int = 0
    tokens: int = 0
    kept: int = 0
    state_bytes: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    stages_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    took: Histogram = field(default_factory=lambda: Histogram(BOUNDS_S))
    on_wire: Histogram = field(default_factory=lambda: Histogram(BOUNDS_BYTES))
    failed: Counter[str] = field(default_factory=Counter)  # reason word -> times
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, transfer: Transfer) -> None:
        if transfer.reason:
            known = transfer.reason in self.failed or len(self.failed) < METRIC_WORDS_MAX
            self.failed[transfer.reason if known else OTHER] += 1
            return
        self.done += 1
        self.tokens += transfer.tokens
        self.kept += transfer.kept
        self.state_bytes += transfer.state_bytes
        self.raw_bytes += transfer.raw_bytes
        self.wire_bytes += transfer.wire_bytes
        self.took.add(transfer.took_s)
        self.on_wire.add(transfer.wire_bytes)
        for stage, seconds in transfer.stages_s.items():
            self.stages_s[stage] += seconds

    def as_json(self) -> dict[str, Any]:
        body = {
            "done": self.done,
            "tokens": self.tokens,
            "kept": self.kept,
            "state_bytes": self.state_bytes,
            "raw_bytes": self.raw_bytes,
            "wire_bytes": self.wire_bytes,
            "took_s": round(self.took.total, 4),
            "stages_s": {stage: round(value, 4) for stage, value in self.stages_s.items()},
            "failed": dict(self.failed),
        }
        return body | ({"skipped": dict(self.skipped)} if self.skipped else {})


@dataclass(slots=True)
class PeerTally:
    """What went to or came from one peer."""

    done: int = 0
    failed: int = 0
    wire_bytes: int = 0


class KvStats:
    """Written by those who push, receive and import; read by status and metrics."""

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self.sent = Tally()
        self.received = Tally()
        self.imports = Tally()
        self.keeps = Tally()
        self.by_peer: dict[tuple[str, What], PeerTally] = {}
        self.moves: Counter[Warmth] = Counter()
        self.not_warm_causes: Counter[str] = Counter()
        self.reused_tokens = 0
        self.stall_s: defaultdict[str, float] = defaultdict(float)  # by backend
        self._wall_s = wall_s
        self._peers: set[str] = set()
        self._last: deque[dict[str, Any]] = deque(maxlen=KV_TRANSFERS_SHOWN)

    def tallies(self) -> dict[What, Tally]:
        return {"send": self.sent, "receive": self.received, "import": self.imports, "keep": self.keeps}

    def ended(self, transfer: Transfer) -> None:
        """One transfer is over, well or not: count it, remember it, and log its line."""
        self.tallies()[transfer.what].add(transfer)
        if transfer.peer:
            peer = self._of_peer(transfer.peer, transfer.what)
            peer.done += not transfer.reason
            peer.failed += bool(transfer.reason)
            peer.wire_bytes += transfer.wire_bytes
        self._last.append({"at_unix_s": round(self._wall_s(), 3)} | transfer.as_json())
        # A turn waited in vain for an import; the other failures cost it nothing.
        is_warning = transfer.what == "import" and transfer.reason
        log.log(logging.WARNING if is_warning else logging.INFO, "%s", transfer.log_line)

    def moved(self, found: Warmth, cause: str = "", reused_tokens: int = 0) -> None:
        """The first turn after a session's change of host; `cause` says why it was not warm."""
        self.moves[found] += 1
        self.reused_tokens += reused_tokens
        if found != "warm":
            self.not_warm_causes[cause or "unknown"] += 1

    def stalled(self, backend: str, seconds: float) -> None:
        """A save or restore stopped all slots of an engine."""
        self.stall_s[backend] += seconds

    def as_json(self) -> dict[str, Any]:
        """The `kv_share` block of `/v1/status`, as far as it is counted here."""
        peers: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for (name, what), tally in sorted(self.by_peer.items()):
            peers[name][what] = {
                "done": tally.done,
                "failed": tally.failed,
                "wire_bytes": tally.wire_bytes,
            }
        return {
            "sent": self.sent.as_json(),
            "received": self.received.as_json(),
            "imports": self.imports.as_json(),
            "kept": self.keeps.as_json(),
            "peers": peers,
            "moves": {"warm": self.moves["warm"], "partly": self.moves["partly"], "cold": self.moves["cold"]},
            "not_warm_causes": dict(self.not_warm_causes),
            "reused_tokens": self.reused_tokens,
            "stall_s": {backend: round(value, 4) for backend, value in self.stall_s.items()},
            "last": list(self._last),
        }

    def _of_peer(self, name: str, what: What) -> PeerTally:
        if name not in self._peers and len(self._peers) >= KV_PEERS_COUNTED:
            name = OTHER
        self._peers.add(name)
        return self.by_peer.setdefault((name, what), PeerTally())
