"""The answering side of a pull: a peer asks for a session's state because its next turn runs there."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from viiwork.config.model import KvShareSection
from viiwork.core.replicas import Replica, ReplicaTable, path_allowed
from viiwork.core.sessions import Binding, SessionKey
from viiwork.errors import KvError, KvRefused, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SendDone
from viiwork.limits import KV_PULL_MAX_S, KV_PULLS_AT_ONCE, KV_PULLS_PER_PEER
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.values import Member
from viiwork.node.background import remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_save import Saved
from viiwork.node.kv_send import Sender
from viiwork.node.kv_stats import reason_of
from viiwork.node.kv_targets import KvPeers
from viiwork.wire.kvpull import PullAsk, PullDone, decode_ask, encode

log = logging.getLogger(__name__)


class Pushes(Protocol):
    """See `node.kv_push.Pusher.push_now`."""

    async def push_now(self, key: SessionKey, node: str, reason: str) -> SendDone: ...


class PullServer:
    """Implements `api.ports.Pulls`."""

    def __init__(
        self,
        config: KvShareSection,
        peers: KvPeers,
        origins: MeshOrigins,
        dispatcher: Dispatcher,
        replicas: ReplicaTable,
        layouts: EngineLayouts,
        worker: KvWorker,
        sender: Sender,
        pushes: Pushes,
    ) -> None:
        self._config = config
        self._peers = peers
        self._origins = origins
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._layouts = layouts
        self._worker = worker
        self._sender = sender
        self._pushes = pushes
        self._running: Counter[str] = Counter()  # by peer
        self._served = 0
        self._failed: Counter[str] = Counter()

    async def pulled(self, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str) -> bytes:
        """See `api.ports.Pulls.pulled`; the asker is proven before its question is read."""
        name = self._origins.sent_by("POST", path_qs, headers, body, remote_ip)
        ask = decode_ask(body)
        member, layout = self._admit(name, ask)
        self._running[name] += 1
        try:
            async with asyncio.timeout(KV_PULL_MAX_S):
                generation = await self._send(ask, member, layout)
        except TimeoutError:
            self._failed["too_slow"] += 1
            raise KvRefused("the state could not be sent in time") from None
        except ViiworkError as error:
            self._failed[reason_of(error)] += 1
            raise KvRefused(f"the state was not sent: {error}") from error
        finally:
            self._running[name] -= 1
            self._running += Counter()  # keeps those that count something
        self._served += 1
        return encode(PullDone(generation=generation))

    def as_json(self) -> dict[str, Any]:
        """A part of `kv_share.pulls` of `/v1/status`."""
        return {"served": self._served, "not_served": dict(self._failed)}

    def _admit(self, name: str, ask: PullAsk) -> tuple[Member, EngineLayout]:
        """Raises `KvRefused` unless the peer could use the state and may have it."""
        if not self._config.enabled:
            raise KvRefused("kv_share is off on this node")
        if self._running.total() >= KV_PULLS_AT_ONCE or self._running[name] >= KV_PULLS_PER_PEER:
            raise KvRefused("as many states are being pulled already as this node sends at once")
        member, layout = self._peers.member(name), self._layouts.any_of(ask.model)
        if member is None or layout is None:
            raise KvRefused(f"this node has no portable backend of {ask.model!r}")
        secured = self._peers.client.key is not None
        if why := path_allowed(member.addr, secured=secured, open_lan=self._config.open):
            raise KvRefused(why)
        heard = self._dispatcher.peers.reports().get(name)
        entry = heard.report.model(ask.model) if heard is not None else None
        own = layout.identity()
        if entry is None or entry.kv is None or not entry.kv.matches(own):
            raise KvRefused(f"no engine of {name!r} could use a state of {ask.model!r}")
        return member, layout

    async def _send(self, ask: PullAsk, member: Member, layout: EngineLayout) -> int:
        """The generation that was sent."""
        key = (ask.session, ask.model)
        binding, replica = self._dispatcher.sessions.get(key), self._replicas.get(key)
        in_slot = binding.generation if binding is not None and binding.ref is not None else -1
        if replica is not None and replica.generation > ask.newer_than and replica.generation >= in_slot:
            await self._send_replica(replica, member, layout)
            return replica.generation
        if in_slot <= ask.newer_than:
            raise KvError("no_replica", "this node holds no newer state of the session")
        await self._pushes.push_now(key, member.name, "pull")
        return in_slot

    async def _send_replica(self, replica: Replica, member: Member, layout: EngineLayout) -> None:
        """As a file that is rendered for the purpose; no engine is asked."""
        path = layout.save_dir / f"pull-{uuid.uuid4().hex}"
        began = time.monotonic()
        try:
            rendered = await self._worker.render(replica.name, layout.target(0), path)
            if rendered.n_tokens != replica.n_tokens:
                raise KvError("not_portable", "the replica cannot be rendered whole")
            generation, tip, scope = replica.generation, replica.tip, replica.scope
            binding = Binding(self._peers.me, None, replica.n_tokens, generation, tip, scope)
            facts = replica.key, binding, layout, path, (), rendered.n_tokens, rendered.total_bytes
            await self._sender.send(Saved(*facts, {}), member, "pull", {"render": time.monotonic() - began})
        finally:
            await remove_file(path)
