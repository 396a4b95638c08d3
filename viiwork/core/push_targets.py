"""Which peers a state goes to now: who would run the session next, who has its state already, who fails."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from viiwork.core.capacity import KvIdentity, ModelCapacity
from viiwork.core.replicas import targets
from viiwork.core.sessions import SessionKey
from viiwork.limits import (
    KV_FULL_LONG_S,
    KV_PEER_BACKOFF_MAX_S,
    KV_PEER_BACKOFF_S,
    MEMBERS_MAX,
    SESSIONS_MAX,
)


@dataclass(slots=True)
class _Failing:
    n: int = 0
    until: float = 0.0


class PushTargets:
    """Remembers what was sent to whom, which peers failed, and since when one was seen without room."""

    def __init__(self) -> None:
        self._sent: OrderedDict[SessionKey, dict[str, tuple[int, float]]] = OrderedDict()
        self._failing: dict[str, _Failing] = {}
        self._full_since: OrderedDict[tuple[str, str], float] = OrderedDict()

    def order(
        self,
        key: SessionKey,
        own: KvIdentity | None,
        n_tokens: int,
        peers: list[tuple[str, ModelCapacity]],
        now: float,
        *,
        is_last_try: bool = False,
    ) -> list[str]:
        """Peers that could restore the state, the likeliest next host first.

        That is the session's own order of hosts, those without a free slot for long behind the others; those
        that failed of late are left out, or stand last when this is the last try.
        """
        session, model = key
        full = {node for node, entry in peers if self._is_full(node, entry, now)}
        able = targets(session, model, own, n_tokens, peers)
        failing = {node for node in able if self.is_failing(node, now)}
        able.sort(key=lambda node: (node in failing, node in full))
        return [node for node in able if is_last_try or node not in failing]

    # -- what was sent -------------------------------------------------------------------------------
    def sent(self, key: SessionKey, node: str, generation: int, now: float) -> None:
        """The peer holds this generation of the session now."""
        self._failing.pop(node, None)
        self._sent.setdefault(key, {})[node] = generation, now
        self._sent.move_to_end(key)
        while len(self._sent) > SESSIONS_MAX:
            self._sent.popitem(last=False)

    def sent_to(self, key: SessionKey, generation: int) -> dict[str, float]:
        """Peers that were given this generation or a newer one, and when."""
        given = self._sent.get(key, {})
        return {node: at for node, (newest, at) in given.items() if newest >= generation}

    def peer_gone(self, node: str) -> None:
        """What it held is gone with it."""
        for given in self._sent.values():
            given.pop(node, None)
        self._failing.pop(node, None)

    # -- who fails -----------------------------------------------------------------------------------
    def failed(self, node: str, now: float) -> None:
        """A state could not be brought there; the pause before the next try doubles each time."""
        mark = self._failing.setdefault(node, _Failing())
        mark.until = now + min(KV_PEER_BACKOFF_S * 2 ** min(mark.n, 30), KV_PEER_BACKOFF_MAX_S)
        mark.n += 1
        while len(self._failing) > MEMBERS_MAX:
            del self._failing[next(iter(self._failing))]

    def is_failing(self, node: str, now: float) -> bool:
        mark = self._failing.get(node)
        return mark is not None and now < mark.until

    def try_again_s(self, nodes: Iterable[str], now: float) -> float | None:
        """Until the first of these peers may be tried again; None when none of them failed."""
        left = [self._failing[node].until - now for node in nodes if node in self._failing]
        return max(min(left), 0.0) if left else None

    def _is_full(self, node: str, entry: ModelCapacity, now: float) -> bool:
        """Was it without a free slot at every look of the last while?"""
        at = (node, entry.name)
        if entry.free > 0:
            self._full_since.pop(at, None)
            return False
        since = self._full_since.setdefault(at, now)
        while len(self._full_since) > SESSIONS_MAX:
            self._full_since.popitem(last=False)
        return now - since >= KV_FULL_LONG_S
