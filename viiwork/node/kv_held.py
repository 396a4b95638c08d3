"""Asks the engines what their slots hold, before a turn counts on it, and notes it after each turn."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from viiwork.core.beliefs import Beliefs, Told
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slots import SlotRef
from viiwork.errors import EngineError
from viiwork.limits import KV_HELD_ASK_S, KV_SETTLE_POLL_S, KV_SLOT_SETTLE_S
from viiwork.node.background import Background
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts

log = logging.getLogger(__name__)


class HeldStates:
    """Owner of the beliefs; two short exchanges with an engine a turn that has something to lose."""

    def __init__(
        self, dispatcher: Dispatcher, layouts: EngineLayouts, on_lost: Callable[[SlotRef], None]
    ) -> None:
        """`on_lost` hears of a slot that holds something else than was believed."""
        self._on_lost = on_lost
        self._dispatcher = dispatcher
        self._layouts = layouts
        self._beliefs = Beliefs()
        self._background = Background()
        self._asked = self._lost = self._unanswered = self._mistaken = 0

    async def stop(self) -> None:
        await self._background.stop()

    def turn_ended(self, key: SessionKey, binding: Binding) -> None:
        """A turn left a state in a slot: look at it while nobody else is there."""
        if binding.ref is not None and (layout := self._layouts.get(binding.ref.backend)) is not None:
            self._background.go(self._note(key, binding, binding.ref, layout))

    def backend_gone(self, backend: str) -> None:
        self._beliefs.forget_backend(backend)

    async def is_held(self, binding: Binding, layout: EngineLayout) -> bool:
        """Does the slot still hold the state? An engine that does not answer in time is believed to."""
        assert binding.ref is not None
        self._asked += 1
        try:
            async with asyncio.timeout(KV_HELD_ASK_S):
                if (await layout.client.props(KV_HELD_ASK_S)).is_sleeping:
                    return self._found(binding.ref, False)  # asking for its slots would wake it
                told = await self._look(binding.ref, layout)
        except (EngineError, TimeoutError) as error:
            self._unanswered += 1
            log.info("kv_share.not_told slot=%s/%d: %s", binding.ref.backend, binding.ref.slot, error)
            return True
        return self._found(binding.ref, told is not None and self._beliefs.holds(binding, told[1]))

    def mistaken(self) -> None:
        """The answer of a turn told that its slot did not hold what it was believed to."""
        self._mistaken += 1

    def as_json(self) -> dict[str, Any]:
        """`kv_share.held` of `/v1/status`."""
        return {
            "asked": self._asked,
            "lost": self._lost,
            "unanswered": self._unanswered,
            "mistaken": self._mistaken,
        }

    def _found(self, ref: SlotRef, held: bool) -> bool:
        if not held:
            self._lost += 1
            self._on_lost(ref)
        return held

    async def _look(self, ref: SlotRef, layout: EngineLayout) -> tuple[bool, Told] | None:
        """Whether the slot is processing, and what it holds; None = the engine has no such slot."""
        for slot in await layout.client.slots(KV_HELD_ASK_S):
            if slot.id == ref.slot:
                told = Told(layout.view.epoch, slot.id_task, slot.n_prompt_tokens)
                return slot.is_processing, told
        return None

    async def _note(self, key: SessionKey, binding: Binding, ref: SlotRef, layout: EngineLayout) -> None:
        """The engine frees a slot a moment after its last byte; then it is as the turn left it."""
        until = time.monotonic() + KV_SLOT_SETTLE_S
        while time.monotonic() < until and self._is_as_left(key, binding, ref):
            try:
                told = await self._look(ref, layout)
            except EngineError:
                return  # judged by its length then
            if told is None:
                return
            if not told[0]:
                if self._is_as_left(key, binding, ref):
                    self._beliefs.put(ref, binding.generation, told[1])
                return
            await asyncio.sleep(KV_SETTLE_POLL_S)

    def _is_as_left(self, key: SessionKey, binding: Binding, ref: SlotRef) -> bool:
        return self._dispatcher.is_at_rest(ref) and self._dispatcher.sessions.get(key) == binding
