"""Which conversation a request belongs to; one owner, the dispatcher.

A client's key says who speaks, the chain of messages what about: one key may carry several conversations at
once (an agent's chat, its title request, its helpers), and without a key the chain alone has to tell them
apart. A conversation is continued by a request whose chain holds its newest tip, the last link of its last
turn; a chain that holds only an older one has left it there. What is not certain becomes a conversation of
its own: two in one would take each other's slots, one in two only reads its prompt once more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from blake3 import blake3
from msgspec import Struct

from viiwork.core.holdings import Holding, PeerHoldings, scope_of
from viiwork.core.turn import Ask
from viiwork.limits import CONVERSATION_TIPS_MAX, RETRIED_REQUESTS_MAX, SESSIONS_MAX

Kind = Literal[
    "new",
    "continues",
    "compaction",  # the same conversation, its prompt shortened or begun anew
    "fork",  # left an earlier turn: an edit, or a second conversation that began with the same words
]


class Identity(Struct, frozen=True, gc=False):
    """The conversation of one request."""

    session: str  # 32 hex digits
    kind: Kind
    n_tokens: int = 0  # that the conversation held after its last turn, 0 = not known
    home: str = ""  # node of its last turn, "" = not known
    parent: str | None = None  # the session whose earlier state a fork begins with
    shared_tokens: int = 0  # how much of that it shares, estimated by bytes


@dataclass(slots=True, eq=False)
class _Conversation:
    session: str
    model: str
    key: str | None
    head: str = ""  # link 0 of its newest turn
    tips: list[str] = field(default_factory=list)  # of its last turns, the newest last
    n_bytes: int = 0  # of its newest prompt
    n_tokens: int = 0
    node: str = ""
    generation: int = 0
    turns: int = 0
    running: int = 0


_Place = tuple[str, str | None, str]  # model, key, link


class Conversations:
    """The conversations that came by this node, at most `limit`; those unused longest are forgotten first."""

    def __init__(self, peers: PeerHoldings, limit: int = SESSIONS_MAX) -> None:
        self._peers = peers
        self._limit = limit
        self._known: OrderedDict[tuple[str, str], _Conversation] = OrderedDict()  # (session, model)
        self._at_tip: dict[_Place, dict[_Conversation, None]] = {}  # also of older tips
        self._with_head: dict[_Place, dict[_Conversation, None]] = {}  # only of those with a key
        self._running: dict[str, tuple[str, str]] = {}  # request id -> session, model
        self._asked: OrderedDict[str, Identity] = OrderedDict()  # by request id, until its turn succeeded

    def __len__(self) -> int:
        return len(self._known)

    def turns_of(self, session: str, model: str) -> int:
        known = self._known.get((session, model))
        return known.turns if known is not None else 0

    def identify(self, ask: Ask) -> Identity | None:
        """The conversation of a request, the same however often it is asked for one request id.

        None for a request that holds neither key nor chain. A session that `ask` names already (its entry
        node did) is taken over.
        """
        known = self._asked.get(ask.request_id)
        if known is not None:
            return known
        if ask.session is not None:
            found: Identity | None = self._named_by_entry(ask, ask.session)
        else:
            found = self._of_chain(ask) if ask.chain is not None else self._of_key(ask)
        if found is not None:
            self._asked[ask.request_id] = found
            while len(self._asked) > RETRIED_REQUESTS_MAX:
                self._asked.popitem(last=False)
        return found

    def is_unknown(self, ask: Ask) -> bool:
        """Is this the middle of a conversation of which this node has heard nothing yet?"""
        chain = ask.chain
        if chain is None or ask.session is not None or len(chain.links) < 4:
            return False  # its first turn has at most link 0 and two messages
        model, key = ask.model, ask.session_key
        for link in reversed(chain.links):  # the newest tip stands near the end
            if (model, key, link) in self._at_tip or self._peers.is_tip(model, link):
                return False
        return True

    def began(self, ask: Ask, session: str) -> None:
        """A turn of the conversation is under way, or waits for its place."""
        if ask.request_id in self._running:
            return
        place = self._running[ask.request_id] = (session, ask.model)
        known = self._known.get(place)
        if known is None:
            known = self._known[place] = _Conversation(session, ask.model, ask.session_key)
            self._forget_oldest()
        known.running += 1
        self._known.move_to_end(place)

    def ended(self, ask: Ask) -> None:
        """That turn is over, or this try of it; `succeeded` comes before, if it did. Once is enough."""
        place = self._running.pop(ask.request_id, None)
        known = self._known.get(place) if place is not None else None
        if known is None:
            return
        known.running -= 1
        if not known.running and not known.turns:
            self._forget(known)

    def heard(self, holding: Holding) -> None:
        """A peer's holding: of a turn both know, its executor's generation counts, for clocks differ."""
        known = self._known.get((holding.session, holding.model))
        if known is not None and known.tips and known.tips[-1] == holding.tip:
            known.generation = holding.generation

    def succeeded(
        self, ask: Ask, session: str, node: str, n_tokens: int | None, generation: int
    ) -> Identity | None:
        """The turn was answered whole by `node`: the conversation now ends with its chain.

        The answer is what the turn was taken for.
        """
        identity = self._asked.pop(ask.request_id, None)
        if (known := self._known.get((session, ask.model))) is not None:
            self._grew(known, ask, node, n_tokens, generation)
        return identity

    def _grew(self, known: _Conversation, ask: Ask, node: str, n_tokens: int | None, generation: int) -> None:
        known.turns += 1
        known.node, known.n_tokens = node, n_tokens or 0
        known.generation = max(generation, known.generation)
        if ask.chain is None:
            return
        links = ask.chain.links
        known.n_bytes = ask.chain.ends[-1]
        if known.key is not None and known.head != links[0]:
            self._unlist(self._with_head, known, known.head)
            self._with_head.setdefault((known.model, known.key, links[0]), {})[known] = None
        known.head = links[0]
        if links[-1] in known.tips:
            known.tips.remove(links[-1])
        known.tips.append(links[-1])
        self._at_tip.setdefault((known.model, known.key, links[-1]), {})[known] = None
        if len(known.tips) > CONVERSATION_TIPS_MAX:
            self._unlist(self._at_tip, known, known.tips.pop(0))

    # -- deciding ------------------------------------------------------------------------------------
    def _named(self, session: str, model: str) -> Identity:
        known = self._known.get((session, model))
        if known is None or not known.turns:
            return Identity(session, "new")
        return _continuing(known)

    def _named_by_entry(self, ask: Ask, session: str) -> Identity:
        found = self._named(session, ask.model)
        if found.kind == "continues" or ask.chain is None:
            return found
        for link in reversed(ask.chain.links[1:]):
            for known in reversed(self._at_tip.get((ask.model, ask.session_key, link), {})):
                shared = self._shared(ask, known.session, link)
                return Identity(session, "new", parent=known.session, shared_tokens=shared)
        return found

    def _of_key(self, ask: Ask) -> Identity | None:
        if ask.session_key is None:
            return None
        return self._named(_digest("key", ask.session_key, ask.model), ask.model)

    def _of_chain(self, ask: Ask) -> Identity:
        chain = ask.chain
        assert chain is not None
        model, key = ask.model, ask.session_key
        for link in reversed(chain.links[1:]):
            if (model, key, link) in self._at_tip or self._peers.is_tip(model, link):
                whole = link == chain.links[-1]
                found = self._continued(ask, link, whole) or self._left(ask, link)
                if found is not None:
                    return found
        return self._compacted(ask) or self._new(ask)

    def _continued(self, ask: Ask, link: str, whole: bool) -> Identity | None:
        """The conversation whose newest tip is `link`, if there is one that is not answered right now.

        `whole`: nothing follows the link. Without a key that may as well be another client that begins with
        the same words.
        """
        if whole and ask.session_key is None:
            return None
        for known in reversed(self._at_tip.get((ask.model, ask.session_key, link), {})):
            if known.tips[-1] == link and not known.running and not self._moved_on(known):
                return _continuing(known)
        scope = scope_of(ask.session_key)
        for node, holding in self._peers.at_tip(ask.model, link):
            if holding.scope != scope or self._is_running(holding.session, ask.model):
                continue
            newest = self._peers.newest(holding.session, ask.model)
            ours = self._known.get((holding.session, ask.model))
            if (
                newest is not None
                and newest.tip == link
                and not (ours and _is_ahead(ours, link, newest.generation))
            ):
                return Identity(holding.session, "continues", holding.n_tokens, node)
        return None

    def _left(self, ask: Ask, link: str) -> Identity | None:
        """A conversation that had `link` as its tip once, or has and is being answered right now."""
        for known in reversed(self._at_tip.get((ask.model, ask.session_key, link), {})):
            return self._parted(ask, known.session, link)
        scope = scope_of(ask.session_key)
        for _, holding in self._peers.at_tip(ask.model, link):
            if holding.scope == scope:
                return self._parted(ask, holding.session, link)
        return None

    def _parted(self, ask: Ask, parent: str, link: str) -> Identity:
        assert ask.chain is not None
        shared = self._shared(ask, parent, link)
        if ask.session_key is None or self._is_running(parent, ask.model):
            return Identity(self._apart(ask), "fork", parent=parent, shared_tokens=shared)
        known = self._known.get((parent, ask.model))
        shrank = known is not None and ask.chain.ends[-1] < known.n_bytes
        return Identity(parent, "compaction" if shrank else "fork", parent=parent, shared_tokens=shared)

    def _shared(self, ask: Ask, parent: str, link: str) -> int:
        """Tokens of the parent's state up to the link."""
        assert ask.chain is not None
        n_bytes = ask.chain.ends[ask.chain.links.index(link)]
        known = self._known.get((parent, ask.model))
        if known is None or not known.n_bytes:
            newest = self._peers.newest(parent, ask.model)
            return newest.n_tokens if newest is not None else 0
        return known.n_tokens * min(n_bytes, known.n_bytes) // known.n_bytes

    def _compacted(self, ask: Ask) -> Identity | None:
        """The key's largest conversation with the same tools and system prompt.

        Where there is neither, nothing tells a compacted chat from the request for its title.
        """
        assert ask.chain is not None
        if ask.session_key is None or not ask.chain.ends[0]:
            return None
        same = self._with_head.get((ask.model, ask.session_key, ask.chain.links[0]), {})
        idle = [known for known in same if not known.running]
        if not idle:
            return None
        return Identity(max(idle, key=lambda known: known.n_bytes).session, "compaction")

    def _new(self, ask: Ask) -> Identity:
        if ask.session_key is None or self._is_running(first := _first_id(ask), ask.model):
            return Identity(self._apart(ask), "new")
        again = self._is_known(first, ask.model)
        return Identity(first, "compaction" if again else "new")

    def _apart(self, ask: Ask) -> str:
        """An id for this request's conversation alone."""
        first = _first_id(ask)
        taken = (
            ask.session_key is None or self._is_running(first, ask.model) or self._is_known(first, ask.model)
        )
        return _digest(first, ask.request_id) if taken else first

    def _is_known(self, session: str, model: str) -> bool:
        known = self._known.get((session, model))
        return (known is not None and known.turns > 0) or self._peers.newest(session, model) is not None

    def _is_running(self, session: str, model: str) -> bool:
        known = self._known.get((session, model))
        return known is not None and known.running > 0

    def _moved_on(self, known: _Conversation) -> bool:
        """Has a newer turn of it come in by another node?"""
        newest = self._peers.newest(known.session, known.model)
        return newest is not None and newest.generation > known.generation and newest.tip != known.tips[-1]

    # -- forgetting ----------------------------------------------------------------------------------
    def _forget_oldest(self) -> None:
        while len(self._known) > self._limit:
            self._forget(next(iter(self._known.values())))

    def _forget(self, known: _Conversation) -> None:
        del self._known[(known.session, known.model)]
        for tip in known.tips:
            self._unlist(self._at_tip, known, tip)
        self._unlist(self._with_head, known, known.head)

    @staticmethod
    def _unlist(table: dict[_Place, dict[_Conversation, None]], known: _Conversation, link: str) -> None:
        place = (known.model, known.key, link)
        there = table.get(place)
        if there is not None:
            there.pop(known, None)
            if not there:
                del table[place]


def _continuing(known: _Conversation) -> Identity:
    return Identity(known.session, "continues", known.n_tokens, known.node)


def _is_ahead(ours: _Conversation, link: str, generation: int) -> bool:
    return bool(ours.tips) and ours.tips[-1] != link and ours.generation > generation


def _first_id(ask: Ask) -> str:
    """Of the first conversation under a key that begins so: every node finds it, whatever it has heard."""
    assert ask.chain is not None
    return _digest("chain", ask.session_key or "", ask.model, *ask.chain.links[:2])


def _digest(*parts: str) -> str:
    return blake3("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest(length=16)
