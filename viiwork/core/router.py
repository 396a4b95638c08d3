"""Where a request runs: one question, one answer, no effects.

Order: a session goes back to the slot it had, then to the node it had; everyone else takes a free slot of
this node, then the peer with the most free slots (ties: the nearer one, then by name). A forward runs here or
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec import Struct

from viiwork.core.peers import PeerTable
from viiwork.core.sessions import SessionTable
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.turn import Ask, Held
from viiwork.errors import NoFreeSlot, NotServedHere, UnknownModel, ViiworkError


class Local(Struct, frozen=True):
    """Run here, in this slot."""

    ref: SlotRef


class LocalUnslotted(Struct, frozen=True):
    """Run here, on this backend, without a slot."""

    backend: str


class Forward(Struct, frozen=True):
    """Hand the request to this peer."""

    node: str


class Wait(Struct, frozen=True):
    """The model exists and nobody has room; `served` says whether anybody healthy serves it at all."""

    served: bool


class Refuse(Struct, frozen=True):
    """Answer with this error now."""

    error: type[ViiworkError]
    message: str


Decision = Local | LocalUnslotted | Forward | Wait | Refuse


def nothing_held(ask: Ask) -> Mapping[str, Held]:
    """Nobody holds anything of any prompt."""
    return {}


@dataclass(frozen=True, slots=True)
class View:
    """What a decision looks at."""

    me: str
    slots: SlotTable
    sessions: SessionTable
    peers: PeerTable
    held: Callable[[Ask], Mapping[str, Held]] = nothing_held  # of the ask's prompt, by node


def choose(view: View, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
    """Decide where `ask` runs; nodes in `exclude` refused it already."""
    if ask.forwarded_by is not None:
        return _admit_forward(view, ask, now)
    if not view.slots.serves(ask.model) and not view.peers.knows(ask.model):
        return Refuse(UnknownModel, f"no node of this mesh serves a model named {ask.model!r}")
    here = view.me not in exclude
    if not ask.needs_slot:
        backend = view.slots.any_routable(ask.model) if here else None
        if backend is not None:
            return LocalUnslotted(backend)
        peer = _best_peer(view, ask, now, exclude, need_free=False)
    else:
        home = _home(view, ask, now, exclude)
        if home is not None:
            return home
        ref = view.sessions.best_slot(view.slots, ask, now) if here else None
        if ref is not None:
            return Local(ref)
        peer = _best_peer(view, ask, now, exclude, need_free=True)
    if peer is not None:
        return Forward(peer)
    served = view.slots.any_routable(ask.model) is not None or any(view.peers.serving(ask.model, now))
    return Wait(served)


def _admit_forward(view: View, ask: Ask, now: float) -> Decision:
    """Run a forward here or refuse it at once: it waits at its entry node and makes no second hop."""
    if not view.slots.serves(ask.model):
        return Refuse(NotServedHere, f"{view.me} does not serve {ask.model!r}")
    if not ask.needs_slot:
        backend = view.slots.any_routable(ask.model)
        if backend is not None:
            return LocalUnslotted(backend)
    else:
        ref = view.sessions.best_slot(view.slots, ask, now)
        if ref is not None:
            return Local(ref)
    return Refuse(NoFreeSlot, f"{view.me} has no free slot for {ask.model!r}")


def _home(view: View, ask: Ask, now: float, exclude: Collection[str]) -> Decision | None:
    """The peer with room that holds most of the prompt, if it holds more than this node does."""
    held = view.held(ask)
    if not held:
        return None
    best, most = None, 0
    if view.me in held and view.me not in exclude and any(view.slots.free_slots(ask.model)):
        most = held[view.me].n_tokens
    for node, entry in view.peers.serving(ask.model, now):
        known = held.get(node)
        if known is None or node in exclude or known.n_tokens <= most:
            continue
        if view.peers.free(node, entry) > 0:
            best, most = node, known.n_tokens
    return Forward(best) if best is not None else None


def _best_peer(view: View, ask: Ask, now: float, exclude: Collection[str], *, need_free: bool) -> str | None:
    best: tuple[int, float, str] | None = None
    for node, entry in view.peers.serving(ask.model, now):
        free = view.peers.free(node, entry)
        if node in exclude or (need_free and free <= 0):
            continue
        rank = (-free, view.peers.rtt_s(node), node)
        if best is None or rank < best:
            best = rank
    return best[2] if best is not None else None
