"""What this node knows of its peers' room: last reports, own forwards since then, refusals.

Single owner of that knowledge. A report tells how things were when it was *asked for*, so forwards begun
after that moment are subtracted from it, those that ended since are added, and a refusal counts until a
report asked for after the refusal has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from viiwork.core.capacity import ModelCapacity, PeerReport
from viiwork.core.choice import Candidate
from viiwork.limits import CAPACITY_MODELS_MAX, LOST_MODEL_KEPT_S


@dataclass(slots=True)
class _Peer:
    url: str
    report: PeerReport | None = None
    models: dict[str, ModelCapacity] = field(default_factory=dict)  # of the report, by name
    forwards: dict[int, tuple[str, float]] = field(default_factory=dict)  # number -> (model, started at)
    unseen: dict[str, int] = field(
        default_factory=dict
    )  # model -> forwards begun since the report's question, less those ended since
    refused_at: dict[str, float] = field(default_factory=dict)  # model -> when
    fresh_until: float = -math.inf
    offered: dict[str, Candidate] = field(default_factory=dict)  # model -> as it was last asked for

    def free(self, entry: ModelCapacity) -> int:
        """Free slots as we may count on them now."""
        if entry.name in self.refused_at:
            return 0
        return min(max(entry.free - self.unseen.get(entry.name, 0), 0), entry.slots)


class PeerTable:
    """Peers that may be routed to, by node name."""

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._peers: dict[str, _Peer] = {}
        self._of_model: dict[str, dict[str, _Peer]] = {}  # who lists the model, however old its report
        self._lost: dict[str, float] = {}  # models that nobody lists since a peer went -> when; oldest first
        self._next = 0

    # -- what membership and the polls tell ----------------------------------------------------------
    def put(self, node: str, url: str) -> None:
        """A member is there, or has a new address."""
        known = self._peers.get(node)
        if known is None:
            self._peers[node] = _Peer(url)
        else:
            known.url = url

    def remove(self, node: str, now: float) -> None:
        """A member is gone; its models stay known for a while, for most machines come back."""
        peer = self._peers.pop(node, None)
        if peer is None:
            return
        self._unlist(node, peer)
        for name in peer.models:
            if name not in self._of_model:
                self._lost.pop(name, None)
                self._lost[name] = now
        while len(self._lost) > CAPACITY_MODELS_MAX:
            del self._lost[next(iter(self._lost))]

    def reported(self, node: str, report: PeerReport) -> None:
        """A capacity report came; refusals older than its question are settled."""
        peer = self._peers.get(node)
        if peer is None:
            return
        models = {model.name: model for model in report.report.models}
        if models.keys() != peer.models.keys():
            self._unlist(node, peer)
            for name in models:
                self._of_model.setdefault(name, {})[node] = peer
        peer.report, peer.models = report, models
        peer.fresh_until = report.received_at + self._stale_after_s
        peer.offered.clear()
        asked_at = report.requested_at
        peer.refused_at = {m: at for m, at in peer.refused_at.items() if at >= asked_at}
        peer.unseen = {}
        for model, started_at in peer.forwards.values():
            if started_at > asked_at:
                peer.unseen[model] = peer.unseen.get(model, 0) + 1

    def _unlist(self, node: str, peer: _Peer) -> None:
        for name in peer.models:
            listed = self._of_model[name]
            del listed[node]
            if not listed:
                del self._of_model[name]

    def slept(self, seconds: float) -> None:
        """This machine was suspended: every report is older than the clock of a process tells."""
        for peer in self._peers.values():
            if (known := peer.report) is not None:
                requested_at, received_at = known.requested_at - seconds, known.received_at - seconds
                peer.report = replace(known, requested_at=requested_at, received_at=received_at)
                peer.fresh_until -= seconds

    # -- questions -----------------------------------------------------------------------------------
    def url(self, node: str) -> str:
        return self._peers[node].url

    def reports(self) -> dict[str, PeerReport]:
        return {name: peer.report for name, peer in self._peers.items() if peer.report is not None}

    def knows(self, model: str, now: float) -> bool:
        """Does any peer list the model, however old its report, or did one that is gone until lately?"""
        return model in self._of_model or now - self._lost.get(model, -math.inf) < LOST_MODEL_KEPT_S

    def lists(self, node: str, model: str) -> bool:
        """Does this peer list the model, however old its report?"""
        return node in self._of_model.get(model, ())

    def serving(self, model: str, now: float) -> Iterator[tuple[str, ModelCapacity]]:
        """Peers with a fresh report and a healthy backend of the model."""
        for name, peer in self._of_model.get(model, {}).items():
            if now < peer.fresh_until and peer.models[model].healthy_backends > 0:
                yield name, peer.models[model]

    def candidates(self, model: str, now: float) -> list[Candidate]:
        """The serving peers, as far as what they hold of a prompt does not matter."""
        found: list[Candidate] = []
        listed = self._of_model.get(model)
        if listed is None:
            return found
        for node, peer in listed.items():
            if now >= peer.fresh_until:
                continue
            candidate = peer.offered.get(model)
            if candidate is None:
                entry = peer.models[model]
                if entry.healthy_backends == 0:
                    continue
                rtt_s = peer.report.rtt_s if peer.report is not None else 0.0
                candidate = Candidate(node, peer.free(entry), rtt_s * 1000, entry.perf)
                peer.offered[model] = candidate
            found.append(candidate)
        return found

    def free(self, node: str, entry: ModelCapacity) -> int:
        """Free slots of a serving peer as we may count on them now."""
        return self._peers[node].free(entry)

    def silent_s(self, node: str, now: float) -> float | None:
        """How long ago the last report came; None for one that is no member, or never reported."""
        peer = self._peers.get(node)
        return peer.report.age_s(now) if peer is not None and peer.report is not None else None

    @property
    def open_forwards(self) -> int:
        return sum(len(peer.forwards) for peer in self._peers.values())

    # -- our own forwards ----------------------------------------------------------------------------
    def forward_started(self, node: str, model: str, now: float) -> int:
        """Count a forward; the number ends it."""
        self._next += 1
        peer = self._peers[node]
        peer.forwards[self._next] = (model, now)
        if peer.report is None or now > peer.report.requested_at:
            peer.unseen[model] = peer.unseen.get(model, 0) + 1
        peer.offered.pop(model, None)
        return self._next

    def forward_ended(self, node: str, number: int) -> bool:
        """The forward is over; False when it was ended before or the peer is gone."""
        peer = self._peers.get(node)
        known = peer.forwards.pop(number, None) if peer is not None else None
        if peer is None or known is None:
            return False
        model, _ = known
        peer.offered.pop(model, None)
        # Below zero: the report counts it as busy, and its slot need not idle until the next one.
        peer.unseen[model] = peer.unseen.get(model, 0) - 1
        return True

    def refused(self, node: str, model: str, now: float) -> None:
        """The peer refused: it counts as full until a report asked for later says otherwise."""
        peer = self._peers.get(node)
        if peer is not None:
            peer.refused_at[model] = now
            peer.offered.pop(model, None)
