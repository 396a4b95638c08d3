"""Asking every member once a second what room it has.

Each member has a task of its own with at most one question under way, so a hung member costs one connection
and delays nobody. A failed poll changes nothing: the last report stays and ages, and routing stops using it
when it is stale, long before membership calls the member dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import aiohttp

from viiwork.core.capacity import CapacityReport, PeerReport
from viiwork.core.logline import fault
from viiwork.errors import BadReport
from viiwork.limits import CAPACITY_BODY_KEPT_BYTES, CAPACITY_BODY_MAX_BYTES, PEER_CONNECT_S, RTT_ALPHA
from viiwork.mesh.notices import one_line
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member, MemberEvent
from viiwork.wire.capacity import decode_report

log = logging.getLogger(__name__)

CAPACITY_PATH = "/v1/capacity"
OnReport = Callable[[str, CapacityReport, float, float, float], None]


@dataclass(slots=True)
class _Watch:
    """One polled member; only its own task writes report, rtt_s and failure."""

    member: Member
    kick: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[asyncio.Future[None]] = field(default_factory=list)  # done after the next poll
    asked_at: float = -math.inf  # when the last question was put
    task: asyncio.Task[None] | None = None
    report: PeerReport | None = None
    body: bytes = b""  # what `report` was decoded from; an idle node says the same every second
    rtt_s: float | None = None
    failure: str = ""


class CapacityPoller:
    """Owner of the members' reports. `on_report(name, report, requested_at, received_at, rtt_s)`."""

    def __init__(
        self,
        peer: PeerClient,
        *,
        interval_s: float,
        on_report: OnReport,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer = peer
        self._interval_s = interval_s
        self._on_report = on_report
        self._now = now
        self._watches: dict[str, _Watch] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._timeout = aiohttp.ClientTimeout(total=interval_s, sock_connect=min(PEER_CONNECT_S, interval_s))

    def on_member(self, event: MemberEvent) -> None:
        """Follow membership: poll who joined or changed at once, forget who is gone."""
        match event.kind:
            case "joined" | "updated" | "recovered":
                self._follow(event.member)
            case "dead" | "left":
                self._forget(event.member.name)

    def reports(self) -> dict[str, PeerReport]:
        """Last good report of each polled member, whatever its age."""
        return {name: w.report for name, w in self._watches.items() if w.report is not None}

    async def ask_now(self, within_s: float, older_than_s: float = 0.0) -> None:
        """Poll at once whose last question is so old, and wait for the answers for so long."""
        now = self._now()
        asked: list[asyncio.Future[None]] = []
        for watch in self._watches.values():
            if now - watch.asked_at < older_than_s:
                continue  # requests that nobody knows must not become a flood of polls
            asked.append(asyncio.get_running_loop().create_future())
            watch.asked.append(asked[-1])
            watch.kick.set()
        if asked:
            await asyncio.wait(asked, timeout=within_s)

    def failures(self) -> dict[str, str]:
        """Why the last poll of a member failed, for those where it did."""
        return {name: w.failure for name, w in self._watches.items() if w.failure}

    async def stop(self) -> None:
        for name in list(self._watches):
            self._forget(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _follow(self, member: Member) -> None:
        if member.role != "node":
            self._forget(member.name)
            return
        watch = self._watches.get(member.name)
        if watch is not None and _run(watch.member) != _run(member):
            # Another process, or another place: its numbers and its distance are new.
            self._forget(member.name)
            watch = None
        if watch is None:
            watch = self._watches[member.name] = _Watch(member)
            watch.task = asyncio.create_task(self._poll_on(watch), name=f"poll {member.name}")
        else:
            watch.member = member
            watch.kick.set()

    def _forget(self, name: str) -> None:
        watch = self._watches.pop(name, None)
        if watch is None or watch.task is None:
            return
        watch.task.cancel()
        self._ending.add(watch.task)
        watch.task.add_done_callback(self._ending.discard)

    async def _poll_on(self, watch: _Watch) -> None:
        while True:
            watch.kick.clear()
            asked, watch.asked = watch.asked, []
            started_at = watch.asked_at = self._now()
            try:
                await self._poll(watch)
            except Exception:  # our own bug; the member must not stay unasked for ever
                log.exception("polling %s failed", watch.member.name)
            for waiting in asked:
                if not waiting.done():
                    waiting.set_result(None)
            wait_s = max(self._interval_s - (self._now() - started_at), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await watch.kick.wait()

    async def _poll(self, watch: _Watch) -> None:
        member, requested_at = watch.member, self._now()
        try:
            last = watch.report.report if watch.report is not None else None
            body = await self._fetch(member, last)
            report = last if last is not None and body == watch.body else decode_report(body)
            if report.node != member.name:
                raise BadReport(f"{member.api} answers as {report.node!r}, not {member.name!r}")
            if report.holdings is None and last is not None and report.holdings_rev == last.holdings_rev:
                report = replace(report, holdings=last.holdings)  # not told again, for it did not change
        except (aiohttp.ClientError, OSError, TimeoutError, BadReport) as error:
            failure = "timed out" if isinstance(error, TimeoutError) else one_line(fault(error))
            if failure != watch.failure:
                log.info("capacity of %s: %s", member.name, failure)
            watch.failure = failure
            return
        received_at = self._now()
        rtt_s = received_at - requested_at
        if watch.rtt_s is not None:
            rtt_s = watch.rtt_s + RTT_ALPHA * (rtt_s - watch.rtt_s)
        watch.rtt_s, watch.failure = rtt_s, ""
        watch.body = body if len(body) <= CAPACITY_BODY_KEPT_BYTES else b""
        watch.report = PeerReport(report, requested_at, received_at, rtt_s, member.api)
        try:
            self._on_report(member.name, report, requested_at, received_at, rtt_s)
        except Exception:  # a listener's bug must not end the polling
            log.exception("a listener failed on the report of %s", member.name)

    async def _fetch(self, member: Member, last: CapacityReport | None) -> bytes:
        url = f"http://{member.api}{CAPACITY_PATH}"
        if last is not None and last.holdings is not None:
            url += f"?holdings={last.holdings_rev}"
        async with self._peer.request("GET", url, timeout=self._timeout) as answer:
            if answer.status != 200:
                raise BadReport(f"{member.api} answers {CAPACITY_PATH} with {answer.status}")
            body = bytearray()
            while chunk := await answer.content.readany():
                body += chunk
                if len(body) > CAPACITY_BODY_MAX_BYTES:
                    answer.close()
                    raise BadReport(f"{member.api}: capacity report over {CAPACITY_BODY_MAX_BYTES} bytes")
            return bytes(body)


def _run(member: Member) -> tuple[int, str, int]:
    return member.epoch, member.addr, member.api_port
