"""Where a request runs: one question, one answer, no effects.

Gathers what the node knows into a `Question`, lets `core.choice` pick a node, and finds the place on it. A
forward runs here, waits here if its entry node allows, or is refused; it makes no second hop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest

from msgspec import Struct

from viiwork.core.capacity import Perf
from viiwork.core.choice import Candidate, Choice, Policy, Question, State, pick
from viiwork.core.estimate import PromptSizes
from viiwork.core.failures import FailureMarks
from viiwork.core.peers import PeerTable
from viiwork.core.sessions import SessionTable
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.turn import Ask, Held
from viiwork.errors import NoFreeSlot, NotServedHere, UnknownModel, ViiworkError
from viiwork.limits import CANDIDATES_MAX


class Local(Struct, frozen=True, gc=False):
    """Run here, in this slot."""

    ref: SlotRef


class LocalUnslotted(Struct, frozen=True):
    """Run here, on this backend, without a slot."""

    backend: str


class Forward(Struct, frozen=True):
    """Hand the request to this peer, which may let it wait for a slot for so long."""

    node: str
    wait_ms: int = 0


class Wait(Struct, frozen=True):
    """The model exists and its place has no room now."""

    served: bool  # by anybody healthy
    full: bool = False  # no node has room for any request of the model
    hold_ms: float = math.inf  # from then on another node will do


class Refuse(Struct, frozen=True):
    """Answer with this error now."""

    error: type[ViiworkError]
    message: str


Decision = Local | LocalUnslotted | Forward | Wait | Refuse


class Decided(Struct, frozen=True, gc=False):
    """A decision, and for one between nodes what it was made of."""

    decision: Decision
    question: Question | None = None
    choice: Choice | None = None


class Terms(Struct, frozen=True, gc=False):
    """What a decision depends on besides the request and the state of the mesh."""

    now: float
    waited_ms: float = 0.0  # of the request's queue budget
    budget_ms: float = 0.0  # what is left of it
    draws: tuple[float, float] = (1.0, 0.0)  # two random numbers from 0 to 1


NOTHING: Mapping[str, Held] = {}


def nothing_held(ask: Ask) -> Mapping[str, Held]:
    """Nobody holds anything of any prompt."""
    return NOTHING


def not_measured(model: str, now: float) -> Perf | None:
    """No speed of this node is known."""
    return None


@dataclass(frozen=True, slots=True)
class View:
    """What a decision looks at."""

    me: str
    slots: SlotTable
    sessions: SessionTable
    peers: PeerTable
    policy: Policy = field(default_factory=Policy)
    held: Callable[[Ask], Mapping[str, Held]] = nothing_held  # of the ask's prompt, by node
    perf: Callable[[str, float], Perf | None] = not_measured  # of a model here
    sizes: PromptSizes = field(default_factory=PromptSizes)
    failures: FailureMarks = field(default_factory=FailureMarks)


def choose(view: View, ask: Ask, terms: Terms, exclude: Collection[str] = ()) -> Decided:
    """Decide where `ask` runs; nodes in `exclude` refused it already."""
    if ask.forwarded_by is not None:
        return Decided(_admit_forward(view, ask, terms.now))
    here = view.slots.serves(ask.model)
    if not here and not view.peers.knows(ask.model, terms.now):
        return Decided(Refuse(UnknownModel, f"no node of this mesh serves a model named {ask.model!r}"))
    if ask.pin is not None and not (here if ask.pin == view.me else view.peers.lists(ask.pin, ask.model)):
        return Decided(Refuse(UnknownModel, f"host {ask.pin!r} does not serve the model {ask.model!r}"))
    question = _question(view, ask, terms, exclude)
    if not ask.needs_slot:
        return Decided(_unslotted(view, ask, question))
    choice = pick(view.policy, question)
    return Decided(_place(view, ask, question, choice, terms.now), question, choice)


def _question(view: View, ask: Ask, terms: Terms, exclude: Collection[str]) -> Question:
    model, now, me = ask.model, terms.now, view.me
    held = view.held(ask) if view.policy.performance and ask.needs_slot else NOTHING
    candidates = view.peers.candidates(model, now)
    if len(candidates) >= CANDIDATES_MAX:
        candidates = nsmallest(
            CANDIDATES_MAX - 1, candidates, key=lambda c: (c.node not in held, -c.free, c.rtt_ms, c.node)
        )
    n_free = view.slots.n_free(model)
    if n_free is not None:
        candidates.insert(0, Candidate(me, n_free, 0.0, view.perf(model, now)))
    if held or exclude or view.failures.is_any:
        for i, c in enumerate(candidates):
            state = _state(view, c.node, model, now, exclude) if exclude or view.failures.is_any else ""
            holds = held.get(c.node)
            if holds is not None:
                candidates[i] = Candidate(
                    c.node, c.free, c.rtt_ms, c.perf, holds.n_tokens, holds.where, state
                )
            elif state:
                candidates[i] = Candidate(c.node, c.free, c.rtt_ms, c.perf, state=state)
    return Question(
        me,
        model,
        view.sizes.n_tokens(model, ask.body_bytes),
        tuple(candidates),
        ask.session,
        ask.session_key is not None,
        ask.pin,
        ask.prefer,
        terms.waited_ms,
        terms.budget_ms,
        terms.draws,
    )


def _state(view: View, node: str, model: str, now: float, exclude: Collection[str]) -> State:
    if node in exclude:
        return "excluded"
    return "failing" if view.failures.is_failing(node, model, now) else ""


def _place(view: View, ask: Ask, question: Question, choice: Choice, now: float) -> Decision:
    """The place on the chosen node."""
    if choice.node is None:
        return Wait(bool(question.candidates), full=_is_full(question))
    if choice.node != view.me:
        return Forward(choice.node, math.ceil(choice.hold_ms))
    if choice.hold_ms > 0:
        return Wait(True, full=_is_full(question), hold_ms=choice.hold_ms)
    ref = view.sessions.best_slot(view.slots, ask, now)
    if ref is None:
        raise RuntimeError(f"{view.me} chose itself for {ask.model!r} without a free slot")
    return Local(ref)


def _is_full(question: Question) -> bool:
    return not any(c.free > 0 for c in question.candidates)


def _unslotted(view: View, ask: Ask, question: Question) -> Decision:
    """A request without need of a slot: here if it can be, else at the peer with most room."""
    able = [c for c in question.candidates if c.state != "excluded" and ask.pin in (None, c.node)]
    able = [c for c in able if not c.state] or able
    if not able:
        return Wait(bool(question.candidates))
    best = min(able, key=lambda c: (c.node != view.me, -c.free, c.rtt_ms, c.node))
    if best.node != view.me:
        return Forward(best.node)
    backend = view.slots.any_routable(ask.model)
    if backend is None:
        raise RuntimeError(f"{view.me} chose itself for {ask.model!r} without a backend")
    return LocalUnslotted(backend)


def _admit_forward(view: View, ask: Ask, now: float) -> Decision:
    """Run a forward here, let it wait as long as its entry node allows, or refuse it at once."""
    if not view.slots.serves(ask.model):
        return Refuse(NotServedHere, f"{view.me} does not serve {ask.model!r}")
    backend = view.slots.any_routable(ask.model)
    if not ask.needs_slot:
        if backend is not None:
            return LocalUnslotted(backend)
    else:
        ref = view.sessions.best_slot(view.slots, ask, now)
        if ref is not None:
            return Local(ref)
        if ask.wait_ms > 0 and backend is not None:
            return Wait(True)
    return Refuse(NoFreeSlot, f"{view.me} has no free slot for {ask.model!r}")
