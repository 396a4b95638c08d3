"""Which node runs a request: a pure function of one recorded question and of a policy.

Everything a choice looks at stands in its `Question`, random draws included, so a recorded question can be
asked again later, under the same policy or under another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from viiwork.core.affinity import score, session_number
from viiwork.core.capacity import Perf
from viiwork.limits import BAND_DEFAULT, EXPLORE_DEFAULT, HOLD_MIN_MS, IMPORT_GUESS_SHARE

State = Literal[
    "",  # may run the request while it has room
    "excluded",  # refused or failed this very request
    "failing",  # its last requests failed; behind all others until its back-off is over
]
Rule = Literal[
    "pinned",  # the client named the only node
    "preferred",  # first of the client's list with room
    "explored",  # not measured yet; one request in so many finds out
    "warm",  # holds most of the prompt among those as fast as the best
    "rendezvous",  # the session's own order among equals
    "entry",  # this node is among equals
    "draw",  # drawn among equals, the faster the likelier
    "most_free",  # nothing is measured: the peer with most room
    "hold",  # waits for the node that holds the prompt, no longer than that saves
    "full",  # nobody has room
]


class Policy(Struct, frozen=True):
    """The settings of a choice."""

    performance: bool = True  # by predicted TTFT and by what nodes hold; False: here first, then most room
    band: float = BAND_DEFAULT  # predictions up to so many times the best count as equal; 1 or more
    explore: float = EXPLORE_DEFAULT  # share of requests that go to a node not measured yet; 0 to 1
    hold: bool = True  # wait for a full node that holds the prompt


class Candidate(Struct, frozen=True, gc=False):
    """A node that serves the model, as it looked when the question was asked."""

    node: str
    free: int  # slots we may count on
    rtt_ms: float = 0.0
    perf: Perf | None = None
    held_tokens: int = 0  # of this prompt
    held_where: str = ""
    state: State = ""


class Question(Struct, frozen=True, gc=False):
    """Everything the choice of a node for one request depends on."""

    me: str
    model: str
    n_tokens: int  # of the prompt, estimated
    candidates: tuple[Candidate, ...]  # this node first when it serves the model
    session: str | None = None
    keyed: bool = False  # the client names its session itself, so every entry node knows it by the same name
    pin: str | None = None
    prefer: tuple[str, ...] = ()
    waited_ms: float = 0.0  # of its queue budget, up to now
    budget_ms: float = 0.0  # what is left of it
    draws: tuple[float, float] = (1.0, 0.0)  # two random numbers from 0 to 1


class Choice(Struct, frozen=True, gc=False):
    """The answer: run on `node`; or wait for it for `hold_ms`; or, without a node, wait for anybody."""

    node: str | None
    rule: Rule
    hold_ms: float = 0.0


Priced = tuple[float, Candidate]  # a candidate's predicted TTFT in ms, and the candidate

NOBODY = Choice(None, "full")
_NEARNESS = {"slot": 3, "ram": 2, "replica": 1}  # nothing to do, to copy, to restore


def pick(policy: Policy, q: Question) -> Choice:
    """Choose a node; one that is full, excluded or unknown is never told to run the request."""
    if q.pin is not None:
        return _pinned(q)
    able = [c for c in q.candidates if not c.state] or [c for c in q.candidates if c.state != "excluded"]
    room = [c for c in able if c.free > 0]
    if q.prefer:
        for name in q.prefer:
            if any(c.node == name for c in room):
                return Choice(name, "preferred")
    if not policy.performance:
        return _plain(q, room)
    if len(able) == 1:
        return Choice(room[0].node, "entry" if room[0].node == q.me else "most_free") if room else NOBODY
    priced = predictions(q, able)
    if not priced:
        return _unmeasured(q, room)
    hold = _hold(policy, q, priced)
    if hold is not None:
        return hold
    return _fastest(policy, q, [p for p in priced if p[1].free > 0])


def predictions(q: Question, able: Sequence[Candidate] | None = None) -> list[Priced]:
    """Predicted TTFT of each candidate, or of those in `able`; nothing when no candidate was ever measured.

    One that was not measured is priced at the upper medians of those that were, full ones included.
    """
    known = [c.perf for c in q.candidates if c.perf is not None]
    if not known:
        return []
    candidates = q.candidates if able is None else able
    overhead = rate = 0.0
    if any(c.perf is None for c in candidates):
        middle = len(known) // 2
        overhead = sorted([p.overhead_ms for p in known])[middle]
        rate = sorted([p.prefill_ms_per_1k for p in known])[middle]
    n_tokens = q.n_tokens
    priced: list[Priced] = []
    for c in candidates:
        perf, unread = c.perf, n_tokens - c.held_tokens
        ms = (perf.overhead_ms if perf is not None else overhead) + c.rtt_ms
        read_ms = perf.prefill_ms_per_1k if perf is not None else rate
        if unread > 0:
            ms += unread * read_ms / 1000
        if c.held_where == "replica":
            ms += min(c.held_tokens, n_tokens) * _import_ms(perf, read_ms) / 1000
        priced.append((ms if ms > 1.0 else 1.0, c))
    return priced


def _import_ms(perf: Perf | None, read_ms: float) -> float:
    """Restoring a thousand tokens, where that pays; a node that does not tell is given a share of reading."""
    told = perf.import_ms_per_1k if perf is not None else None
    return min(told, read_ms) if told is not None else read_ms * IMPORT_GUESS_SHARE


def _pinned(q: Question) -> Choice:
    for c in q.candidates:
        if c.node == q.pin and c.free > 0 and c.state != "excluded":
            return Choice(c.node, "pinned")
    return NOBODY


def _plain(q: Question, room: list[Candidate]) -> Choice:
    """This node while it has room, else the peer with most; ties: the nearer one, then by name."""
    if not room:
        return NOBODY
    if room[0].node == q.me:
        return Choice(q.me, "entry")
    return Choice(min(room, key=lambda c: (-c.free, c.rtt_ms, c.node)).node, "most_free")


def _unmeasured(q: Question, room: list[Candidate]) -> Choice:
    if not room:
        return NOBODY
    if any(c.held_tokens for c in room):
        return Choice(_warmest(q, room), "warm")
    if q.session is not None and q.keyed:
        return Choice(_first_of(q.session, room), "rendezvous")
    return _plain(q, room)


def _hold(policy: Policy, q: Question, priced: list[Priced]) -> Choice | None:
    """Wait for the warmest node when it is full, at most for what reading the prompt elsewhere costs more.

    So whenever the wait ends in vain, the turn has cost no more than twice the better way.
    """
    if not policy.hold:
        return None
    home = min([p for p in priced if p[1].held_tokens], default=None, key=_ms_of)
    if home is None or home[1].free > 0:
        return None
    others = [p for p in priced if p is not home]
    other_ms, _ = min([p for p in others if p[1].free > 0] or others, key=_ms_of)
    hold_ms = min(other_ms - home[0] - q.waited_ms, q.budget_ms)
    return Choice(home[1].node, "hold", hold_ms) if hold_ms >= HOLD_MIN_MS else None


def _fastest(policy: Policy, q: Question, room: list[Priced]) -> Choice:
    if not room:
        return NOBODY
    if q.draws[0] < policy.explore and not any(c.held_tokens for c in q.candidates):
        unknown = [c.node for _, c in room if c.perf is None]
        if unknown:
            return Choice(unknown[min(int(q.draws[1] * len(unknown)), len(unknown) - 1)], "explored")
    most_ms = min(room, key=_ms_of)[0] * policy.band
    band = [p for p in room if p[0] <= most_ms]
    equals = [c for _, c in band]
    if any(c.held_tokens for c in equals):
        return Choice(_warmest(q, equals), "warm")
    if q.session is not None and q.keyed:
        return Choice(_first_of(q.session, equals), "rendezvous")
    if equals[0].node == q.me:
        return Choice(q.me, "entry")
    return Choice(_drawn(q.draws[1], band), "draw")


def _warmest(q: Question, candidates: Sequence[Candidate]) -> str:
    """Who holds most of the prompt; of equally much, nearest to the engine."""
    best = max((c.held_tokens, _NEARNESS.get(c.held_where, 0)) for c in candidates)
    warmest = [c for c in candidates if (c.held_tokens, _NEARNESS.get(c.held_where, 0)) == best]
    return _first_of(q.session, warmest) if q.session is not None and q.keyed else warmest[0].node


def _first_of(session: str, candidates: Sequence[Candidate]) -> str:
    if len(candidates) == 1:
        return candidates[0].node
    number = session_number(session)
    return max([(score(number, c.node), c.node) for c in candidates])[1]


def _drawn(draw: float, band: list[Priced]) -> str:
    weights = [ms**-3 for ms, _ in band]
    left = draw * sum(weights)
    for (_, candidate), weight in zip(band, weights, strict=True):
        left -= weight
        if left < 0:
            return candidate.node
    return band[-1][1].node


def _ms_of(priced: Priced) -> float:
    return priced[0]
