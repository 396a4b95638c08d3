"""All backends of this node: started in order, watched, kept running, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp

from viiwork.config.model import HealthSection, ModelSection
from viiwork.engine import events as ev
from viiwork.engine.backend import Backend, CardPids, Pace, Shared
from viiwork.engine.binary import FlagProbe
from viiwork.engine.command import HostFacts, backend_count
from viiwork.engine.groups import GroupGuard
from viiwork.engine.ladder import Rules
from viiwork.engine.leftovers import EngineRegister
from viiwork.engine.ports import PortPicker
from viiwork.engine.savedir import save_dir_path
from viiwork.engine.views import BackendView
from viiwork.limits import ENGINE_STARTUP_TIMEOUT_S

__all__ = ["BackendView", "HostFacts", "Supervisor"]


class Supervisor:
    """Owns the engine processes of the node. Every method runs on the event loop's thread.

    `in_flight` tells how many requests a backend serves now; `on_change` hears of every change that matters
    to routing and must not block. `run_dir` keeps the list of running engines, so that a node
    started again kills what an earlier one left behind.
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
        pace: Pace | None = None,
        rules: Rules | None = None,
    ) -> None:
        self._models = tuple(models)
        self._health = health
        self._save_root = save_root
        self._hidden_env = hidden_env
        self._in_flight = in_flight
        self._on_change = on_change
        self._pace = pace or Pace(probe_s=health.interval, probe_timeout_s=health.timeout)
        self._rules = rules or Rules(
            max_failures=health.max_failures,
            max_respawns=health.max_respawns,
            respawn_grace_s=health.respawn_grace,
        )
        self._guard = GroupGuard(EngineRegister(run_dir / "engines.json"))
        self._session: aiohttp.ClientSession | None = None
        self._backends: dict[str, Backend] = {}

    async def start(self, facts: HostFacts, card_pids: CardPids | None = None) -> None:
        """Begin; returns at once. Backends load one by one, the first of every model before any second.

        With `card_pids` an engine found on cards that are not its own is replaced.
        """
        await asyncio.to_thread(self._guard.start)
        self._session = aiohttp.ClientSession(
            # llama-server closes connections that were idle for 5 s; ours must be the earlier end.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        shared = Shared(
            session=self._session,
            guard=self._guard,
            gate=asyncio.Lock(),
            flags=FlagProbe(),
            ports=PortPicker(),
            facts=facts,
            hidden_env=self._hidden_env,
            pace=self._pace,
            in_flight=self._in_flight,
            on_change=self._on_change,
            card_pids=card_pids,
        )
        for model, index in load_order(self._models):
            backend = Backend(model, index, self._rules_for(model), self._save_dir(model, index), shared)
            self._backends[backend.id] = backend
        for backend in self._backends.values():
            backend.start()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End all engines: SIGTERM, and SIGKILL after `timeout_s`. None of their processes is left."""
        await asyncio.gather(*(backend.stop(timeout_s) for backend in self._backends.values()))
        if self._session is not None:
            await self._session.close()
            self._session = None
        await asyncio.to_thread(self._guard.close)

    def views(self) -> list[BackendView]:
        return [backend.view() for backend in self._backends.values()]

    def hard_failure(self, backend_id: str, why: str) -> None:
        """The inference path was refused, reset or cut: probe now, and one failed probe is then enough."""
        self._backends[backend_id].feed(ev.HardFailure(why))

    def stalled(self, backend_id: str) -> None:
        """A request got no byte for too long. Two without a success between, and the engine is replaced."""
        self._backends[backend_id].stalled()

    def succeeded(self, backend_id: str) -> None:
        """A request was answered. Cheap."""
        self._backends[backend_id].succeeded()

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
