"""What the node does when an engine starts, changes, stands still or goes, or other models are wanted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from viiwork.config.load import LoadedConfig
from viiwork.config.model import Config
from viiwork.core.stalls import StallWatch
from viiwork.core.turn import Grant, Outcome
from viiwork.engine.ladder import SILENT
from viiwork.engine.ports import cpu_seconds
from viiwork.engine.supervisor import BackendView, HostFacts, Supervisor
from viiwork.limits import MIB, RAM_DEFAULT_MIB, RAM_TOKEN_BYTES, SILENT_S, STALL_LOOK_S, STALL_S
from viiwork.node.activity import NodeActivity
from viiwork.node.dispatch import Dispatcher
from viiwork.node.fingerprints import StateFingerprints
from viiwork.node.kv_share import KvShare
from viiwork.node.machine import machine_facts
from viiwork.node.perf import PerfFile

log = logging.getLogger(__name__)


class Backends:
    """Keeps slots, sessions, kv_share and the activity log true to what the supervisor tells."""

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        kv: KvShare,
        activity: NodeActivity,
        perf: PerfFile,
        fingerprints: StateFingerprints,
        abandon: Callable[[str, str], object],
    ) -> None:
        """`abandon` gives up the place of a request, by its id and with a reason."""
        self._config = config
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._kv = kv
        self._activity = activity
        self._perf = perf
        self._fingerprints = fingerprints
        self._abandon = abandon
        self._stalls = StallWatch(STALL_S, SILENT_S)
        self._epochs: dict[str, int] = {}
        self._told: set[str] = set()  # backends whose context was looked at since they started

    def changed(self, view: BackendView) -> None:
        if self._epochs.get(view.id) != view.epoch:
            self._epochs[view.id] = view.epoch
            self._dispatcher.sessions.engine_restarted(view.id)
            self._kv.engine_restarted(view.id)
            self._told.discard(view.id)
            self._dispatcher.sessions.ram_cache(view.id, self._ram_tokens(view))
        if view.status == "healthy" and view.id not in self._told:
            self._told.add(view.id)
            wanted = next((m.context for m in self._supervisor.models if m.name == view.model), 0)
            if view.ctx < wanted:
                log.warning(
                    "backend.context %s: %d tokens a slot, not the configured %d", view.id, view.ctx, wanted
                )
        self._dispatcher.slots.put_backend(
            view.id,
            model=view.model,
            url=view.url or "",
            n_slots=view.n_slots,
            routable=view.status == "healthy" and view.url is not None,
        )
        self._kv.backend_changed(view)
        self._activity.backend_changed(view)
        self._dispatcher.wake()

    def gone(self, backend: str, model: str) -> None:
        """Parked, reconfigured or removed: another one may come by its name."""
        self._epochs.pop(backend, None)
        self._told.discard(backend)
        self._stalls.forget(backend)
        self._dispatcher.sessions.engine_restarted(backend)
        self._dispatcher.slots.remove_backend(backend)
        if not any(known.name == model for known in self._supervisor.models):
            self._dispatcher.slots.remove_model(model)
        self._kv.backend_gone(backend, model)
        self._dispatcher.wake()

    def turn_ended(self, grant: Grant, outcome: Outcome) -> None:
        """Tell the supervisor what the inference path met."""
        if grant.is_forward:
            return
        match outcome.result:
            case "done":
                self._supervisor.succeeded(grant.backend)
            case "stalled":
                self._supervisor.stalled(grant.backend)
            case "unreachable" | "broken":
                self._supervisor.hard_failure(grant.backend, outcome.detail or outcome.result)

    async def watch_stalls(self) -> None:
        """Give up requests an engine has lost, so that they run elsewhere and the engine is replaced."""
        while True:
            await asyncio.sleep(STALL_LOOK_S)
            now = time.monotonic()
            for view in self._supervisor.views():
                silent = view.phase == SILENT
                self._stalls.looked(view.id, view.busy, cpu_seconds(view.pid), silent, now)
            for request_id in self._stalls.lost(self._dispatcher.running(), now):
                self._abandon(request_id, "its engine took it and stands still")
            for request_id in self._dispatcher.lost_forwards(STALL_S):
                self._abandon(request_id, "its node left, or has fallen silent")

    async def apply_models(self, loaded: LoadedConfig) -> None:
        """The models of a reloaded config; all else of it waits for a restart."""
        before = {model.name for model in self._supervisor.models}
        models = loaded.config.models
        facts = await host_facts(msgspec.structs.replace(self._config, models=models))
        self._fingerprints.configure(models)
        await self._perf.configured(models)
        self._supervisor.apply(models, facts=facts, hidden_env=hidden_env(loaded), api_keys=loaded.api_keys)
        for name in before.difference(model.name for model in models):
            self._dispatcher.slots.remove_model(name)
        for model in models:
            self._dispatcher.slots.add_model(model.name)
        self._dispatcher.wake()  # those who wait for a model that is gone are told

    def _ram_tokens(self, view: BackendView) -> int:
        """What the engine's RAM prompt cache is believed to take; 0 where operator arguments decide."""
        model = next((m for m in self._supervisor.models if m.name == view.model), None)
        if model is None or model.engine != "llamacpp":
            return 0
        if any(arg.startswith(("--cache-ram", "-cram")) for arg in model.args):
            return 0
        mib = model.llamacpp.cache_ram_mib
        if mib == -1:
            return view.ctx * view.n_slots  # bytes have no limit then, but tokens have
        return (RAM_DEFAULT_MIB if mib is None else mib) * MIB // RAM_TOKEN_BYTES


async def host_facts(config: Config) -> HostFacts:
    """Facts of this machine for its engines; says which configured GPUs may not be there."""
    facts = await asyncio.to_thread(machine_facts, config)
    for model in config.models:
        if model.gpus and facts.vendor == "none":
            log.warning("%s: no GPU tool found here, gpus %s may not be there", model.name, model.gpus)
    return facts


def hidden_env(loaded: LoadedConfig) -> frozenset[str]:
    """Variables no engine may inherit."""
    mesh = loaded.config.mesh
    return frozenset((mesh.secret_env, mesh.secret_prev_env, *loaded.api_keys))
