"""Drives one backend: feeds its ladder with what happens, does what the ladder answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from viiwork.config.model import ModelSection
from viiwork.core.stalls import IDLE_CPU_SHARE
from viiwork.engine import events as ev
from viiwork.engine.binary import FlagProbe, resolve_binary
from viiwork.engine.command import Command, HostFacts, backend_gpus, llamacpp_command, wrong_cards
from viiwork.engine.events import Event
from viiwork.engine.groups import GroupGuard
from viiwork.engine.ladder import Ladder, Rules
from viiwork.engine.loglines import usage_error
from viiwork.engine.ports import PortPicker, cpu_seconds, family, foreign_listener, tree_rss
from viiwork.engine.process import EngineProcess
from viiwork.engine.savedir import prepare_save_dir
from viiwork.engine.slots import SlotsClient, SlotView
from viiwork.engine.views import BackendView
from viiwork.errors import EngineError, EngineUsageError, KvError
from viiwork.limits import ENGINE_LOAD_STALE_S, ENGINE_PROOF_S, ENGINE_QUICK_EXIT_S, ENGINE_VIEW_LINES
from viiwork.wire.openai import ENGINE_CHOOSES

log = logging.getLogger("viiwork.engine")

LATE_SHARE = 1.5  # of a poll's limit: noticed later than this, it is this process that was held up

# The processes on each card, as the GPU tool shows them; it blocks, and answers None when it cannot tell.
CardPids = Callable[[], Mapping[int, frozenset[int]] | None]


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a backend is looked at."""

    starting_probe_s: float = 0.5
    probe_s: float = 5.0
    probe_timeout_s: float = 10.0
    load_poll_s: float = 1.0
    load_timeout_s: float = 1.0
    proof_s: float = ENGINE_PROOF_S
    rss_s: float = 5.0
    cards_s: float = 5.0
    cards_for_s: float = 60.0  # after it became healthy; later an engine does not change its cards


@dataclass(frozen=True, slots=True)
class Shared:
    """What all backends of a node use together."""

    session: aiohttp.ClientSession
    guard: GroupGuard
    gate: asyncio.Lock  # one backend loads at a time; a lock serves its waiters in their order
    flags: FlagProbe
    ports: PortPicker
    facts: HostFacts
    hidden_env: frozenset[str]
    pace: Pace
    in_flight: Callable[[str], int]
    occupied: Callable[[str], bool]  # a save or restore of kv_share stops the engine now
    on_change: Callable[[BackendView], None]
    before_end: Callable[[str], Awaitable[None]] | None  # a backend has drained; its engine still runs
    card_pids: CardPids | None


class Backend:
    """One engine, through as many processes as it takes. Everything runs on the event loop's thread."""

    def __init__(
        self, model: ModelSection, index: int, rules: Rules, save_dir: Path | None, shared: Shared
    ) -> None:
        self.id = f"{model.name}/{index}"
        self.model = model
        self._index = index
        self._gpus = backend_gpus(model, index)
        self._rules = rules
        self._save_dir = save_dir
        self._shared = shared
        self._ladder = Ladder(rules)
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawning: asyncio.Task[None] | None = None
        self._looking: list[asyncio.Task[None]] = []
        self._probe_wanted = asyncio.Event()
        self._epoch = 0
        self._process: EngineProcess | None = None
        self._url: str | None = None
        self._started_at = 0.0
        self._embedded = False
        self._slots: list[SlotView] = []
        self._slots_at: float | None = None  # None = this process has not told yet
        self._rss: int | None = None
        self._last_lines: tuple[str, ...] = ()
        self._published: tuple[object, ...] = ()
        self._stalled = False  # since the last success
        self._closing = False

    # -- for the supervisor ------------------------------------------------------------------------
    def start(self) -> None:
        self._go(self._run())

    async def retire(self) -> None:
        """Take no more requests, let those in flight end within the grace, then stop."""
        self._ladder.retire()
        self.feed(ev.Tick())  # whoever waits for it to load need not any more
        self._publish()
        until = time.monotonic() + self._rules.respawn_grace_s
        await drained(self.id, self._shared.in_flight, self._rules)
        if self._shared.before_end is not None and self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
                    await self._shared.before_end(self.id)
        await self.stop(self._rules.stop_grace_s)

    async def stop(self, timeout_s: float) -> None:
        """End the engine, then everything here. Idempotent."""
        self._closing = True
        self._ladder.stop()
        if self._spawning is not None:
            await asyncio.wait([self._spawning], timeout=timeout_s)
        if self._process is not None:
            await self._process.stop(timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._process = self._url = None
        self._publish()

    def feed(self, event: Event) -> None:
        """Tell the ladder; it hears in order, on the next turn of the loop."""
        self._events.put_nowait((self._epoch, event))

    def hard_failure(self, why: str) -> None:
        self.feed(ev.HardFailure(why))

    def stalled(self) -> None:
        self._stalled = True
        self.feed(ev.Stalled())

    def succeeded(self) -> None:
        """On the path of every request, so the ladder only hears what can matter to it."""
        if self._stalled:
            self._stalled = False
            self.feed(ev.Succeeded())

    def view(self) -> BackendView:
        now = time.monotonic()
        process = self._process
        told_at = self._slots_at
        fresh = process is not None and told_at is not None and now - told_at <= ENGINE_LOAD_STALE_S
        busy = [slot for slot in self._slots if slot.is_processing] if fresh else []
        decoded = [slot.n_decoded for slot in busy if slot.n_decoded is not None]
        remain = [slot.n_remain for slot in busy if slot.n_remain is not None]
        lines = process.newest_lines(ENGINE_VIEW_LINES) if process else self._last_lines
        return BackendView(
            id=self.id,
            model=self.model.name,
            status=self._ladder.status,
            phase=self._ladder.phase,
            pid=process.pid if process else None,
            url=self._url if process else None,
            epoch=self._epoch,
            n_slots=len(self._slots) or self.model.parallel,
            ctx=min((slot.n_ctx for slot in self._slots), default=self.model.context),
            busy=len(busy) if fresh else None,
            tok_decoded=sum(decoded) if decoded else None,
            tok_remain=sum(remain) if remain else None,
            gpus=self._gpus,
            rss_bytes=self._rss if process else None,
            respawns=self._ladder.respawns,
            uptime_s=now - self._started_at if process else 0.0,
            last_lines=lines,
            reason=self._ladder.reason,
            save_dir=self._save_dir,
            embedded=self._embedded,
        )

    # -- the ladder's driver -----------------------------------------------------------------------
    async def _run(self) -> None:
        """Wait for the gate, keep it while the first load lasts, then serve the ladder for ever."""
        async with self._shared.gate:
            self.feed(ev.GateOpened())
            await self._step()
            while self._ladder.status == "starting":
                await self._step()
        while True:
            await self._step()

    async def _step(self) -> None:
        epoch, event = await self._next_event()
        if epoch != self._epoch and not isinstance(event, ev.Tick):
            return  # news about a process that is gone
        before = self._ladder.status
        for effect in self._ladder.on(event, time.monotonic(), self._shared.in_flight(self.id)):
            self._perform(effect)
        if self._ladder.status != before:
            level = logging.INFO if self._ladder.status in ("starting", "healthy") else logging.WARNING
            log.log(level, "[%s] %s%s", self.id, self._ladder.status, _because(self._ladder.reason))
        self._publish()

    async def _next_event(self) -> tuple[int, Event]:
        now = time.monotonic()
        due = self._ladder.next_tick(now)
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                return await self._events.get()
        except TimeoutError:
            return self._epoch, ev.Tick()

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Spawn():
                self._epoch += 1
                self._slots, self._slots_at, self._rss = [], None, None
                self._spawning = self._go(self._spawn(self._epoch))
            case ev.WarmUp():
                self._go(self._warm_up(self._epoch))
            case ev.Prove():
                self._go(self._prove(self._epoch))
            case ev.ProbeNow():
                self._probe_wanted.set()
            case ev.Stop(grace_s):
                self._go(self._stop_process(grace_s))

    # -- effects -----------------------------------------------------------------------------------
    async def _spawn(self, epoch: int) -> None:
        try:
            command, port = await self._command()
            if self._closing:
                return
            process = await EngineProcess.spawn(command, self.id, self._shared.guard)
        except EngineError as error:
            self._tell(epoch, ev.SpawnFailed(str(error), isinstance(error, EngineUsageError)))
            return
        except OSError as error:
            self._tell(epoch, ev.SpawnFailed(f"cannot start a process: {error.strerror}", False))
            return
        self._process, self._url = process, f"http://127.0.0.1:{port}"
        self._started_at = time.monotonic()
        self._looking = [
            self._go(self._probe_loop(process, epoch, self._url)),
            self._go(self._load_loop(process, epoch)),
            self._go(self._rss_loop(process)),
            self._go(self._cards_loop(process, epoch)),
        ]
        log.info("[%s] process %d on port %d", self.id, process.pid, port)
        self._go(self._watch(process, epoch))
        self._publish()

    async def _command(self) -> tuple[Command, int]:
        shared = self._shared
        binary = resolve_binary(self.model.llamacpp.binary)
        self._embedded = binary.embedded
        flags = await shared.flags.flags(binary)
        if self._save_dir is not None:
            await asyncio.to_thread(prepare_save_dir, self._save_dir)
        port = shared.ports.pick()
        command = llamacpp_command(
            self.model,
            self._index,
            port,
            program=binary.program,
            flags=flags,
            facts=shared.facts,
            node_env=os.environ,
            hidden_env=shared.hidden_env,
            save_dir=self._save_dir,
        )
        return command, port

    async def _watch(self, process: EngineProcess, epoch: int) -> None:
        code = await process.wait()
        for task in self._looking:
            task.cancel()  # a probe of what is gone would hold up the next one for its whole timeout
        lines = process.newest_lines(ENGINE_VIEW_LINES)
        quick = time.monotonic() - self._started_at < ENGINE_QUICK_EXIT_S
        self._last_lines = lines
        self._process = self._url = None
        self._tell(
            epoch, ev.Exited(_exit_text(code, lines, quick), usage_error(code, lines) if quick else "")
        )

    async def _stop_process(self, grace_s: float) -> None:
        if self._spawning is not None:
            await asyncio.wait([self._spawning])
        if self._process is not None:
            await self._process.stop(grace_s)

    async def _warm_up(self, epoch: int) -> None:
        """One token in each slot, so that /slots tells what they hold. The startup timeout bounds it."""
        try:
            client = self._client(len(self._slots))
            for slot in self._slots:
                await client.warm_up(slot.id, self._rules.startup_timeout_s)
            self._take_slots(await client.slots(self._shared.pace.probe_timeout_s))
        except (EngineError, KvError) as error:
            self._tell(epoch, ev.WarmUpFailed(str(error)))
            return
        self._tell(epoch, ev.WarmedUp())

    async def _prove(self, epoch: int) -> None:
        """One token, in whichever idle slot the engine takes."""
        try:
            await self._client(0).run_one_token(ENGINE_CHOOSES, self._shared.pace.proof_s)
        except EngineError as error:
            self._tell(epoch, ev.ProofFailed(str(error)))
            return
        self._tell(epoch, ev.Proved())

    # -- looking at it, as long as one process lives ------------------------------------------------
    async def _probe_loop(self, process: EngineProcess, epoch: int, url: str) -> None:
        pace = self._shared.pace
        while True:
            starting = self._ladder.status == "starting"
            self._probe_wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pace.starting_probe_s if starting else pace.probe_s):
                    await self._probe_wanted.wait()
            if self._ladder.status in ("healthy", "unhealthy"):
                self._tell(epoch, await self._probe_serving())
            elif self._ladder.phase == "loading":
                event = await self._probe_starting(process, int(url.rpartition(":")[2]))
                if event is not None:
                    self._tell(epoch, event)

    async def _probe_serving(self) -> Event:
        health = await self._client(0).health(self._shared.pace.probe_timeout_s)
        return ev.ProbeOk() if health.state == "ready" else ev.ProbeFailed(health.said)

    async def _probe_starting(self, process: EngineProcess, port: int) -> Event | None:
        """None while it loads. Whoever answers must be our process and talk like an engine."""
        timeout_s = self._shared.pace.probe_timeout_s
        health = await self._client(0).health(timeout_s)
        if health.state == "unreachable":
            return None
        who = await asyncio.to_thread(foreign_listener, port, process.pid)
        if who:
            return ev.ForeignAnswered(who)
        if health.state != "ready":
            return None
        try:
            slots = await self._client(0).slots(timeout_s)
        except EngineError as error:
            log.warning("[%s] answers /health, but %s", self.id, error)
            return None
        self._take_slots(slots)
        return ev.Answered()

    async def _load_loop(self, process: EngineProcess, epoch: int) -> None:
        pace = self._shared.pace
        while True:
            await asyncio.sleep(pace.load_poll_s)
            if self._ladder.status in ("healthy", "unhealthy"):
                await self._poll_load(process.pid, epoch)
            self._publish()

    async def _poll_load(self, pid: int, epoch: int) -> None:
        """Ask what the slots do. When that fails the last answer ages, until occupancy is unknown.

        An engine answers within milliseconds, also while it reads a prompt. Silence means that it is stopped
        or hangs, unless kv_share lets it save or restore, it works all the same, or this process was late.
        """
        limit_s = self._shared.pace.load_timeout_s
        asked_at, cpu_before = time.monotonic(), cpu_seconds(pid)
        try:
            self._take_slots(await self._client(0).slots(limit_s))
        except EngineError as error:
            if not isinstance(error.__cause__, TimeoutError):
                return
            took_s, cpu_after = time.monotonic() - asked_at, cpu_seconds(pid)
            if cpu_before is None or cpu_after is None or self._shared.occupied(self.id):
                return
            works = cpu_after - cpu_before > IDLE_CPU_SHARE * took_s
            if not works and took_s < LATE_SHARE * limit_s:
                self._tell(epoch, ev.Silent(str(error)))
            return
        self._tell(epoch, ev.Heard())

    async def _cards_loop(self, process: EngineProcess, epoch: int) -> None:
        """Compare the cards the engine is on with its own, until that could be told once."""
        pace, card_pids = self._shared.pace, self._shared.card_pids
        checks_left = int(pace.cards_for_s / pace.cards_s)
        while card_pids is not None and checks_left > 0:
            await asyncio.sleep(pace.cards_s)
            if self._ladder.status != "healthy":
                continue
            checks_left -= 1
            found = await asyncio.to_thread(card_pids)
            pids = await asyncio.to_thread(family, process.pid)
            why = wrong_cards(self._gpus, pids, found or {})
            if why:
                self._tell(epoch, ev.WrongCards(why))
            if why is not None:
                return

    async def _rss_loop(self, process: EngineProcess) -> None:
        while True:
            self._rss = await asyncio.to_thread(tree_rss, process.pid)
            await asyncio.sleep(self._shared.pace.rss_s)

    def _take_slots(self, slots: list[SlotView]) -> None:
        self._slots, self._slots_at = slots, time.monotonic()

    # -- small things ------------------------------------------------------------------------------
    def _client(self, n_slots: int) -> SlotsClient:
        return SlotsClient(self._url or "http://127.0.0.1:0", self._shared.session, n_slots)

    def _tell(self, epoch: int, event: Event) -> None:
        self._events.put_nowait((epoch, event))

    def _publish(self) -> None:
        """Call `on_change` when something changed that others act upon."""
        view = self.view()
        facts = (
            view.status,
            view.phase,
            view.pid,
            view.url,
            view.epoch,
            view.n_slots,
            view.ctx,
            view.busy,
            view.reason,
        )
        if facts != self._published:
            self._published = facts
            self._shared.on_change(view)

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("[%s] a task of its supervision failed", self.id, exc_info=error)


async def drained(backend: str, in_flight: Callable[[str], int], rules: Rules) -> None:
    """Wait until nothing runs on a backend that takes no more, at most for the grace."""
    until = time.monotonic() + rules.respawn_grace_s
    while in_flight(backend) and time.monotonic() < until:
        await asyncio.sleep(rules.drain_check_s)


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _exit_text(code: int, lines: tuple[str, ...], while_starting: bool) -> str:
    """How it ended and why: the cause is the first error of a failed start, the last of a long life."""
    how = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
    errors = [line for line in lines if "error" in line.lower() or " E " in line] or list(lines[-1:])
    if not errors:
        return how
    return f"{how}: {errors[0 if while_starting else -1].strip()[:300]}"
