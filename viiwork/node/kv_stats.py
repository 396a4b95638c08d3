"""What kv_share did, for `/v1/status`: counts, bytes, causes, and the newest transfers."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from viiwork.core.replicas import Warmth
from viiwork.limits import KV_TRANSFERS_SHOWN


@dataclass(slots=True)
class Tally:
    """One kind of work: how often it was done, how many bytes, and why it was not."""

    done: int = 0
    n_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # reason word -> times
    skipped: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        body = {"done": self.done, "bytes": self.n_bytes, "failed": dict(self.failed)}
        return body | ({"skipped": dict(self.skipped)} if self.skipped else {})


class KvStats:
    """Written by the push, the receiving and the import side; read by the status page."""

    def __init__(self) -> None:
        self.sent = Tally()
        self.received = Tally()
        self.imports = Tally()
        self.kept = Tally()  # own states, before their slot was taken
        self.moves: Counter[Warmth] = Counter()
        self.cold_causes: Counter[str] = Counter()
        self._transfers: deque[dict[str, Any]] = deque(maxlen=KV_TRANSFERS_SHOWN)

    def transferred(self, what: str, **facts: Any) -> None:
        """Remember one transfer or import for the list of the newest ones."""
        self._transfers.append({"what": what, "at_unix_s": round(time.time(), 3)} | facts)

    def moved(self, found: Warmth, cause: str = "") -> None:
        """The first turn after a session's change of host; `cause` says why it was not warm."""
        self.moves[found] += 1
        if found != "warm":
            self.cold_causes[cause or "unknown"] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "sent": self.sent.as_json(),
            "received": self.received.as_json(),
            "imports": self.imports.as_json(),
            "kept": self.kept.as_json(),
            "moves": {"warm": self.moves["warm"], "partly": self.moves["partly"], "cold": self.moves["cold"]},
            "not_warm_causes": dict(self.cold_causes),
            "last": list(self._transfers),
        }
