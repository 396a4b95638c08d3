"""The node's view of itself and of the fleet, as the HTTP layer shows it. Reads state, changes none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from viiwork.config.model import Config
from viiwork.core.capacity import CapacityReport, FleetModel, KvIdentity, ModelCapacity, fleet_capacity
from viiwork.engine.supervisor import BackendView
from viiwork.limits import MIB
from viiwork.node.dispatch import Dispatcher
from viiwork.version import VERSION
from viiwork.wire.capacity import encode_report, fleet_json

Sections = Callable[[], dict[str, Any]]


class NodeFacts:
    """Implements `api.ports.Facts`."""

    def __init__(
        self,
        name: str,
        node_id: str,
        config: Config,
        dispatcher: Dispatcher,
        *,
        backends: Callable[[], Sequence[BackendView]],
        addr: Callable[[], str],
        kv_identity: Callable[[str], KvIdentity | None],
        sections: dict[str, Sections],
    ) -> None:
        """`sections` adds blocks to `/v1/status` by name: mesh, kv_share."""
        self.name = name
        self._node_id = node_id
        self._config = config
        self._dispatcher = dispatcher
        self._backends = backends
        self._addr = addr
        self._kv_identity = kv_identity
        self._sections = sections
        self._started_at = time.monotonic()

    # -- api.ports.Facts -----------------------------------------------------------------------------
    def health(self) -> tuple[int, dict[str, Any]]:
        backends = self._backends()
        healthy = sum(b.status == "healthy" for b in backends)
        ok = (healthy > 0 or not self._config.models) and not self._dispatcher.draining
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
        own = {model.name for model in self._config.models}
        found = []
        for model in self._fleet():
            entry: dict[str, Any] = {
                "id": model.name,
                "object": "model",
                "owned_by": "local" if model.name in own else "peer",
            }
            if model.ctx is not None:
                entry |= {"max_model_len": model.ctx, "context_length": model.ctx}
            found.append(entry)
        return found

    def model_info(self) -> list[dict[str, Any]]:
        found = []
        for model in self._fleet():
            info: dict[str, Any] = {"mode": "chat", "supports_function_calling": True}
            if model.ctx is not None:
                info["max_input_tokens"] = model.ctx
            found.append(
                {"model_name": model.name, "litellm_params": {"model": model.name}, "model_info": info}
            )
        return found

    def capacity(self) -> bytes:
        return encode_report(self.report())

    def fleet_capacity(self, model: str | None) -> dict[str, Any]:
        return fleet_json(self.name, VERSION, self._config.routing.stale_after, self._fleet(model))

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
        by_model: dict[str, list[BackendView]] = {model.name: [] for model in self._config.models}
        for view in self._backends():
            by_model.setdefault(view.model, []).append(view)
        return CapacityReport(
            self.name, VERSION, tuple(self._capacity(name, views) for name, views in by_model.items())
        )

    def _capacity(self, name: str, views: Sequence[BackendView]) -> ModelCapacity:
        healthy = [view for view in views if view.status == "healthy"]
        configured = next((m.context for m in self._config.models if m.name == name), 0)
        return ModelCapacity(
            name=name,
            engine="llamacpp",
            slots=sum(view.n_slots for view in healthy),
            busy=sum(self._busy(view) for view in healthy),
            queued=self._dispatcher.queue.depth(name),
            ctx=min((view.ctx for view in healthy), default=configured),
            backends=len(views),
            healthy_backends=len(healthy),
            kv=self._kv_identity(name),
        )

    def _busy(self, view: BackendView) -> int:
        return max(view.busy or 0, self._dispatcher.slots.in_flight(view.id))

    def _model_status(self, entry: ModelCapacity) -> dict[str, Any]:
        return {
            "name": entry.name,
            "engine": entry.engine,
            "slots": entry.slots,
            "busy": entry.busy,
            "queued": entry.queued,
            "ctx": entry.ctx,
            "backends": [self._backend_status(v) for v in self._backends() if v.model == entry.name],
        }

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

    def _fleet(self, model: str | None = None) -> tuple[FleetModel, ...]:
        stale_after_s = self._config.routing.stale_after
        reports = self._dispatcher.peers.reports()
        return fleet_capacity(self.report(), reports, time.monotonic(), stale_after_s, model)

    def _uptime_s(self) -> int:
        return round(time.monotonic() - self._started_at)
