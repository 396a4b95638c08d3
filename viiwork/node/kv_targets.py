"""The members a session's state may go to now, and which of them hold it already."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from viiwork.config.model import KvShareSection
from viiwork.core.push_targets import PushTargets
from viiwork.core.replicas import path_allowed
from viiwork.core.sessions import Binding, SessionKey
from viiwork.errors import ChannelRefused, KvError, KvRefused, ViiworkError
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayouts

# What went wrong on this side, or says nothing against the peer.
_NOT_THE_PEERS = frozenset(
    {"worker_down", "worker_died", "worker_stuck", "stopped", "cancelled", "superseded", "have_newer"}
    | {"bad_file", "not_portable", "io_error", "wrong_model", "layout", "too_long", "too_large", "bug"}
)


@dataclass(frozen=True, slots=True)
class KvPeers:
    """How this node reaches and proves itself to its peers."""

    me: str
    client: PeerClient
    member: Callable[[str], Member | None]


class Targets:
    """Applies `PushTargets` to the mesh as it is."""

    def __init__(
        self,
        config: KvShareSection,
        peers: KvPeers,
        dispatcher: Dispatcher,
        layouts: EngineLayouts,
    ) -> None:
        self._config = config
        self._peers = peers
        self._dispatcher = dispatcher
        self._layouts = layouts
        self._book = PushTargets()
        self._left_at: float | None = None

    def leaving(self) -> None:
        """This node takes its leave: peers' reports come no more, and the last ones count."""
        if self._left_at is None:
            self._left_at = time.monotonic()

    def in_order(self, key: SessionKey, n_tokens: int) -> list[Member]:
        """Members that could restore the state, the session's likeliest next host first."""
        now = time.monotonic()
        serving = [
            (node, entry, member)
            for node, entry in self._dispatcher.peers.serving(key[1], self._left_at or now)
            if (member := self._peers.member(node)) is not None
        ]
        allowed = {node: (entry, member) for node, entry, member in serving if not self._bar_of(member)}
        order = self._book.order(
            key,
            self._layouts.identity(key[1]),
            n_tokens,
            [(node, entry) for node, (entry, _) in allowed.items()],
            now,
            is_last_try=self._left_at is not None,
        )
        return [allowed[node][1] for node in order]

    def why_nobody(self, model: str) -> KvError:
        """Why no member is left for a state of the model."""
        for node, _ in self._dispatcher.peers.serving(model, self._left_at or time.monotonic()):
            member = self._peers.member(node)
            if member is not None and (why := self._bar_of(member)):
                return KvError("path_not_allowed", f"{node} at {member.addr}: {why}")
        return KvError("no_peer", "no peer could use it")

    def member(self, node: str) -> Member:
        """The member of this name, if a state may go there. Raises `KvError`."""
        member = self._peers.member(node)
        if member is None:
            raise KvError("no_peer", f"{node!r} is no member")
        if why := self._bar_of(member):
            raise KvError("path_not_allowed", f"{node} at {member.addr}: {why}")
        return member

    def holders(self, key: SessionKey, generation: int) -> set[str]:
        """Members that hold this generation or a newer one, as far as is known."""
        told, reports = self._dispatcher.book.peers.of(*key), self._dispatcher.peers.reports()
        found = {node for node, holding in told.items() if holding.generation >= generation}
        for node, at in self._book.sent_to(key, generation).items():
            report = reports.get(node)
            # Its next report tells whether it still has it.
            if self._peers.member(node) is not None and (report is None or report.requested_at <= at):
                found.add(node)
        return found

    def sent(self, key: SessionKey, node: str, state: Binding) -> None:
        """The member has taken the state."""
        now = time.monotonic()
        self._book.sent(key, node, state.generation, now)
        self._dispatcher.book.sent(node, key, state, now)

    def failed(self, node: str, error: ViiworkError | OSError) -> None:
        """A state did not arrive there."""
        if isinstance(error, KvError):
            if error.reason in _NOT_THE_PEERS:
                return
        elif not isinstance(error, ChannelRefused) or error.status == KvRefused.http_status:
            return  # our own, or the peer's word about this one state
        self._book.failed(node, time.monotonic())

    def peer_gone(self, node: str) -> None:
        self._book.peer_gone(node)

    def try_again_s(self, key: SessionKey) -> float | None:
        """Until a peer that failed may be tried again; None when none of those that serve the model did."""
        now = time.monotonic()
        serving = [node for node, _ in self._dispatcher.peers.serving(key[1], self._left_at or now)]
        return self._book.try_again_s(serving, now)

    def _bar_of(self, member: Member) -> str:
        """Why no state may go to its address, "" = it may."""
        secured = self._peers.client.key is not None
        return path_allowed(member.addr, secured=secured, open_lan=self._config.open)
