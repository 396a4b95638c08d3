"""When kv_share may stop an engine: what saves and restores have cost it, and when the next save may begin.

Every save and restore stops all slots of its engine. Both are charged to the engine's budget; only saves that
nobody waits for are held back by it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from viiwork.limits import KV_DEBOUNCE_S, KV_DEBOUNCE_TOKENS, KV_STALL_WINDOW_S

ALPHA = 0.3  # weight of the newest save in an engine's measured time a token


@dataclass(slots=True)
class StallBudget:
    """A token bucket of seconds: `share` of the wall time comes in, every stall goes out, also below zero."""

    share: float
    at: float  # when `credit_s` was right
    credit_s: float = field(init=False)
    recent_s: float = 0.0  # stalls, each fading away within a few windows

    def __post_init__(self) -> None:
        self.credit_s = self.most_s

    @property
    def most_s(self) -> float:
        return self.share * KV_STALL_WINDOW_S

    def charge(self, stall_s: float, now: float) -> None:
        self._advance(now)
        self.credit_s -= stall_s
        self.recent_s += stall_s

    def wait_s(self, stall_s: float, now: float) -> float:
        """Until a stall of this length is paid for; one longer than the bucket is when the bucket is full."""
        self._advance(now)
        return max(min(stall_s, self.most_s) - self.credit_s, 0.0) / self.share

    def recent_share(self, now: float) -> float:
        """Of the wall time of late, the last window weighing most."""
        self._advance(now)
        return self.recent_s / KV_STALL_WINDOW_S

    def _advance(self, now: float) -> None:
        passed_s = max(now - self.at, 0.0)
        self.at = max(now, self.at)
        self.credit_s = min(self.credit_s + passed_s * self.share, self.most_s)
        self.recent_s *= math.exp(-passed_s / KV_STALL_WINDOW_S)


@dataclass(slots=True)
class _Engine:
    budget: StallBudget
    s_per_token: float | None = None  # of a save, as measured


class Manners:
    """Budgets of all engines; one object, told of every save and restore."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._engines: dict[str, _Engine] = {}
        self._put_off: Counter[str] = Counter()

    # -- before a save -------------------------------------------------------------------------------
    def wait_s(self, backend: str, n_tokens: int, now: float) -> float:
        """How long a save of so many tokens that nobody waits for has to be put off for the budget."""
        known = self._engines.get(backend)
        return 0.0 if known is None else known.budget.wait_s(self.save_s(backend, n_tokens) or 0.0, now)

    def save_s(self, backend: str, n_tokens: int) -> float | None:
        """How long a save would stop the engine; None = none was measured there."""
        known = self._engines.get(backend)
        return None if known is None or known.s_per_token is None else known.s_per_token * n_tokens

    def put_off(self, why: str) -> None:
        """A save did not begin when it could have: `queue`, `gate`, `budget`, `debounce` or `rest`."""
        self._put_off[why] += 1

    # -- what it cost --------------------------------------------------------------------------------
    def saved(self, backend: str, n_tokens: int, stall_s: float, now: float) -> None:
        engine = self._engine(backend, now)
        if n_tokens > 0:
            rate = stall_s / n_tokens
            before = engine.s_per_token if engine.s_per_token is not None else rate
            engine.s_per_token = before + ALPHA * (rate - before)
        engine.budget.charge(stall_s, now)

    def restored(self, backend: str, stall_s: float, now: float) -> None:
        """Of a turn that waits for it: never held back, but paid for."""
        self._engine(backend, now).budget.charge(stall_s, now)

    def forget(self, backend: str) -> None:
        """The backend is gone for good."""
        self._engines.pop(backend, None)

    def as_json(self, now: float) -> dict[str, Any]:
        return {
            "share_limit": self._share,
            "put_off": dict(self._put_off),
            "share": {
                backend: round(engine.budget.recent_share(now), 5)
                for backend, engine in sorted(self._engines.items())
            },
        }

    def _engine(self, backend: str, now: float) -> _Engine:
        if backend not in self._engines:
            self._engines[backend] = _Engine(StallBudget(self._share, now))
        return self._engines[backend]


def debounce_s(since_save_s: float, new_tokens: int) -> float:
    """How long to wait before the slot is saved again, for more may come; long turns go at once."""
    return 0.0 if new_tokens >= KV_DEBOUNCE_TOKENS else max(KV_DEBOUNCE_S - since_save_s, 0.0)
