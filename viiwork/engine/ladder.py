"""When a backend is routable, given up, started again, left alone: one state machine, no I/O, no clock.

    starting --warmed up--> healthy <--probe ok / failed probe--> unhealthy
       |                       |                                     |
       +--- exit, timeout -----+--- exit, strikes, stalls, hard -----+
                               v
                            respawn  (drain, stop, wait)  --budget spent-->  dead
                               |                                              |
                               +--> starting                 after a while <--+   (never for a usage error)

While starting, failed probes do not count: only the startup timeout or an exit ends it. Three things make a
healthy backend unroutable at once, each until its opposite is seen: a failed probe (a good one), silence
towards a load poll (an answer), a lost request (one token run). While it is silent or under proof a good
probe counts for nothing: `/health` is answered by threads that outlive the one that computes. Giving up waits
for requests in flight, up to `respawn_grace_s`, unless the engine stands still. Respawns are spaced 1, 2, 4
... s; ten minutes of health give the budget back. A backend that used its budget up is dead, and is tried
again after 1, 2, 4 ... 10 minutes, because what broke it (a card, a disk, memory) may be gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from viiwork.engine.events import (
    Answered,
    Effect,
    Event,
    Exited,
    ForeignAnswered,
    GateOpened,
    HardFailure,
    Heard,
    ProbeFailed,
    ProbeNow,
    ProbeOk,
    ProofFailed,
    Prove,
    Proved,
    Silent,
    Spawn,
    SpawnFailed,
    Stalled,
    Stop,
    Succeeded,
    Tick,
    WarmedUp,
    WarmUp,
    WarmUpFailed,
    WrongCards,
)
from viiwork.limits import (
    ENGINE_BUDGET_REFILL_S,
    ENGINE_QUICK_EXIT_S,
    ENGINE_STALLS_MAX,
    ENGINE_STARTUP_TIMEOUT_S,
    ENGINE_STOP_GRACE_S,
)

Status = Literal["starting", "healthy", "unhealthy", "respawn", "dead", "draining", "stopped"]
SILENT, PROVING = "silent", "proving"  # phases of an unhealthy backend


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers of one backend's ladder."""

    startup_timeout_s: float = ENGINE_STARTUP_TIMEOUT_S
    max_failures: int = 3
    max_respawns: int = 3
    respawn_grace_s: float = 60.0
    stop_grace_s: float = ENGINE_STOP_GRACE_S
    drain_check_s: float = 0.25
    backoff_first_s: float = 1.0
    backoff_max_s: float = 30.0
    dead_retry_first_s: float = 60.0
    dead_retry_max_s: float = 600.0


class Ladder:
    """Sole owner of a backend's status. `on` takes an event and answers with what to do."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.status: Status = "starting"
        self.phase = "queued"
        self.reason = ""
        self.respawns = 0  # of the budget
        self.healthy_since: float | None = None
        self._failures = 0
        self._stalls = 0
        self._silent = False  # it did not answer the last load poll
        self._proving = False  # it lost a request and has not run a token since
        self._suspect = False  # a hard failure waits for its probe
        self._port_retry_left = True
        self._launched_at = 0.0
        self._leaving = False  # given up, the process is still there
        self._moving = False  # only the port is wrong
        self._drain_until: float | None = None
        self._retry_at: float | None = None  # when respawn or dead becomes starting
        self._deaths = 0

    @property
    def is_loading(self) -> bool:
        return self.status == "starting" and self.phase != "queued"

    @property
    def _can_lose_requests(self) -> bool:
        """What is lost while it is silent or under proof already belongs to the same fault."""
        return self.status in ("healthy", "unhealthy") and not self._silent and not self._proving

    def next_tick(self, now: float) -> float | None:
        """When `Tick` is wanted; None = only events matter."""
        if self._drain_until is not None:
            return min(self._drain_until, now + self._rules.drain_check_s)
        if self._leaving:
            return None
        if self.is_loading:
            return self._launched_at + self._rules.startup_timeout_s
        if self.status == "healthy" and self.respawns and self.healthy_since is not None:
            return self.healthy_since + ENGINE_BUDGET_REFILL_S
        return self._retry_at

    def retire(self) -> None:
        """The backend is wanted no more: it takes no requests, and `stop` follows."""
        self.status, self.phase, self.healthy_since = "draining", "", None
        self._drain_until = self._retry_at = None

    def stop(self) -> None:
        """Nothing follows."""
        self.status, self.phase, self.healthy_since = "stopped", "", None
        self._drain_until = self._retry_at = None

    def on(self, event: Event, now: float, in_flight: int = 0) -> list[Effect]:
        """What to do about `event`; `in_flight` requests are running in the backend."""
        if self.status in ("draining", "stopped"):
            return []
        match event:
            case GateOpened() if self.status == "starting" and self.phase == "queued":
                return self._spawn(now)
            case SpawnFailed(why, is_usage):
                return self._die(why) if is_usage else self._start_again(why, now)
            case Exited(why, usage):
                return self._after_exit(why, usage, now)
            case Tick():
                return self._tick(now, in_flight)
            case _ if self._leaving:
                return []  # news about a process that is being ended anyway
            case Answered() if self.phase == "loading":
                self.phase = "warming up"
                return [WarmUp()]
            case ForeignAnswered(who) if self.phase == "loading":
                return self._leave_port(who)
            case WarmedUp() if self.is_loading:
                self._become_healthy(now)
            case WarmUpFailed(why) if self.is_loading:
                return self._give_up(why, now, 0)
            case ProbeOk():
                self._suspect = False
                if self._silent and self.status == "unhealthy":
                    return self._strike("/health is answered and /slots is not", now, in_flight)
                self._failures = 0
                self._recover(now)
            case ProbeFailed(why) if self.status in ("healthy", "unhealthy"):
                return self._strike(why, now, in_flight)
            case HardFailure(why) if self.status in ("healthy", "unhealthy"):
                self._suspect = True
                return [ProbeNow()]
            case Silent(why) if self.status in ("healthy", "unhealthy"):
                self._silent = True
                self._leave_routing(SILENT, why)
            case Heard() if self._silent:
                self._silent, self._failures = False, 0
                self._recover(now)
            case Stalled() if self._can_lose_requests:
                return self._lost_a_request(now)
            case Proved() if self._proving:
                self._proving = False
                self._recover(now)
            case ProofFailed(why) if self._proving:
                # Nobody waits for what is in flight: it stands still as well.
                return self._give_up(f"it lost a request, and then: {why}", now, 0)
            case WrongCards(why) if self.status in ("healthy", "unhealthy"):
                return self._give_up(why, now, in_flight)
            case Succeeded():
                self._stalls = 0
                self._proving = False
                self._recover(now)
            case _:
                pass
        return []

    # -- steps -------------------------------------------------------------------------------------
    def _spawn(self, now: float) -> list[Effect]:
        self.status, self.phase = "starting", "loading"
        self._launched_at = now
        self._failures = self._stalls = 0
        self._silent = self._proving = False
        self._suspect = self._leaving = self._moving = False
        self._drain_until = self._retry_at = None
        return [Spawn()]

    def _become_healthy(self, now: float) -> None:
        self.status, self.phase, self.reason = "healthy", "", ""
        self.healthy_since = now
        self._failures = 0
        self._port_retry_left = True

    def _recover(self, now: float) -> None:
        """Back to routing, once nothing speaks against it any more."""
        if self.status != "unhealthy":
            return
        if self._failures == 0 and not self._silent and not self._proving:
            self._become_healthy(now)
        else:
            self.phase = SILENT if self._silent else PROVING if self._proving else ""

    def _leave_routing(self, phase: str, why: str) -> None:
        self.status, self.phase, self.reason, self.healthy_since = "unhealthy", phase, why, None

    def _lost_a_request(self, now: float) -> list[Effect]:
        self._stalls += 1
        if self._stalls >= ENGINE_STALLS_MAX:
            return self._give_up(f"{self._stalls} requests in a row got no answer", now, 0)
        self._proving = True
        self._leave_routing(PROVING, "it took a request and did not begin it")
        return [Prove()]

    def _strike(self, why: str, now: float, in_flight: int) -> list[Effect]:
        self._failures += 1
        self._leave_routing(SILENT if self._silent else PROVING if self._proving else "", why)
        if self._silent:
            in_flight = 0  # nobody waits for what stands still as well
        if self._suspect:
            return self._give_up(f"it broke connections, and then: {why}", now, in_flight)
        if self._failures >= self._rules.max_failures:
            return self._give_up(f"{self._failures} probes failed: {why}", now, in_flight)
        return []

    def _give_up(self, why: str, now: float, in_flight: int) -> list[Effect]:
        self.status, self.phase, self.reason, self.healthy_since = "respawn", "", why, None
        self._leaving = True
        if in_flight and self._rules.respawn_grace_s > 0:
            self._drain_until = now + self._rules.respawn_grace_s
            return []
        return [Stop(self._rules.stop_grace_s)]

    def _leave_port(self, who: str) -> list[Effect]:
        self.reason = f"its port is answered by {who}"
        self._leaving = True
        if self._port_retry_left:
            self._port_retry_left = False
            self._moving = True
        return [Stop(0.0)]

    def _after_exit(self, why: str, usage: str, now: float) -> list[Effect]:
        if self._leaving:
            return self._spawn(now) if self._moving else self._start_again(self.reason, now)
        if self.is_loading:
            if usage:
                return self._die(usage)
            if self._port_retry_left and now - self._launched_at < ENGINE_QUICK_EXIT_S:
                self._port_retry_left = False
                self.reason = why
                return self._spawn(now)
        return self._start_again(why, now)

    def _start_again(self, why: str, now: float) -> list[Effect]:
        """Spend a respawn, or be dead for a while."""
        self.phase, self.reason, self.healthy_since = "", why, None
        self._leaving = self._moving = False
        self._drain_until = None
        self._port_retry_left = True
        rules = self._rules
        if self.respawns < rules.max_respawns:
            self.status = "respawn"
            self._retry_at = now + min(rules.backoff_first_s * 2**self.respawns, rules.backoff_max_s)
            self.respawns += 1
        else:
            self.status = "dead"
            # The exponent is bounded: a backend may stay dead for years.
            self._retry_at = now + min(
                rules.dead_retry_first_s * 2 ** min(self._deaths, 16), rules.dead_retry_max_s
            )
            self._deaths += 1
            # One try without a free retry: whatever ends it puts the backend back here.
            self._port_retry_left = False
        return []

    def _die(self, why: str) -> list[Effect]:
        self.status, self.phase, self.reason, self.healthy_since = "dead", "", why, None
        self._leaving = False
        self._retry_at = None
        return []

    def _tick(self, now: float, in_flight: int) -> list[Effect]:
        if self._drain_until is not None:
            if in_flight and now < self._drain_until:
                return []
            self._drain_until = None
            return [Stop(self._rules.stop_grace_s)]
        if self._leaving:
            return []
        if self.is_loading and now >= self._launched_at + self._rules.startup_timeout_s:
            return self._give_up(f"not ready within {self._rules.startup_timeout_s:g} s", now, 0)
        if self.status == "healthy" and self.healthy_since is not None:
            if now >= self.healthy_since + ENGINE_BUDGET_REFILL_S:
                self.respawns = self._deaths = 0
        elif self._retry_at is not None and now >= self._retry_at:
            return self._spawn(now)
        return []
