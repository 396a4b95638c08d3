"""What nodes hold of which conversations, as they tell one another, and what that is worth to a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

from viiwork.core.turn import Ask, Held
from viiwork.limits import HOLDINGS_MAX, PROMPT_BYTES_PER_TOKEN

K = TypeVar("K")
J = TypeVar("J")

Where = Literal["slot", "ram", "replica"]
_RANK = {"slot": 2, "ram": 1, "replica": 0}  # of equally long ones: nothing to do, to copy, to restore


class Holding(NamedTuple):
    """A conversation's state on one node."""

    session: str
    model: str
    tip: str  # last link of the turn that left it, "" when that had no chain
    scope: str  # `scope_of` the client's key
    n_tokens: int
    where: Where
    generation: int
    backend: str = ""  # "" for a replica


def scope_of(session_key: str | None) -> str:
    """What is published of a client's (hashed) key: enough to keep conversations of two clients apart."""
    return session_key[:16] if session_key else ""


class PeerHoldings:
    """The peers' lists: by tip and by session. A list replaces the one before; at most 256 entries each."""

    def __init__(self) -> None:
        self._lists: dict[str, tuple[Holding, ...]] = {}
        self._by_tip: dict[tuple[str, str], dict[tuple[str, str], Holding]] = {}
        self._by_session: dict[tuple[str, str], dict[str, Holding]] = {}

    def put(self, node: str, holdings: tuple[Holding, ...]) -> bool:
        """A node's list, the newest first; of a session held twice the first counts. False: it is known."""
        if self._lists.get(node) is holdings:
            return False
        self.remove(node)
        self._lists[node] = holdings
        for holding in holdings[:HOLDINGS_MAX]:
            key = (holding.session, holding.model)
            if holding.tip:
                self._by_tip.setdefault((holding.model, holding.tip), {})[(node, holding.session)] = holding
            self._by_session.setdefault(key, {}).setdefault(node, holding)
        return True

    def remove(self, node: str) -> None:
        for holding in self._lists.pop(node, ())[:HOLDINGS_MAX]:
            _take(self._by_tip, (holding.model, holding.tip), (node, holding.session))
            _take(self._by_session, (holding.session, holding.model), node)

    def is_tip(self, model: str, link: str) -> bool:
        return (model, link) in self._by_tip

    def tips_among(self, model: str, links: tuple[str, ...]) -> Iterator[str]:
        """Those of a chain's links that are the tip of something held, the last first."""
        known = self._by_tip
        if known:
            for link in reversed(links):
                if (model, link) in known:
                    yield link

    def at_tip(self, model: str, tip: str) -> Iterator[tuple[str, Holding]]:
        """Nodes and what they hold whose newest turn ended with this link."""
        for (node, _), holding in self._by_tip.get((model, tip), {}).items():
            yield node, holding

    def of(self, session: str, model: str) -> Mapping[str, Holding]:
        """What each node holds of a session."""
        return self._by_session.get((session, model), {})

    def newest(self, session: str, model: str) -> Holding | None:
        found = self._by_session.get((session, model))
        return max(found.values(), key=lambda holding: holding.generation) if found else None


def held_by_peers(ask: Ask, peers: PeerHoldings) -> dict[str, Held]:
    """What each peer holds of the prompt of `ask`.

    A tip in the ask's chain proves a prefix, whosever it was; the longest counts. Of a session whose tip is
    not in the chain, because it was compacted or edited, only a part is still right.
    """
    found: dict[str, Held] = {}
    if ask.chain is not None:
        for link in peers.tips_among(ask.model, ask.chain.links):
            for node, holding in peers.at_tip(ask.model, link):
                known = found.get(node)
                if known is None or (known.n_tokens, _RANK[known.where]) < (
                    holding.n_tokens,
                    _RANK[holding.where],
                ):
                    found[node] = Held(holding.n_tokens, holding.where)
    for session in {ask.session, ask.parent} - {None}:
        for node, holding in peers.of(session or "", ask.model).items():
            n_tokens = still_right(ask, holding.session, holding.tip, holding.n_tokens)
            if n_tokens and (node not in found or found[node].n_tokens < n_tokens):
                found[node] = Held(n_tokens, holding.where)
    return found


def still_right(ask: Ask, session: str, tip: str, n_tokens: int) -> int:
    """How many tokens of a session's state are a prefix of the ask's prompt."""
    if ask.chain is None or not tip:
        return n_tokens if session == ask.session else 0  # its name is all there is to go by
    if tip in ask.chain.links:
        return n_tokens
    head = ask.chain.ends[0] // PROMPT_BYTES_PER_TOKEN
    return min(n_tokens, max(ask.shared_tokens, head) if session == ask.parent else head)


def _take(table: dict[K, dict[J, Holding]], key: K, inner: J) -> None:
    entry = table.get(key)
    if entry is not None:
        entry.pop(inner, None)
        if not entry:
            del table[key]
