"""Receipts: what each of the last requests was decided from, and how it ended.

A receipt keeps the questions and the choices. Predictions and the reasons against the other candidates follow
from them, and are worked out only when somebody asks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from msgspec import Struct

from viiwork.core.choice import Candidate, Choice, Policy, Question, predictions
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.limits import RECEIPT_STEPS_MAX, RECEIPTS_MAX


class Step(Struct, gc=False):
    """One decision about a request, and what became of it."""

    at: float
    question: Question | None  # None when there was nothing to choose: a forward, or no slot needed
    choice: Choice | None
    node: str = ""  # where it was granted a place, "" = it had to wait or was refused
    backend: str = ""
    queued_ms: float = 0.0  # up to then
    outcome: Outcome | None = None


class Receipt(Struct, gc=False):
    """Everything decided about one request."""

    request_id: str
    model: str
    session: str | None
    body_bytes: int
    forwarded_by: str | None
    at: float  # on the node's clock
    steps: list[Step]
    error: str = ""  # why it was refused


class Receipts:
    """The last `limit` requests."""

    def __init__(self, limit: int = RECEIPTS_MAX) -> None:
        self._limit = limit
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._receipts)

    def get(self, request_id: str) -> Receipt | None:
        return self._receipts.get(request_id)

    def add(self, ask: Ask, now: float, question: Question | None, choice: Choice | None) -> Step:
        """A decision was made; who carries it out tells the step."""
        receipt = self._receipts.get(ask.request_id)
        if receipt is None:
            receipt = self._receipts[ask.request_id] = Receipt(
                ask.request_id, ask.model, ask.session, ask.body_bytes, ask.forwarded_by, now, []
            )
            if len(self._receipts) > self._limit:
                self._receipts.popitem(last=False)
        step = Step(now, question, choice)
        steps = receipt.steps
        if len(steps) >= RECEIPT_STEPS_MAX:
            del steps[1]
        steps.append(step)
        return step

    def ended(self, grant: Grant, outcome: Outcome) -> None:
        """A granted request came to its end there."""
        receipt = self._receipts.get(grant.ask.request_id)
        if receipt is not None:
            for step in reversed(receipt.steps):
                if step.node == grant.node and step.outcome is None:
                    step.outcome, step.queued_ms = outcome, grant.queued_s * 1000  # a wait at a peer included
                    return

    def refused(self, ask: Ask, why: str) -> None:
        """Nobody takes it."""
        receipt = self._receipts.get(ask.request_id)
        if receipt is not None:
            receipt.error = why


class Reason(NamedTuple):
    """A candidate, its predicted TTFT if there was one, and why it was taken or not."""

    candidate: Candidate
    predicted_ms: float | None
    why: str


def reasons(policy: Policy, question: Question, choice: Choice) -> list[Reason]:
    """Every candidate of a decision with the reason for it or against it."""
    priced = {c.node: ms for ms, c in predictions(question)} if policy.performance else {}
    most_ms = min((priced[c.node] for c in question.candidates if _has_room(c) and priced), default=0.0)
    most_ms *= policy.band
    return [
        Reason(c, priced.get(c.node), _why(question, choice, c, priced.get(c.node, 0.0) > most_ms))
        for c in question.candidates
    ]


_AGAINST = {
    "pinned": "another host is pinned",
    "preferred": "another host is preferred",
    "explored": "one that is not measured was tried",
    "warm": "holds less of the prompt",
    "rendezvous": "comes later in the session's order",
    "entry": "the entry node is as fast",
    "draw": "was not drawn",
    "most_free": "has less room or is farther away",
    "hold": "would read more of the prompt than the wait can cost",
    "full": "full",
}


def _why(question: Question, choice: Choice, c: Candidate, is_slower: bool) -> str:
    if c.node == choice.node:
        return "waited for" if choice.rule == "hold" else "taken"
    if question.pin is not None:
        return _AGAINST["pinned"]
    if c.state:
        return c.state
    if c.free <= 0:
        return "full"
    if is_slower and choice.rule in ("warm", "rendezvous", "entry", "draw"):
        return "slower"
    return _AGAINST[choice.rule]


def _has_room(c: Candidate) -> bool:
    return c.free > 0 and not c.state
