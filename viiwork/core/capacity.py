"""What nodes say about their room, how old that is, and what the fleet adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from viiwork.core.holdings import Holding


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What must be equal on both nodes before a saved state of a model may move between them."""

    model_fp: str  # fingerprint of the weights; "" = not known, matches nothing
    state: str  # version of the engine's state format
    cache_type_k: str
    cache_type_v: str
    v_trans: bool
    n_ctx: int  # tokens per slot

    def matches(self, other: KvIdentity | None) -> bool:
        """True if a state saved under `other` may be offered to an engine that is `self`.

        The slot context is left out: a state fits wherever its tokens do, see `fits`. So is the order of V,
        which rendering turns.
        """
        if other is None or not self.model_fp:
            return False
        return replace(self, n_ctx=0, v_trans=False) == replace(other, n_ctx=0, v_trans=False)

    def fits(self, n_tokens: int) -> bool:
        """True if a slot of this engine has room for the state and one more token."""
        return n_tokens < self.n_ctx


@dataclass(frozen=True, slots=True)
class Perf:
    """How fast one node's engines read a prompt, as measured there."""

    overhead_ms: float  # time to first token that does not depend on the prompt's length
    prefill_ms_per_1k: float  # more for every thousand tokens that are read anew; above 0
    samples: int = 0
    import_ms_per_1k: float | None = None  # restoring a replica, a thousand tokens; None = does not say


@dataclass(frozen=True, slots=True)
class ModelCapacity:
    """One model on one node; slots and busy count healthy backends only."""

    name: str
    engine: str = ""
    slots: int = 0
    busy: int = 0
    queued: int = 0
    ctx: int = 0  # tokens per slot, the smallest any healthy backend reported
    backends: int = 0
    healthy_backends: int = 0
    kv: KvIdentity | None = None
    perf: Perf | None = None  # None = not measured yet

    @property
    def free(self) -> int:
        """Free slots, never below zero: an engine may report more busy slots than it has."""
        return max(self.slots - self.busy, 0) if self.healthy_backends > 0 else 0


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """What one node says about itself."""

    node: str
    ver: str = ""
    models: tuple[ModelCapacity, ...] = ()
    aliases: str = ""  # digest of the node's alias table, "" = does not say
    holdings_rev: int = 0  # differs when the holdings do, 0 = does not say
    holdings: tuple[Holding, ...] | None = None  # the newest first; None = not told, which is not "none"

    def model(self, name: str) -> ModelCapacity | None:
        return next((m for m in self.models if m.name == name), None)


@dataclass(frozen=True, slots=True)
class PeerReport:
    """A member's last good report. Its age counts from the answer, its "as of" from the question."""

    report: CapacityReport
    requested_at: float
    received_at: float
    rtt_s: float = 0.0
    api: str = ""  # "ip:port" of the member's API

    def age_s(self, now: float) -> float:
        return max(now - self.received_at, 0.0)


def is_fresh(age_s: float, stale_after_s: float) -> bool:
    """Strictly younger than the limit; a stale report means unknown, not zero."""
    return age_s < stale_after_s


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """One node's part of a model; numbers are None when the report is stale."""

    node: str
    api: str
    age_s: float
    model: ModelCapacity | None

    @property
    def is_stale(self) -> bool:
        return self.model is None


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model over all nodes; sums are over fresh hosts only."""

    name: str
    engine: str
    slots: int
    busy: int
    free: int
    queued: int
    ctx: int | None  # smallest of the fresh hosts that have slots, None when there is none
    hosts: tuple[HostCapacity, ...]


def fleet_capacity(
    own: CapacityReport,
    peers: Mapping[str, PeerReport] | Iterable[PeerReport],
    now: float,
    stale_after_s: float,
    model: str | None = None,
) -> tuple[FleetModel, ...]:
    """Every model (or only `model`) over this node and its peers, sorted by name.

    The node's own numbers are always fresh with age 0. Unknown model: nothing.
    """
    reports = list(peers.values()) if isinstance(peers, Mapping) else list(peers)
    by_model: dict[str, list[tuple[HostCapacity, str]]] = {}

    def add(report: CapacityReport, api: str, age_s: float, fresh: bool) -> None:
        for entry in report.models:
            if model is None or entry.name == model:
                host = HostCapacity(report.node, api, age_s, entry if fresh else None)
                by_model.setdefault(entry.name, []).append((host, entry.engine))

    add(own, "", 0.0, True)
    for peer in reports:
        if peer.report.node != own.node:
            age_s = peer.age_s(now)
            add(peer.report, peer.api, age_s, is_fresh(age_s, stale_after_s))
    return tuple(_fleet_model(name, by_model[name]) for name in sorted(by_model))


def _fleet_model(name: str, hosts: list[tuple[HostCapacity, str]]) -> FleetModel:
    fresh = [host.model for host, _ in hosts if host.model is not None]
    return FleetModel(
        name=name,
        engine=next((engine for _, engine in hosts if engine), ""),
        slots=sum(m.slots for m in fresh),
        busy=sum(m.busy for m in fresh),
        free=sum(m.free for m in fresh),
        queued=sum(m.queued for m in fresh),
        ctx=min((m.ctx for m in fresh if m.slots > 0 and m.ctx > 0), default=None),
        hosts=tuple(sorted((host for host, _ in hosts), key=lambda h: h.node)),
    )
