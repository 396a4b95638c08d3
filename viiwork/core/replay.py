"""What another policy would have chosen: recorded questions asked again, and the difference."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from viiwork.core.choice import Choice, Policy, Question, pick, predictions


@dataclass(slots=True)
class Totals:
    """What the choices under one policy add up to."""

    predicted_ms: list[float] = field(default_factory=list)  # of decisions both policies could price
    waits: int = 0  # for anybody
    holds: int = 0  # for one warm node
    hold_ms: float = 0.0  # at most, all holds together
    moves: int = 0  # turns of a session on another node than its turn before

    def predicted(self, share: float) -> float | None:
        """The prediction that `share` of the decisions do not exceed."""
        ordered = sorted(self.predicted_ms)
        return ordered[max(ceil(share * len(ordered)) - 1, 0)] if ordered else None


class Replay:
    """Compares the recorded choices with those of another policy.

    The questions stay as they were recorded: a turn placed elsewhere does not change what later turns find.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.n_decisions = 0
        self.n_elsewhere = 0
        self.old = Totals()
        self.new = Totals()
        self._homes: dict[tuple[str, str], tuple[str | None, str | None]] = {}

    def add(self, question: Question, recorded: Choice) -> Choice:
        """Ask one question again; the answer is the other policy's."""
        choice = pick(self.policy, question)
        self.n_decisions += 1
        self.n_elsewhere += choice.node != recorded.node
        prices = {c.node: ms for ms, c in predictions(question)}
        before, after = _price(prices, recorded), _price(prices, choice)
        for totals, made, ms in ((self.old, recorded, before), (self.new, choice, after)):
            totals.waits += made.node is None
            totals.holds += made.rule == "hold"
            totals.hold_ms += made.hold_ms
            if before is not None and after is not None and ms is not None:
                totals.predicted_ms.append(ms)
        if question.session is not None:
            key = (question.session, question.model)
            homes = self._homes.get(key, (None, None))
            self.old.moves += None not in (homes[0], recorded.node) and homes[0] != recorded.node
            self.new.moves += None not in (homes[1], choice.node) and homes[1] != choice.node
            self._homes[key] = (recorded.node or homes[0], choice.node or homes[1])
        return choice


def _price(prices: dict[str, float], choice: Choice) -> float | None:
    return prices.get(choice.node) if choice.node is not None else None
