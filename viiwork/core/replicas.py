"""Replicas and the rules for them: who could restore a state, which one is kept, what a move achieved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from viiwork.core.addresses import is_private_path
from viiwork.core.affinity import rendezvous
from viiwork.core.capacity import KvIdentity, ModelCapacity
from viiwork.core.sessions import SessionKey
from viiwork.core.slot_states import Kept
from viiwork.limits import KV_EVICTED_MAX

Warmth = Literal["warm", "partly", "cold"]

WARM_SHARE = 0.90  # of the prompt taken from the imported state
PARTLY_SHARE = 0.30


@dataclass(frozen=True, slots=True)
class Replica:
    """A committed state of one session, a peer's or this node's own, held by its worker under `name`."""

    name: str
    key: SessionKey
    n_tokens: int
    n_bytes: int
    generation: int
    source: str
    tip: str = ""  # last link of the turn that made it
    scope: str = ""  # `holdings.scope_of` its client's key
    kept: tuple[Kept, ...] = ()  # generations whose leading rows are the same, as its source said


class ReplicaTable:
    """Replicas by session, the newest generation of each; at most `limit`, the oldest forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._replicas: OrderedDict[SessionKey, Replica] = OrderedDict()
        self._evicted: OrderedDict[SessionKey, None] = OrderedDict()
        self.revision = 0  # grows with every change

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    @property
    def n_bytes(self) -> int:
        return sum(replica.n_bytes for replica in self._replicas.values())

    def get(self, key: SessionKey) -> Replica | None:
        return self._replicas.get(key)

    def put(self, replica: Replica) -> list[Replica]:
        """Keep a replica; the answer lists those to delete: what it replaces, or itself if older."""
        known = self._replicas.get(replica.key)
        if known is not None and known.generation > replica.generation:
            return [replica]
        self.revision += 1
        self._evicted.pop(replica.key, None)
        self._replicas[replica.key] = replica
        self._replicas.move_to_end(replica.key)
        dropped = [known] if known is not None and known.name != replica.name else []
        while len(self._replicas) > self._limit:
            dropped.append(self._replicas.popitem(last=False)[1])
            self._note_evicted(dropped[-1].key)
        return dropped

    def evicted(self, name: str) -> None:
        """The worker has dropped this replica to make room."""
        for replica in self._replicas.values():
            if replica.name == name:
                self._note_evicted(replica.key)
                break
        self.remove(name)

    def was_evicted(self, key: SessionKey) -> bool:
        """Did the session's replica make room for others, with none since?"""
        return key in self._evicted

    def remove(self, name: str) -> None:
        """Forget the replica of this name, if it is the one in the table."""
        for key, replica in self._replicas.items():
            if replica.name == name:
                del self._replicas[key]
                self.revision += 1
                return

    def clear(self) -> None:
        self._replicas.clear()
        self.revision += 1

    def _note_evicted(self, key: SessionKey) -> None:
        self._evicted[key] = None
        if len(self._evicted) > KV_EVICTED_MAX:
            self._evicted.popitem(last=False)


def targets(
    session: str,
    model: str,
    own: KvIdentity | None,
    n_tokens: int,
    peers: Iterable[tuple[str, ModelCapacity]],
) -> list[str]:
    """Peers whose engine could restore the state, in the session's rendezvous order."""
    if own is None:
        return []
    able = [
        node
        for node, entry in peers
        if entry.name == model and entry.kv is not None and entry.kv.matches(own) and entry.kv.fits(n_tokens)
    ]
    return rendezvous(session, able)


def path_allowed(addr: str, *, secured: bool, open_lan: bool) -> str:
    """Why a state must not go to this address; "" when it may.

    A secured mesh proves its peers. An open mesh shares over loopback and tailnet addresses, and over others
    only where `kv_share.open` says so.
    """
    if secured or open_lan or is_private_path(addr):
        return ""
    return "the mesh has no secret and the address is not on a tailnet (kv_share.open would allow it)"


def warmth(cached: int | None, prompt: int | None) -> Warmth:
    """What the first turn after a change of host found, from the engine's own counts."""
    if not cached or not prompt:
        return "cold"
    share = cached / prompt
    return "warm" if share >= WARM_SHARE else "partly" if share >= PARTLY_SHARE else "cold"
