"""The whole mesh in one picture: every member and, while somebody looks, its own status.

Statuses are only asked for while somebody looks: in a mesh of 32 nodes that are six answers a second from
each node, which nobody should pay for who has no dashboard open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from viiwork.errors import BadReport
from viiwork.limits import (
    CLUSTER_WATCHED_S,
    STATUS_BODY_MAX_BYTES,
    STATUS_KEPT_S,
    STATUS_POLL_S,
    STATUS_POLLS_AT_ONCE,
    STATUS_TIMEOUT_S,
    STATUSES_MAX_BYTES,
)
from viiwork.mesh.notices import one_line
from viiwork.mesh.peer import PeerClient, body_of
from viiwork.mesh.values import Member

log = logging.getLogger(__name__)

STATUS_PATH = "/v1/status"
_TIMEOUT = aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S)


class _Names(msgspec.Struct):
    node: str
    node_id: str = ""


_names = msgspec.json.Decoder(_Names).decode


@dataclass(frozen=True, slots=True)
class _Status:
    body: msgspec.Raw
    node_id: str
    received_at: float


class Cluster:
    """Owner of the members' statuses."""

    def __init__(
        self,
        name: str,
        client: PeerClient,
        *,
        members: Callable[[], Sequence[Member]],
        own_status: Callable[[], dict[str, Any]],
        own_api: Callable[[], str],
        models: Callable[[], list[dict[str, Any]]],
        secured: bool,
        poll_s: float = STATUS_POLL_S,
        watched_s: float = CLUSTER_WATCHED_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._client = client
        self._members = members
        self._own_status = own_status
        self._own_api = own_api
        self._models = models
        self._mode = "secured" if secured else "open"
        self._poll_s = poll_s
        self._watched_s = watched_s
        self._now = now
        self._statuses: dict[str, _Status] = {}
        self._asked_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._first_round = asyncio.Event()

    async def current(self) -> bytes:
        """Body of `/v1/cluster`; the first question for a while waits for the members' answers."""
        self.watch()
        await self._first_round.wait()
        return self.picture(self._own_status())

    def watch(self) -> None:
        """Somebody looks: keep asking for a while."""
        self._asked_at = self._now()
        if self._task is None:
            self._first_round.clear()
            self._task = asyncio.create_task(self._poll_on(), name="cluster")
            self._task.add_done_callback(self._ended)

    def picture(self, own: Any) -> bytes:
        """The mesh as it is known now; `own` is this node's status."""
        now = self._now()
        shown = [_shown(self._name, self._own_api(), "node", "alive", own)]
        for member in self._members():
            status = self._statuses.get(member.name) if member.is_present else None
            fresh = status is not None and now - status.received_at < STATUS_KEPT_S
            state = "alive" if member.is_present else member.state
            body = status.body if status is not None and fresh else None
            shown.append(_shown(member.name, member.api, member.role, state, body))
        shown.sort(key=lambda one: one["node"])
        return msgspec.json.encode(
            {
                "view": self._name,
                "mesh": self._mode,
                "members": shown,
                "models": [model["id"] for model in self._models()],
            }
        )

    def node_id(self, name: str) -> str:
        """A member's id of its present run, "" when it is not known."""
        status = self._statuses.get(name)
        return status.node_id if status is not None else ""

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _poll_on(self) -> None:
        limit = asyncio.Semaphore(STATUS_POLLS_AT_ONCE)
        try:
            while self._now() - self._asked_at < self._watched_s:
                present = [member for member in self._members() if member.is_present]
                names = {member.name for member in present}
                self._statuses = {name: s for name, s in self._statuses.items() if name in names}
                await asyncio.gather(*(self._poll(member, limit) for member in present))
                self._first_round.set()
                await asyncio.sleep(self._poll_s)
        finally:
            self._first_round.set()
            self._statuses = {}
            self._task = None

    async def _poll(self, member: Member, limit: asyncio.Semaphore) -> None:
        try:
            async with limit:
                body = await self._fetch(member)
            body.decode()  # the decoder does not look into strings it skips
            names = _names(body)
        except (aiohttp.ClientError, OSError, TimeoutError, BadReport, ValueError, RecursionError) as error:
            log.debug("status of %s: %s", member.name, one_line(str(error) or type(error).__name__))
            return
        others = sum(len(s.body) for name, s in self._statuses.items() if name != member.name)
        if names.node != member.name or others + len(body) > STATUSES_MAX_BYTES:
            self._statuses.pop(member.name, None)
            return
        node_id = one_line(names.node_id)[:64]
        self._statuses[member.name] = _Status(msgspec.Raw(body), node_id, self._now())

    async def _fetch(self, member: Member) -> bytes:
        url = f"http://{member.api}{STATUS_PATH}"
        async with self._client.request("GET", url, timeout=_TIMEOUT) as answer:
            return await body_of(answer, f"{member.api}{STATUS_PATH}", STATUS_BODY_MAX_BYTES)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cluster.failed", exc_info=error)


def _shown(node: str, addr: str, role: str, state: str, status: Any) -> dict[str, Any]:
    return {"node": node, "addr": addr, "role": role, "state": state, "status": status}
