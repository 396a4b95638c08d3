"""All backends of this node: started in order, watched, kept running, changed at run time, ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from viiwork.config.model import HealthSection, ModelSection
from viiwork.engine.backend import Backend, CardPids, Pace, Shared
from viiwork.engine.binary import FlagProbe
from viiwork.engine.command import HostFacts, backend_count
from viiwork.engine.external import ExternalBackend, ExternalPace
from viiwork.engine.groups import GroupGuard
from viiwork.engine.ladder import Rules
from viiwork.engine.leftovers import EngineRegister
from viiwork.engine.ports import PortPicker
from viiwork.engine.savedir import save_dir_path
from viiwork.engine.views import BackendView
from viiwork.limits import ENGINE_STARTUP_TIMEOUT_S, EXTERNAL_POLL_S, EXTERNAL_PROBE_S

__all__ = ["BackendView", "External", "HostFacts", "Supervisor"]

log = logging.getLogger("viiwork.engine")


@dataclass(frozen=True, slots=True)
class External:
    """What a request to an external server needs beside its address."""

    model: str  # its name there, "" = the same
    api_key: str = field(repr=False)  # "" = none


class Supervisor:
    """Owns the configured models, which of them are parked, and the engine processes of the node.

    Every method runs on the event loop's thread. What is wanted and what runs are kept apart: a change of the
    first makes backends that are wanted no more drain at once, and new ones start when the last of them has
    ended, for they may share cards.

    `in_flight` tells how many requests a backend serves now, `occupied` whether kv_share stops it with a save
    or restore; `on_change` hears of every change that matters to routing and `on_gone` of every backend that
    ended for good, with its id and model; none of them may block. `run_dir` keeps the list of running
    engines, so that a node started again kills what an earlier one left behind.
    """

    def __init__(
        self,
        models: Sequence[ModelSection],
        *,
        health: HealthSection,
        run_dir: Path,
        save_root: Path | None,
        hidden_env: frozenset[str],
        in_flight: Callable[[str], int],
        on_change: Callable[[BackendView], None],
        occupied: Callable[[str], bool] = lambda backend: False,
        on_gone: Callable[[str, str], None] = lambda backend, model: None,
        before_end: Callable[[str], Awaitable[None]] | None = None,
        api_keys: Mapping[str, str] | None = None,
        pace: Pace | None = None,
        rules: Rules | None = None,
    ) -> None:
        """`api_keys` holds those of external servers by the environment variable that `api_key_env` names.

        `before_end` is awaited when a backend that is wanted no more has drained and its engine still runs,
        for no longer than the rest of the grace.
        """
        self._models = {model.name: model for model in models}
        self._parked: set[str] = set()
        self._health = health
        self._save_root = save_root
        self._hidden_env = hidden_env
        self._api_keys = dict(api_keys or {})
        self._in_flight = in_flight
        self._occupied = occupied
        self._on_change = on_change
        self._on_gone = on_gone
        self._before_end = before_end
        self._pace = pace or Pace(probe_s=health.interval, probe_timeout_s=health.timeout)
        self._rules = rules or Rules(
            max_failures=health.max_failures,
            max_respawns=health.max_respawns,
            respawn_grace_s=health.respawn_grace,
        )
        self._guard = GroupGuard(EngineRegister(run_dir / "engines.json"))
        self._shared: Shared | None = None  # once started
        self._backends: dict[str, Backend | ExternalBackend] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}

    async def start(self, facts: HostFacts, card_pids: CardPids | None = None) -> None:
        """Begin; returns at once. Backends load one by one, the first of every model before any second.

        With `card_pids` an engine found on cards that are not its own is replaced.
        """
        await asyncio.to_thread(self._guard.start)
        session = aiohttp.ClientSession(
            # llama-server closes connections that were idle for 5 s; ours must be the earlier end.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        self._shared = Shared(
            session=session,
            guard=self._guard,
            gate=asyncio.Lock(),
            flags=FlagProbe(),
            ports=PortPicker(),
            facts=facts,
            hidden_env=self._hidden_env,
            pace=self._pace,
            in_flight=self._in_flight,
            occupied=self._occupied,
            on_change=self._on_change,
            before_end=self._before_end,
            card_pids=card_pids,
        )
        self._reconcile()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End all engines: SIGTERM, and SIGKILL after `timeout_s`. None of their processes is left.

        Called a second time while it runs, it hurries with the shorter of both times.
        """
        shared, self._shared = self._shared, None  # nothing starts any more
        retiring = list(self._retiring.values())
        for task in retiring:
            task.cancel()  # what still runs there is not waited for any longer
        await asyncio.gather(*(backend.stop(timeout_s) for backend in self._backends.values()))
        await asyncio.gather(*retiring, return_exceptions=True)
        if shared is not None:
            await shared.session.close()
        await asyncio.to_thread(self._guard.close)

    # -- what is wanted ----------------------------------------------------------------------------
    @property
    def models(self) -> tuple[ModelSection, ...]:
        """As configured, parked ones included."""
        return tuple(self._models.values())

    @property
    def parked(self) -> Collection[str]:
        return self._parked

    def apply(
        self,
        models: Sequence[ModelSection],
        *,
        facts: HostFacts,
        hidden_env: frozenset[str],
        api_keys: Mapping[str, str],
    ) -> None:
        """Configure other models: an entry that changed in anything is ended and started anew."""
        self._models = {model.name: model for model in models}
        self._parked &= set(self._models)
        self._api_keys, self._hidden_env = dict(api_keys), hidden_env
        if self._shared is not None:
            self._shared = replace(self._shared, facts=facts, hidden_env=hidden_env)
        self._reconcile()

    def park(self, names: Collection[str], parked: bool) -> set[str]:
        """End the backends of configured models, or start them again; the names that were not so before.

        Parking lasts until it is undone or the node ends.
        """
        changed = set(names) - self._parked if parked else self._parked.intersection(names)
        self._parked = self._parked | changed if parked else self._parked - changed
        for name in sorted(changed):
            log.info("model.%s name=%s", "parked" if parked else "unparked", name)
        self._reconcile()
        return changed

    def external(self, backend_id: str) -> External | None:
        """What requests to an external server need; None for a backend of our own."""
        backend = self._backends.get(backend_id)
        if not isinstance(backend, ExternalBackend):
            return None
        return External(backend.model.model, self._api_keys.get(backend.model.api_key_env, ""))

    # -- what runs ---------------------------------------------------------------------------------
    def views(self) -> list[BackendView]:
        return [backend.view() for backend in self._backends.values()]

    def hard_failure(self, backend_id: str, why: str) -> None:
        """The inference path was refused, reset or cut: probe now, and one failed probe is then enough."""
        if backend := self._backends.get(backend_id):
            backend.hard_failure(why)

    def stalled(self, backend_id: str) -> None:
        """It lost a request. Unless it runs a token now, or when the next one is lost too, it is replaced."""
        if backend := self._backends.get(backend_id):
            backend.stalled()

    def succeeded(self, backend_id: str) -> None:
        """A request was answered. Cheap."""
        if backend := self._backends.get(backend_id):
            backend.succeeded()

    def _reconcile(self) -> None:
        """Retire what is wanted no more; start what is missing, unless something still ends."""
        if self._shared is None:
            return
        wanted = [model for model in self._models.values() if model.name not in self._parked]
        order = load_order(wanted)
        keep = {f"{model.name}/{index}": model for model, index in order}
        for backend in list(self._backends.values()):
            if backend.id not in self._retiring and backend.model != keep.get(backend.id):
                task = asyncio.get_running_loop().create_task(self._retire(backend))
                self._retiring[backend.id] = task
        if self._retiring:
            return
        for model, index in order:
            if f"{model.name}/{index}" not in self._backends:
                backend = self._new(model, index, self._shared)
                self._backends[backend.id] = backend
                backend.start()

    async def _retire(self, backend: Backend | ExternalBackend) -> None:
        log.info("[%s] draining", backend.id)
        try:
            await backend.retire()
        finally:
            del self._retiring[backend.id]
            if self._shared is not None:
                del self._backends[backend.id]
                log.info("[%s] ended", backend.id)
                self._on_gone(backend.id, backend.model.name)
                self._reconcile()

    def _new(self, model: ModelSection, index: int, shared: Shared) -> Backend | ExternalBackend:
        if model.engine == "external":
            return ExternalBackend(
                model,
                self._api_keys.get(model.api_key_env, ""),
                shared.session,
                shared.in_flight,
                shared.on_change,
                self._rules,
                ExternalPace(self._pace.probe_s, EXTERNAL_POLL_S, EXTERNAL_PROBE_S),
            )
        return Backend(model, index, self._rules_for(model), self._save_dir(model, index), shared)

    def _rules_for(self, model: ModelSection) -> Rules:
        timeout_s = ENGINE_STARTUP_TIMEOUT_S if model.startup_timeout is None else model.startup_timeout
        return replace(self._rules, startup_timeout_s=timeout_s)

    def _save_dir(self, model: ModelSection, index: int) -> Path | None:
        return None if self._save_root is None else save_dir_path(self._save_root, model.name, index)


def load_order(models: Sequence[ModelSection]) -> list[tuple[ModelSection, int]]:
    """Backends in the order they load: round robin by index, so that every model is served early."""
    counts = [(model, backend_count(model)) for model in models]
    deepest = max((count for _, count in counts), default=0)
    return [(model, index) for index in range(deepest) for model, count in counts if index < count]
