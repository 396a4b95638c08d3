"""What the engines' slots are believed to hold, and whether what an engine tells bears it out."""

from __future__ import annotations

from typing import NamedTuple

from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef

UNCOUNTED_TOKENS = 1  # an engine may or may not count the last token it sampled


class Told(NamedTuple):
    """One slot, as its engine tells of it."""

    epoch: int  # of the engine's process
    id_task: int | None  # the last one that ran in it
    n_prompt_tokens: int | None  # what it holds; None = no task ran in it yet


class Beliefs:
    """What each slot looked like after the newest turn of its session; one entry a slot."""

    def __init__(self) -> None:
        self._seen: dict[SlotRef, tuple[int, Told]] = {}  # generation of the turn, and the slot then

    def put(self, ref: SlotRef, generation: int, told: Told) -> None:
        self._seen[ref] = generation, told

    def forget_backend(self, backend: str) -> None:
        for ref in [ref for ref in self._seen if ref.backend == backend]:
            del self._seen[ref]

    def holds(self, binding: Binding, now: Told) -> bool:
        """Does the slot of `binding` still hold what its turn left there?

        A turn after which the slot was not looked at (another one began at once) is judged by its length.
        """
        if binding.ref is None or now.n_prompt_tokens is None:
            return False
        generation, told = self._seen.get(binding.ref, (-1, now))
        if generation == binding.generation:
            return now == told
        return not binding.n_tokens or abs(now.n_prompt_tokens - binding.n_tokens) <= UNCOUNTED_TOKENS
