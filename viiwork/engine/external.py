"""One server that somebody else runs: asked whether it serves, never started, stopped or restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from viiwork.config.model import ModelSection
from viiwork.core.logline import fault
from viiwork.engine.backend import drained
from viiwork.engine.ladder import Rules
from viiwork.engine.loglines import escape
from viiwork.engine.views import BackendView
from viiwork.errors import EngineError
from viiwork.limits import ENGINE_ANSWER_MAX_BYTES, ENGINE_LOAD_STALE_S, EXTERNAL_MODELS_MAX

log = logging.getLogger("viiwork.engine")

HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"
_RUNNING = re.compile(rb"^vllm:num_requests_running(?:\{[^\n]*\})? +([0-9.eE+-]+) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ExternalPace:
    """How often a server is looked at."""

    idle_s: float  # between two probes while nothing runs there
    busy_s: float
    probe_s: float  # for one answer


class _Listed(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Listed]


class ExternalBackend:
    """Has the face of a `Backend`. Routable while it answers 200, whatever it was before."""

    def __init__(
        self,
        model: ModelSection,
        api_key: str,
        session: aiohttp.ClientSession,
        in_flight: Callable[[str], int],
        on_change: Callable[[BackendView], None],
        rules: Rules,
        pace: ExternalPace,
    ) -> None:
        self.id = f"{model.name}/0"
        self.model = model
        self._base = base_url(model.url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = session
        self._in_flight = in_flight
        self._on_change = on_change
        self._rules = rules
        self._pace = pace
        self._status, self._reason = "starting", ""
        self._health_path = model.health or HEALTH_PATH
        self._ctx = model.context
        self._checked = False  # its list of models was looked at
        self._tells_busy = False
        self._busy: tuple[int, float] | None = None  # and when that was told
        self._healthy_since: float | None = None
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._published: BackendView | None = None

    # -- for the supervisor ------------------------------------------------------------------------
    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._look())
        self._task.add_done_callback(self._ended)
        self._publish()

    async def retire(self) -> None:
        """Take no more requests, and let those in flight end within the grace."""
        if self._task is not None:
            self._task.cancel()
        self._status, self._reason = "draining", ""
        self._publish()
        await drained(self.id, self._in_flight, self._rules)
        await self.stop(0.0)

    async def stop(self, timeout_s: float) -> None:
        """Look no more; the server goes on. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._status = "stopped"
        self._publish()

    def hard_failure(self, why: str) -> None:
        """The inference path was refused, reset or cut: look now."""
        self._wanted.set()

    def stalled(self) -> None:
        self._wanted.set()

    def succeeded(self) -> None:
        """Nothing to learn: only its own answer to a probe makes it routable."""

    def view(self) -> BackendView:
        now = time.monotonic()
        fresh = self._busy is not None and now - self._busy[1] <= ENGINE_LOAD_STALE_S
        return BackendView(
            id=self.id,
            model=self.model.name,
            status=self._status,
            phase="waiting" if self._status == "starting" else "",
            pid=None,
            url=self._base,
            epoch=1,
            n_slots=self.model.parallel,
            ctx=self._ctx,
            busy=self._busy[0] if fresh and self._busy is not None else None,
            tok_decoded=None,
            tok_remain=None,
            gpus=(),
            rss_bytes=None,
            respawns=0,
            uptime_s=0.0 if self._healthy_since is None else now - self._healthy_since,
            last_lines=(),
            reason=self._reason,
            save_dir=None,
            embedded=False,
        )

    # -- looking at it -----------------------------------------------------------------------------
    async def _look(self) -> None:
        while True:
            self._wanted.clear()
            why = await self._ask_health()
            self._tell("unhealthy" if why else "healthy", why)
            if not why:
                await self._learn()
            self._publish()
            busy = self._tells_busy or self._in_flight(self.id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.busy_s if busy else self._pace.idle_s):
                    await self._wanted.wait()

    async def _ask_health(self) -> str:
        """Why it does not serve, "" when it does."""
        try:
            status, _ = await self._get(self._health_path)
            if status in (404, 405) and not self.model.health and self._health_path == HEALTH_PATH:
                status, _ = await self._get(MODELS_PATH)
                if status == 200:
                    self._health_path = MODELS_PATH  # it has no other: asked there from now on
        except EngineError as error:
            return str(error)
        return "" if status == 200 else f"{self._health_path} answered {status}"

    def _tell(self, status: str, why: str) -> None:
        if self._status == "starting" and why:
            status = "starting"  # it has not been there yet
        changed = (status, why) != (self._status, self._reason)
        self._status, self._reason = status, why
        if status == "healthy":
            self._healthy_since = self._healthy_since or time.monotonic()
        else:
            self._healthy_since = None
        if changed:
            level = logging.INFO if status == "healthy" else logging.WARNING
            log.log(level, "[%s] %s%s", self.id, status, f": {why}" if why else "")

    async def _learn(self) -> None:
        """What it serves, once; how many requests run there, as long as it says so."""
        try:
            if not self._checked:
                self._checked = True
                await self._check_models()
                self._tells_busy = True
            if self._tells_busy:
                status, body = await self._get("/metrics")
                running = running_requests(body) if status == 200 else None
                self._tells_busy = running is not None
                self._busy = None if running is None else (running, time.monotonic())
        except EngineError as error:  # it ages; unknown is not zero
            log.debug("[%s] %s", self.id, error)

    async def _check_models(self) -> None:
        status, body = await self._get(MODELS_PATH)
        try:
            listed = msgspec.json.decode(body, type=_Models).data[:EXTERNAL_MODELS_MAX]
        except msgspec.MsgspecError:
            listed = []
        if status != 200 or not listed:
            return
        wanted = self.model.model or self.model.name
        found = next((entry for entry in listed if entry.id == wanted), None)
        if found is None:
            names = ", ".join(escape(entry.id[:80]) for entry in listed[:5])
            more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
            log.warning("backend.model_not_listed %s: %s lists %s%s", wanted, self._base, names, more)
        elif not self.model.context and found.max_model_len and found.max_model_len > 0:
            self._ctx = found.max_model_len

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises `EngineError` when no answer of bounded size came in time."""
        timeout = aiohttp.ClientTimeout(total=self._pace.probe_s)
        try:
            async with self._session.get(
                self._base + path, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                body = await response.content.read(ENGINE_ANSWER_MAX_BYTES)
                while not response.content.at_eof() and len(body) < ENGINE_ANSWER_MAX_BYTES:
                    body += await response.content.read(ENGINE_ANSWER_MAX_BYTES - len(body))
                return response.status, body
        except TimeoutError as error:
            raise EngineError(f"{path}: no answer within {self._pace.probe_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{path}: {escape(fault(error))[:200]}") from error

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("[%s] looking at it failed", self.id, exc_info=error)

    def _publish(self) -> None:
        view = replace(self.view(), uptime_s=0.0)
        if view != self._published:
            self._published = view
            self._on_change(view)


def base_url(url: str) -> str:
    """`models[].url` as a base of paths; the `/v1` that clients are given with it belongs to the path."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def running_requests(metrics: bytes) -> int | None:
    """How many requests vLLM runs, by its metrics; None when they do not say."""
    try:
        found = [float(value) for value in _RUNNING.findall(metrics)]
        return int(sum(found)) if found else None
    except (ValueError, OverflowError):
        return None
