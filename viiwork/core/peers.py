"""What this node knows of its peers' room: last reports, own forwards since then, refusals.

Single owner of that knowledge. A report tells how things were when it was *asked for*, so forwards begun
after that moment are subtracted from it, and a refusal counts until a report asked for after the refusal has
come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from viiwork.core.capacity import ModelCapacity, PeerReport, is_fresh


@dataclass(slots=True)
class _Peer:
    url: str
    report: PeerReport | None = None
    forwards: dict[int, tuple[str, float]] = field(default_factory=dict)  # number -> (model, started at)
    refused_at: dict[str, float] = field(default_factory=dict)  # model -> when


class PeerTable:
    """Peers that may be routed to, by node name."""

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._peers: dict[str, _Peer] = {}
        self._next = 0

    # -- what membership and the polls tell ----------------------------------------------------------
    def put(self, node: str, url: str) -> None:
        """A member is there, or has a new address."""
        known = self._peers.get(node)
        if known is None:
            self._peers[node] = _Peer(url)
        else:
            known.url = url

    def remove(self, node: str) -> None:
        self._peers.pop(node, None)

    def reported(self, node: str, report: PeerReport) -> None:
        """A capacity report came; refusals older than its question are settled."""
        peer = self._peers.get(node)
        if peer is None:
            return
        peer.report = report
        peer.refused_at = {m: at for m, at in peer.refused_at.items() if at >= report.requested_at}

    def slept(self, seconds: float) -> None:
        """This machine was suspended: every report is older than the clock of a process tells."""
        for peer in self._peers.values():
            if (known := peer.report) is not None:
                requested_at, received_at = known.requested_at - seconds, known.received_at - seconds
                peer.report = replace(known, requested_at=requested_at, received_at=received_at)

    # -- questions -----------------------------------------------------------------------------------
    def url(self, node: str) -> str:
        return self._peers[node].url

    def reports(self) -> dict[str, PeerReport]:
        return {name: peer.report for name, peer in self._peers.items() if peer.report is not None}

    def knows(self, model: str) -> bool:
        """Does any peer list the model, however old its report?"""
        return any(
            p.report is not None and p.report.report.model(model) is not None for p in self._peers.values()
        )

    def serving(self, model: str, now: float) -> Iterator[tuple[str, ModelCapacity]]:
        """Peers with a fresh report and a healthy backend of the model."""
        for name, peer in self._peers.items():
            if peer.report is None or not is_fresh(peer.report.age_s(now), self._stale_after_s):
                continue
            entry = peer.report.report.model(model)
            if entry is not None and entry.healthy_backends > 0:
                yield name, entry

    def free(self, node: str, entry: ModelCapacity) -> int:
        """Free slots of a serving peer as we may count on them now."""
        peer = self._peers[node]
        if peer.report is None or entry.name in peer.refused_at:
            return 0
        asked_at = peer.report.requested_at
        ours = sum(model == entry.name and started > asked_at for model, started in peer.forwards.values())
        return max(entry.free - ours, 0)

    def rtt_s(self, node: str) -> float:
        report = self._peers[node].report
        return report.rtt_s if report is not None else 0.0

    @property
    def open_forwards(self) -> int:
        return sum(len(peer.forwards) for peer in self._peers.values())

    # -- our own forwards ----------------------------------------------------------------------------
    def forward_started(self, node: str, model: str, now: float) -> int:
        """Count a forward; the number ends it."""
        self._next += 1
        self._peers[node].forwards[self._next] = (model, now)
        return self._next

    def forward_ended(self, node: str, number: int) -> bool:
        """The forward is over; False when it was ended before or the peer is gone."""
        peer = self._peers.get(node)
        return peer is not None and peer.forwards.pop(number, None) is not None

    def refused(self, node: str, model: str, now: float) -> None:
        """The peer refused: it counts as full until a report asked for later says otherwise."""
        peer = self._peers.get(node)
        if peer is not None:
            peer.refused_at[model] = now
