"""The node's view of itself and of the fleet, as the HTTP layer shows it. Reads state, changes none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import psutil

from viiwork.config.model import Config, ModelSection
from viiwork.core.capacity import CapacityReport, FleetModel, KvIdentity, ModelCapacity, fleet_capacity
from viiwork.engine.supervisor import BackendView, Supervisor
from viiwork.limits import MIB
from viiwork.node.aliases import Aliases
from viiwork.node.dispatch import Dispatcher
from viiwork.version import VERSION
from viiwork.wire.capacity import encode_report, fleet_json

Sections = Callable[[], dict[str, Any]]


class _Listed(NamedTuple):
    """What a client may ask for by name."""

    name: str
    ctx: int | None  # None when no node with slots says so
    target: str | None = None  # of an alias


class NodeFacts:
    """Implements `api.ports.Facts`."""

    def __init__(
        self,
        name: str,
        node_id: str,
        config: Config,
        dispatcher: Dispatcher,
        *,
        aliases: Aliases,
        supervisor: Supervisor,
        addr: Callable[[], str],
        kv_identity: Callable[[str], KvIdentity | None],
        sections: dict[str, Sections],
    ) -> None:
        """`sections` adds blocks to `/v1/status` by name: mesh, kv_share."""
        self.name = name
        self._node_id = node_id
        self._config = config
        self._dispatcher = dispatcher
        self._aliases = aliases
        self._supervisor = supervisor
        self._addr = addr
        self._kv_identity = kv_identity
        self._sections = sections
        self._started_at = time.monotonic()

    # -- api.ports.Facts -----------------------------------------------------------------------------
    def health(self) -> tuple[int, dict[str, Any]]:
        backends = self._supervisor.views()
        healthy = sum(b.status == "healthy" for b in backends)
        expected = any(model.name not in self._supervisor.parked for model in self._supervisor.models)
        ok = (healthy > 0 or not expected) and not self._dispatcher.draining
        body = {
            "status": "ok" if ok else "unhealthy",
            "version": VERSION,
            "node": self.name,
            "uptime_seconds": self._uptime_s(),
            "backends_healthy": healthy,
            "backends_total": len(backends),
        }
        return (200 if ok else 503), body

    def models(self) -> list[dict[str, Any]]:
        own = {model.name for model in self._supervisor.models}
        found = []
        for model in self._listed():
            entry: dict[str, Any] = {"id": model.name, "object": "model"}
            if model.target is not None:
                entry |= {"owned_by": "alias", "target": model.target}
            else:
                entry["owned_by"] = "local" if model.name in own else "peer"
            if model.ctx is not None:
                entry |= {"max_model_len": model.ctx, "context_length": model.ctx}
            found.append(entry)
        return found

    def model_info(self) -> list[dict[str, Any]]:
        found = []
        for model in self._listed():
            info: dict[str, Any] = {"mode": "chat", "supports_function_calling": True}
            if model.ctx is not None:
                info["max_input_tokens"] = model.ctx
            found.append(
                {"model_name": model.name, "litellm_params": {"model": model.name}, "model_info": info}
            )
        return found

    def capacity(self, holdings_known: int | None) -> bytes:
        report = self.report()
        rev, holdings = self._dispatcher.book.holdings()
        told = None if rev == holdings_known else holdings
        return encode_report(replace(report, holdings_rev=rev, holdings=told))

    def fleet_capacity(self, model: str | None) -> dict[str, Any]:
        resolved_from: str | None = None
        meaning = self._aliases.meaning(model) if model is not None else None
        if meaning is not None and meaning.model is not None:
            resolved_from, model = model, meaning.model
        stale_after_s = self._config.routing.stale_after
        return fleet_json(self.name, VERSION, stale_after_s, self._fleet(model), resolved_from)

    def model_for(self, name: str) -> str | None:
        return self._aliases.model_for(name)

    def status(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        body: dict[str, Any] = {
            "node": self.name,
            "node_id": self._node_id,
            "ver": VERSION,
            "addr": self._addr(),
            "api_port": self._config.api.port,
            "uptime_s": self._uptime_s(),
            "host_mem_total_mb": memory.total // MIB,
            "host_mem_used_mb": (memory.total - memory.available) // MIB,
            "models": [self._model_status(entry) for entry in self.report().models],
            "requests": self.requests(),
        }
        for name, section in self._sections.items():
            body[name] = section()
        return body

    def requests(self) -> dict[str, Any]:
        """The block of that name in `/v1/status`."""
        return {
            "turns_done": self._dispatcher.turns,
            "leases": self._dispatcher.slots.open_leases,
            "forwards": self._dispatcher.peers.open_forwards,
            "sessions": len(self._dispatcher.sessions),
        }

    # -- values --------------------------------------------------------------------------------------
    def report(self) -> CapacityReport:
        """What peers may know of this node's room: healthy backends only."""
        views = self._supervisor.views()
        models = self._supervisor.models
        return CapacityReport(
            self.name,
            VERSION,
            tuple(self._capacity(model, [v for v in views if v.model == model.name]) for model in models),
            self._aliases.digest,
        )

    def _capacity(self, model: ModelSection, views: Sequence[BackendView]) -> ModelCapacity:
        name = model.name
        healthy = [view for view in views if view.status == "healthy"]
        return ModelCapacity(
            name=name,
            engine=model.engine,
            slots=sum(view.n_slots for view in healthy),
            busy=sum(self._busy(view) for view in healthy),
            queued=self._dispatcher.queue.depth(name),
            ctx=min((view.ctx for view in healthy), default=model.context),
            backends=len(views),
            healthy_backends=len(healthy),
            kv=self._kv_identity(name),
            perf=self._dispatcher.perf(name),
        )

    def _busy(self, view: BackendView) -> int:
        return max(view.busy or 0, self._dispatcher.slots.in_flight(view.id))

    def _model_status(self, entry: ModelCapacity) -> dict[str, Any]:
        body: dict[str, Any] = {
            "name": entry.name,
            "engine": entry.engine,
            "slots": entry.slots,
            "busy": entry.busy,
            "queued": entry.queued,
            "ctx": entry.ctx,
            "backends": [self._backend_status(v) for v in self._supervisor.views() if v.model == entry.name],
        }
        if entry.name in self._supervisor.parked:
            body["parked"] = True
        if entry.perf is not None:
            body["perf"] = {
                "overhead_ms": entry.perf.overhead_ms,
                "prefill_ms_per_1k": entry.perf.prefill_ms_per_1k,
                "samples": entry.perf.samples,
            }
            if entry.perf.import_ms_per_1k is not None:
                body["perf"]["import_ms_per_1k"] = entry.perf.import_ms_per_1k
        return body

    def _backend_status(self, view: BackendView) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": view.id,
            "status": view.status,
            "slots": view.n_slots,
            "busy": self._busy(view),
            "respawns": view.respawns,
            "uptime_s": round(view.uptime_s),
            "embedded": view.embedded,
        }
        known = {
            "phase": view.phase,
            "reason": view.reason,
            "pid": view.pid,
            "gpus": list(view.gpus),
            "rss_mb": view.rss_bytes // MIB if view.rss_bytes is not None else None,
            "tok_decoded": view.tok_decoded,
            "tok_remain": view.tok_remain,
            "last_lines": list(view.last_lines),
        }
        return body | {key: value for key, value in known.items() if value not in (None, "", [])}

    def _listed(self) -> list[_Listed]:
        """Models and aliases by name; an alias whose name a model bears is not one now."""
        models = {m.name: _Listed(m.name, m.ctx) for m in self._fleet()}
        aliases = {
            alias["name"]: _Listed(
                alias["name"],
                models[alias["resolved"]].ctx if alias["resolved"] in models else None,
                alias["target"],
            )
            for alias in self._aliases.listing()
        }
        return sorted((aliases | models).values())

    def _fleet(self, model: str | None = None) -> tuple[FleetModel, ...]:
        stale_after_s = self._config.routing.stale_after
        reports = self._dispatcher.peers.reports()
        return fleet_capacity(self.report(), reports, time.monotonic(), stale_after_s, model)

    def _uptime_s(self) -> int:
        return round(time.monotonic() - self._started_at)
