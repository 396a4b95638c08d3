"""The node's figures as Prometheus' metric families. Labels are bounded: nothing is counted per session."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from viiwork.core.capacity import CapacityReport, PeerReport
from viiwork.core.tally import RequestTally
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.engine.supervisor import BackendView
from viiwork.errors import ViiworkError
from viiwork.limits import METRIC_WORDS_MAX
from viiwork.mesh.values import Member
from viiwork.node.metric_families import counter, gauge, histogram, single

_STATES = ("starting", "healthy", "unhealthy", "respawn", "dead", "stopped")
_MEMBER_STATES = ("alive", "suspect", "dead", "left")
_WORD = re.compile("[a-z][a-z0-9_]{0,47}")
_PLACE = ("model", "where")


class RequestCounts:
    """A listener of `api.ports.Requests` that only counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tally = RequestTally()
        self._clock = clock

    def granted(self, grant: Grant) -> None:
        return None

    def ended(self, grant: Grant, outcome: Outcome, since: float) -> None:
        self.tally.ended(grant, outcome, self._clock() - since)

    def unserved(self, ask: Ask, error: ViiworkError, since: float) -> None:
        self.tally.refused[error.code] += 1

    def left(self, ask: Ask, since: float) -> None:
        self.tally.n_left += 1


@dataclass(frozen=True, slots=True)
class Block:
    """A part of `/v1/status` whose numbers are shown: all of them count upwards but those named here."""

    read: Callable[[], dict[str, Any]]
    gauges: frozenset[str]


class NodeCollector(Collector):
    """Reads the node's state when it is scraped."""

    def __init__(
        self,
        tally: RequestTally,
        *,
        info: dict[str, str],
        report: Callable[[], CapacityReport],
        backends: Callable[[], Sequence[BackendView]],
        members: Callable[[], Sequence[Member]],
        peers: Callable[[], dict[str, PeerReport]],
        blocks: dict[str, Block],
        more: Sequence[Callable[[], Iterable[Metric]]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`blocks` are shown by the names of their fields, `more` are families of other parts."""
        self._tally = tally
        self._info = info
        self._report = report
        self._backends = backends
        self._members = members
        self._peers = peers
        self._blocks = blocks
        self._more = more
        self._clock = clock
        self._started_at = clock()

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "viiwork_node_info", "Version of this node.", {tuple(self._info.values()): 1}, *self._info
        )
        yield gauge(
            "viiwork_uptime_seconds", "Since the node started.", {(): self._clock() - self._started_at}
        )
        yield from self._of_models()
        yield from self._of_backends()
        yield from self._of_requests()
        yield from self._of_mesh()
        for name, block in self._blocks.items():
            yield from _of_block(f"viiwork_{name}", block.read(), block.gauges)
        for families in self._more:
            yield from families()

    def _of_models(self) -> Iterator[Metric]:
        models = self._report().models
        for field, unit in (("slots", ""), ("busy", "_slots"), ("queued", "_requests"), ("ctx", "_tokens")):
            values = {(model.name,): getattr(model, field) for model in models}
            yield gauge(f"viiwork_model_{field}{unit}", _OF_MODEL[field], values, "model")

    def _of_backends(self) -> Iterator[Metric]:
        views = self._backends()
        states = {(v.id, state): int(v.status == state) for v in views for state in _STATES}
        yield gauge("viiwork_backend_state", "1 for the state the backend is in.", states, "backend", "state")
        yield gauge(
            "viiwork_backend_respawns_spent",
            "Of `health.max_respawns`; they come back with health.",
            {(v.id,): v.respawns for v in views},
            "backend",
        )
        yield counter(
            "viiwork_backend_starts", "Processes started.", {(v.id,): v.epoch for v in views}, "backend"
        )
        rss = {(v.id,): v.rss_bytes for v in views if v.rss_bytes is not None}
        yield gauge("viiwork_backend_resident_bytes", "Memory of the process tree.", rss, "backend")

    def _of_requests(self) -> Iterator[Metric]:
        tally = self._tally
        by_model = tally.by_model
        yield counter(
            "viiwork_requests",
            "Requests that were given a place, by how they ended.",
            {(*at, result): n for at, one in by_model.items() for result, n in one.results.items()},
            *_PLACE,
            "result",
        )
        yield counter(
            "viiwork_requests_refused", "Errors the node made itself.", single(tally.refused), "code"
        )
        yield counter("viiwork_requests_left", "Clients that left while they waited.", {(): tally.n_left})
        yield counter(
            "viiwork_tokens",
            "Tokens of turns that ran on this node.",
            {
                (model, kind): n
                for (model, where), one in by_model.items()
                if where == "local"
                for kind, n in one.tokens.items()
            },
            "model",
            "kind",
        )
        for name, text, field in _TIMES:
            values = {at: getattr(one, field) for at, one in by_model.items()}
            yield histogram(f"viiwork_{name}_seconds", text, values, *_PLACE)

    def _of_mesh(self) -> Iterator[Metric]:
        states: Counter[str] = Counter(member.state for member in self._members())
        yield gauge(
            "viiwork_mesh_members",
            "Other nodes, by state.",
            {(state,): states[state] for state in _MEMBER_STATES},
            "state",
        )
        now = self._clock()
        ages = {(name,): now - peer.received_at for name, peer in self._peers().items()}
        yield gauge("viiwork_peer_report_age_seconds", "Since the peer's last report.", ages, "peer")
        rtt = {(name,): peer.rtt_s for name, peer in self._peers().items()}
        yield gauge("viiwork_peer_rtt_seconds", "Round trip of capacity polls.", rtt, "peer")


_TIMES = (
    ("ttft", "From the grant to the first token.", "ttft"),
    ("request_duration", "From the whole body to the end.", "took"),
    ("queue_wait", "Waited for a place.", "queued"),
)
_OF_MODEL = {
    "slots": "Slots of healthy backends.",
    "busy": "Of them, those that work.",
    "queued": "Requests that wait here.",
    "ctx": "Context of a slot.",
}


def _of_block(prefix: str, block: dict[str, Any], gauges: frozenset[str]) -> Iterator[Metric]:
    """Numbers of a status block, a block of numbers inside it with its keys as the label `kind`."""
    for key, value in block.items():
        if not _WORD.fullmatch(key):
            continue
        family = gauge if key in gauges else counter
        name, text = f"{prefix}_{key}", f"`{key}` of this block in /v1/status."
        if isinstance(value, dict):
            numbers: dict[Any, Any] = {
                (k,): v for k, v in value.items() if _is_number(v) and _WORD.fullmatch(k)
            }
            if numbers:
                yield family(name, text, _first(numbers), "kind")
        elif _is_number(value):
            yield family(name, text, {(): value})


def _first(numbers: dict[Any, Any]) -> dict[Any, Any]:
    """Reasons are words of ours or of a peer: a bounded number of them."""
    return dict(list(numbers.items())[:METRIC_WORDS_MAX])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
