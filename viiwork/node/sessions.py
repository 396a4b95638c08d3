"""What this node knows of conversations: who they are, where they are held, how well that went."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import msgspec

from viiwork.core.conversations import Conversations, Identity
from viiwork.core.holdings import Holding, PeerHoldings, Where, held_by_peers, still_right
from viiwork.core.replicas import ReplicaTable
from viiwork.core.sessions import Binding, SessionKey, SessionTable
from viiwork.core.turn import Ask, Grant, Held, Outcome
from viiwork.limits import HOLDINGS_MAX, KV_REPLICAS_MAX

HIT_SHARE = 0.8  # of the previous context reused


class _Unreported(NamedTuple):
    """What a peer has come to hold since its last report was asked for: it ran a turn, or took a state."""

    at: float
    n_tokens: int
    tip: str
    where: Where
    generation: int


class NodeSessions:
    """Owned by the dispatcher, which tells it of each turn's begin and end."""

    def __init__(self, me: str, first_rev: int) -> None:
        """`first_rev`: where revisions of the holdings begin, other in each process of a node."""
        self._me = me
        self.peers = PeerHoldings()
        self.table = SessionTable(peers=self.peers)
        self.replicas = ReplicaTable(KV_REPLICAS_MAX)
        self.conversations = Conversations(self.peers)
        self._unreported: dict[str, OrderedDict[SessionKey, _Unreported]] = {}  # by node
        self._counts: Counter[str] = Counter()
        self._rev = first_rev
        self._told: tuple[Holding, ...] = ()
        self._told_of = (-1, -1)

    # -- one turn ------------------------------------------------------------------------------------
    def identified(self, ask: Ask) -> Ask:
        """The ask with its conversation; from now on that counts as being answered, until `ended`."""
        if not ask.needs_slot:
            return ask
        identity = self.conversations.identify(ask)
        if identity is None:
            return ask
        self.conversations.began(ask, identity.session)
        return msgspec.structs.replace(
            ask,
            session=identity.session,
            home=ask.home or identity.home,
            parent=identity.parent,
            shared_tokens=identity.shared_tokens,
        )

    def ended(self, ask: Ask) -> None:
        """The turn is over, or this try of it."""
        self.conversations.ended(ask)

    def ran(
        self, grant: Grant, outcome: Outcome, generation: int, now: float, before: Binding | None = None
    ) -> None:
        """The turn was answered whole; `before` is where the session's last turn here had left it."""
        ask = grant.ask
        if ask.session is None:
            return
        total = outcome.usage.total if outcome.usage is not None else None
        identity = self.conversations.succeeded(ask, ask.session, grant.node, total, generation)
        if grant.is_forward:
            tip = ask.chain.links[-1] if ask.chain is not None else ""
            held = _Unreported(now, total or 0, tip, "slot", generation)
            self._note_unreported(grant.node, (ask.session, ask.model), held)
        if ask.forwarded_by is None and identity is not None:
            self._count(identity, grant, outcome)
        if before is not None and grant.slot is not None and before.node in (self._me, ""):
            if before.backend and before.backend != grant.backend:
                self._counts["backend_moves"] += 1
            elif before.ref is not None and before.ref.slot != grant.slot:
                self._counts["slot_moves"] += 1

    def sent(self, node: str, key: SessionKey, state: Binding, now: float) -> None:
        """A peer has taken a session's state as a replica."""
        self._note_unreported(
            node, key, _Unreported(now, state.n_tokens, state.tip, "replica", state.generation)
        )

    def _note_unreported(self, node: str, key: SessionKey, held: _Unreported) -> None:
        unreported = self._unreported.setdefault(node, OrderedDict())
        known = unreported.get(key)
        if known is not None and known.generation > held.generation:
            return
        unreported[key] = held
        unreported.move_to_end(key)
        if len(unreported) > HOLDINGS_MAX:
            unreported.popitem(last=False)

    def _count(self, identity: Identity, grant: Grant, outcome: Outcome) -> None:
        """Each turn counts at its entry node, so that the mesh's sum counts it once."""
        self._counts["turns"] += 1
        self._counts[identity.kind] += 1
        if identity.home and identity.home != grant.node:
            self._counts["node_moves"] += 1
        cached = outcome.usage.cached if outcome.usage is not None else None
        if identity.kind == "continues" and identity.n_tokens and cached is not None:
            self._counts["judged"] += 1
            self._counts["hits"] += cached >= HIT_SHARE * identity.n_tokens

    def is_lasting(self, ask: Ask) -> bool:
        """Is another turn to be expected? Without a client's key one turn alone does not promise it."""
        if ask.session is None:
            return False
        if ask.session_key is not None or self.conversations.turns_of(ask.session, ask.model) > 1:
            return True
        return bool(self.peers.of(ask.session, ask.model))  # its earlier turns ran elsewhere

    # -- who holds what ------------------------------------------------------------------------------
    def held(self, ask: Ask) -> dict[str, Held]:
        """What each node holds of the ask's prompt."""
        found = held_by_peers(ask, self.peers)
        for session in {ask.session, ask.parent} - {None}:
            for node, unreported in self._unreported.items():
                turn = unreported.get((session or "", ask.model))
                if turn is not None:
                    n_tokens = still_right(ask, session or "", turn.tip, turn.n_tokens)
                    if turn.where == "slot" or node not in found or found[node].n_tokens < n_tokens:
                        found[node] = Held(n_tokens, turn.where)
        own = self._held_here(ask)
        if own is not None:
            found[self._me] = own
        return found

    def at_peers(self, key: SessionKey) -> dict[str, Holding]:
        """What peers hold of a session, by node, also what they have not reported yet."""
        found = dict(self.peers.of(*key))
        for node, unreported in self._unreported.items():
            held = unreported.get(key)
            if held is not None and (node not in found or found[node].generation < held.generation):
                found[node] = Holding(*key, held.tip, "", held.n_tokens, held.where, held.generation)
        return found

    def reported(self, node: str, holdings: tuple[Holding, ...], requested_at: float) -> None:
        """A peer's list came, perhaps the old one; it tells of all that ended before it was asked for."""
        unreported = self._unreported.get(node)
        if unreported:
            for key in [key for key, turn in unreported.items() if turn.at < requested_at]:
                del unreported[key]
        if self.peers.put(node, holdings):
            for holding in holdings:
                self.conversations.heard(holding)

    def node_gone(self, node: str) -> None:
        self.peers.remove(node)
        self._unreported.pop(node, None)
        self.table.node_gone(node)

    def holdings(self) -> tuple[int, tuple[Holding, ...]]:
        """What this node holds, the newest first, and a number that differs when that does."""
        now = (self.table.revision, self.replicas.revision)
        if now != self._told_of:
            self._told_of = now
            told = self._list()
            if told != self._told:
                self._told, self._rev = told, self._rev + 1
        return self._rev, self._told

    def status(self) -> dict[str, Any]:
        """The `sessions` block of `/v1/status`."""
        counts = self._counts
        judged = counts["judged"]
        return {
            "open": len(self.table),
            "turns": counts["turns"],
            "new": counts["new"],
            "continued": counts["continues"],
            "compactions": counts["compaction"],
            "forks": counts["fork"],
            "judged": judged,
            "hits": counts["hits"],
            "hit_rate": round(counts["hits"] / judged, 4) if judged else None,
            "moves": {
                "nodes": counts["node_moves"],
                "backends": counts["backend_moves"],
                "slots": counts["slot_moves"],
            },
        }

    def _held_here(self, ask: Ask) -> Held | None:
        found: list[Held] = []
        if ask.chain is not None:
            there = self.table.longest(ask.model, ask.chain.links)
            if there is not None:
                found.append(Held(there.n_tokens, "slot" if there.ref is not None else "ram"))
        for session in {ask.session, ask.parent} - {None}:
            key = (session or "", ask.model)
            binding, replica = self.table.get(key), self.replicas.get(key)
            here = binding if binding is not None and binding.is_here else None
            if replica is not None and (here is None or replica.generation > here.generation):
                n_tokens = still_right(ask, key[0], replica.tip, replica.n_tokens)
                found.append(Held(n_tokens, "replica"))
            elif here is not None:
                n_tokens = still_right(ask, key[0], here.tip, here.n_tokens)
                found.append(Held(n_tokens, "slot" if here.ref is not None else "ram"))
        best = max(found, key=lambda held: held.n_tokens, default=None)
        return best if best is not None and best.n_tokens else None

    def _list(self) -> tuple[Holding, ...]:
        found = []
        for (session, model), binding in self.table:
            if not binding.is_here:
                continue
            facts = session, model, binding.tip, binding.scope, binding.n_tokens
            where: Where = "slot" if binding.ref is not None else "ram"
            found.append(Holding(*facts, where, binding.generation, binding.backend))
        own = {(h.session, h.model): h.generation for h in found}
        for replica in self.replicas:
            if own.get(replica.key, -1) < replica.generation:
                facts = *replica.key, replica.tip, replica.scope, replica.n_tokens
                found.append(Holding(*facts, "replica", replica.generation))
        found.sort(key=lambda holding: -holding.generation)
        return tuple(found[:HOLDINGS_MAX])
