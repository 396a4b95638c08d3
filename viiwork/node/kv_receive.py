"""The receiving side of kv_share: which offers are admitted, and what becomes of their sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from viiwork.config.model import KvShareSection
from viiwork.core.replicas import Replica, ReplicaTable, path_allowed
from viiwork.errors import KvError, KvRefused
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import ModelTerms, ReceiveGrant
from viiwork.limits import KV_CLOCK_SKEW_MS, KV_RECEIVES_AT_ONCE
from viiwork.mesh.origins import MeshOrigins
from viiwork.node.background import Background
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_arrivals import Arrivals
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_paths import must_encrypt
from viiwork.node.kv_replicas import drop, take_in
from viiwork.node.kv_send import kept_of, session_digest
from viiwork.node.kv_stats import KvStats, Transfer, stages_of
from viiwork.wire.channel import mesh_key
from viiwork.wire.kvoffer import ENCRYPT_HEADER, StateOffer, decode_offer


@dataclass(frozen=True, slots=True)
class Admitted:
    """An offer this node said yes to."""

    offer: StateOffer
    layout: EngineLayout
    peer: str
    remote_ip: str


class Receiver:
    """Implements `api.ports.Channels`."""

    def __init__(
        self,
        me: str,
        config: KvShareSection,
        secrets: tuple[bytes, ...],
        origins: MeshOrigins,
        dispatcher: Dispatcher,
        replicas: ReplicaTable,
        layouts: EngineLayouts,
        worker: KvWorker,
        stats: KvStats,
    ) -> None:
        self._me = me
        self._config = config
        self._secrets = secrets
        self._origins = origins
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._layouts = layouts
        self._worker = worker
        self._stats = stats
        self.arrivals = Arrivals(replicas)
        self._background = Background()

    def check(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> Admitted:
        """See `api.ports.Channels.check`; the sender is proven before its offer is read."""
        peer = self._origins.sent_by(method, path_qs, headers, body, remote_ip)
        offer = decode_offer(body)
        if not self._config.enabled:
            raise KvRefused("kv_share is off on this node")
        secured = bool(self._secrets)
        if why := path_allowed(remote_ip, secured=secured, open_lan=self._config.open):
            raise KvRefused(why)
        layout = self._layouts.any_of(offer.model)
        if layout is None:
            raise KvRefused(f"this node has no portable backend of {offer.model!r}")
        own = layout.identity()
        if (own.model_fp, own.state) != (offer.model_fp, offer.state):
            raise KvRefused(f"weights or state layout of {offer.model!r} differ from this node's")
        if offer.generation > time.time_ns() // 1_000_000 + KV_CLOCK_SKEW_MS:
            raise KvRefused("the state's generation lies in the future: the clocks of the two nodes differ")
        if not own.fits(offer.n_tokens):
            raise KvRefused(f"{offer.n_tokens} tokens do not fit a slot of {own.n_ctx}")
        if self._has_newer(offer):
            raise KvRefused("this node has a newer state of the session")
        if len(self._background) >= KV_RECEIVES_AT_ONCE:
            raise KvRefused(f"{KV_RECEIVES_AT_ONCE} states are being received already")
        return Admitted(offer, layout, peer, remote_ip)

    def answer_headers(self, admitted: Admitted) -> dict[str, str]:
        """See `api.ports.Channels.answer_headers`."""
        return {ENCRYPT_HEADER: "1"} if must_encrypt(self._config, admitted.remote_ip) else {}

    def take(self, admitted: Admitted, sock: socket.socket) -> None:
        """See `api.ports.Channels.take`."""
        self._background.go(self._receive(admitted, sock))

    async def stop(self) -> None:
        await self._background.stop()

    def _has_newer(self, offer: StateOffer) -> bool:
        key = (offer.session, offer.model)
        replica, binding = self._replicas.get(key), self._dispatcher.sessions.get(key)
        held = binding.generation if binding is not None and binding.is_here else 0
        return max(held, replica.generation if replica is not None else 0) >= offer.generation

    async def _receive(self, admitted: Admitted, sock: socket.socket) -> None:
        offer = admitted.offer
        key = (offer.session, offer.model)
        with self.arrivals.arriving(key, offer.generation, offer.n_tokens, admitted.peer, offer.tip):
            await self._receive_now(admitted, sock)

    async def _receive_now(self, admitted: Admitted, sock: socket.socket) -> None:
        offer, layout = admitted.offer, admitted.layout
        terms = ModelTerms(model_fp=layout.model_fp, shape=layout.shape, max_tokens=layout.view.ctx)
        grant = ReceiveGrant(
            keys=tuple(mesh_key(secret) for secret in self._secrets) or (mesh_key(b""),),
            local_name=self._me,
            peer_name=admitted.peer,
            models=(terms,),
            require_encrypt=must_encrypt(self._config, admitted.remote_ip),
        )
        try:
            done = await self._worker.receive(sock, grant)
            if done.session != session_digest((offer.session, offer.model)):
                await drop(done.replica, self._worker)
                raise KvError("bad_offer", "the state belongs to another session than was announced")
        except KvError as error:
            self._stats.ended(
                Transfer(
                    what="receive",
                    session=offer.session,
                    model=offer.model,
                    reason=error.reason,
                    detail=str(error),
                    peer=admitted.peer,
                    path=admitted.remote_ip,
                )
            )
            return
        replica = Replica(
            done.replica,
            (offer.session, offer.model),
            done.n_tokens,
            done.total_bytes,
            done.generation,
            admitted.peer,
            offer.tip,
            offer.scope,
            kept_of(done.known),
        )
        await take_in(replica, done.dropped, self._replicas, self._worker)
        self._stats.ended(
            Transfer(
                what="receive",
                session=offer.session,
                model=offer.model,
                peer=admitted.peer,
                path=admitted.remote_ip,
                encrypted=True if grant.require_encrypt else None,
                tokens=done.n_tokens,
                kept=done.kept,
                state_bytes=done.total_bytes,
                raw_bytes=done.raw_bytes,
                wire_bytes=done.wire_bytes,
                took_s=done.stages.total_s,
                stages_s=stages_of(done.stages),
            )
        )
