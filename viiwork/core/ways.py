"""How a turn comes by the part of its prompt that was read before: the ways there are, and which one pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from viiwork.core.replicas import WARM_SHARE
from viiwork.limits import (
    KV_IMPORT_GUESS_S,
    KV_IMPORT_GUESS_S_PER_BYTE,
    KV_IMPORT_MAX_S,
    KV_IMPORT_MIN_S,
    KV_IMPORT_TYPICAL_TOKENS,
)

Kind = Literal[
    "slot",  # it lies in the slot, or in the engine's RAM: nothing to do
    "import",  # a replica of this node is restored
    "tail",  # a newer one is on its way here: wait for it, then restore it
    "pull",  # a peer has it: ask for it, then restore it
]

COST_ALPHA = 0.3  # weight of the newest import
COST_DECAY = (
    0.9  # of a high cost, each time an import is passed over for it: or it would never be tried again
)
COST_MIN, COST_MAX = 0.1, 100.0  # times the guess


class Way(NamedTuple):
    """One way, and what it is good for."""

    kind: Kind
    n_tokens: int = 0  # of the prompt that need not be read then
    cost_s: float = 0.0  # until the turn can begin


def best_way(slot: Way, others: Sequence[Way], read_s: float | None) -> Way:
    """The way with the earliest first token; `read_s` is what reading one token takes, None = not measured.

    A cheap import that makes the turn warm is done although reading would be as quick: reading keeps the
    engine from its other slots. Nothing is waited for unless that is faster for certain.
    """
    best, best_s = slot, slot.n_tokens * (read_s or 0.0)
    paid = False
    for way in others:
        gain = way.n_tokens - slot.n_tokens
        if gain <= 0:
            continue
        if read_s is None:
            if way.kind == "import" and way.n_tokens > best.n_tokens:
                best = way
            continue
        saved_s = way.n_tokens * read_s - way.cost_s
        cheap = way.kind == "import" and way.cost_s <= KV_IMPORT_MIN_S
        pays = gain * read_s > way.cost_s or (cheap and slot.n_tokens < WARM_SHARE * way.n_tokens)
        if pays and (not paid or saved_s > best_s):
            best, best_s, paid = way, saved_s, True
    return best


def worth_s(way: Way, slot: Way, read_s: float | None) -> float:
    """How long an import may take: what reading the same tokens would, within bounds."""
    cold_s = (way.n_tokens - slot.n_tokens) * read_s if read_s is not None else KV_IMPORT_MAX_S
    return min(max(cold_s, KV_IMPORT_MIN_S), KV_IMPORT_MAX_S)


class ImportCosts:
    """What an import of each model takes here: a guess from its bytes, times what imports were found to take.

    One factor a model; models are those of the config.
    """

    def __init__(self) -> None:
        self._factor: dict[str, float] = {}

    def took(self, model: str, n_bytes: int, seconds: float) -> None:
        """An import was done, or was given up after so long."""
        found = min(max(seconds / _guess_s(n_bytes), COST_MIN), COST_MAX)
        before = self._factor.get(model, found)
        self._factor[model] = before + COST_ALPHA * (found - before)

    def passed_over(self, model: str) -> None:
        """An import was not worth its cost."""
        factor = self._factor.get(model, 1.0)
        if factor > 1.0:
            self._factor[model] = max(factor * COST_DECAY, 1.0)

    def seconds(self, model: str, n_bytes: int) -> float:
        """What the import of a replica of so many bytes is expected to take."""
        return self._factor.get(model, 1.0) * _guess_s(n_bytes)

    def ms_per_1k(self, model: str, token_bytes: int) -> float:
        """The same for a thousand tokens of a session of ordinary length, as routing counts it."""
        seconds = self.seconds(model, KV_IMPORT_TYPICAL_TOKENS * token_bytes)
        return seconds * 1000 / (KV_IMPORT_TYPICAL_TOKENS / 1000)


def _guess_s(n_bytes: int) -> float:
    return KV_IMPORT_GUESS_S + n_bytes * KV_IMPORT_GUESS_S_PER_BYTE
