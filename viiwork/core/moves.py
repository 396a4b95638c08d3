"""What a session's change of host achieved, and why it was not warm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from viiwork.core.replicas import Replica
from viiwork.core.sessions import Binding

REUSED_SHARE = 0.95  # of what was restored: the engine may read its last tokens again


@dataclass(slots=True)
class Turn:
    """What was done for a turn before it ran here."""

    home: str  # node that ran the session's last turn, "" = none is known
    cause: str = ""  # why nothing was restored
    n_restored: int = 0
    n_held: int = 0  # tokens of its prompt the slot is believed to hold
    is_behind: bool = False  # a peer has a newer state than what was restored
    is_prefix: bool = True  # what is there, or was restored, begins the prompt as far as is known


def home_of(
    me: str,
    binding: Binding | None,
    replicas: Iterable[Replica],
    at_peers: Iterable[tuple[str, int]],
) -> str:
    """Who ran the session's last turn, as far as this node knows; of equals this node itself.

    `at_peers`: nodes in whose engines a state lies, and its generation.
    """
    known = [(generation, False, node) for node, generation in at_peers]
    known += [(replica.generation, False, replica.source) for replica in replicas]
    if binding is not None and binding.node not in ("", me):
        known.append((binding.generation + 1, False, binding.node))
    elif binding is not None and binding.is_here:
        known.append((binding.generation, True, me))
    return max(known, default=(0, False, ""))[2]


def cause_of(turn: Turn, cached: int) -> str:
    """Why a turn that is not warm is not, in one word; `cached` prompt tokens were not read."""
    if turn.cause:
        return turn.cause
    had = turn.n_restored or turn.n_held
    if not had:
        return "no_replica"
    if not turn.is_prefix:
        return "diverged"
    if cached >= REUSED_SHARE * had:
        return "replica_behind" if turn.is_behind else "long_prompt"
    if not turn.n_restored:
        return "evicted"
    return "no_reuse" if not cached else "diverged"
