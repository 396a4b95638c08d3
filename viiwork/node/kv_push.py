"""The sending side of kv_share: after a turn, the session's state goes ahead to the peer its next turn may
land on; before an end, to any peer that takes it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from viiwork.config.model import KvShareSection
from viiwork.core.manners import Manners, debounce_s
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slot_states import SlotStates
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.jobs import SendDone
from viiwork.limits import KV_DEBOUNCE_S, KV_PUSH_TRIES, KV_PUSHES_AT_ONCE, KV_PUT_OFF_S
from viiwork.mesh.values import Member
from viiwork.node.background import Background, remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_save import PUT_OFF, Saved, Saver
from viiwork.node.kv_send import Sender
from viiwork.node.kv_stats import KvStats
from viiwork.node.kv_targets import Targets

log = logging.getLogger(__name__)

# Reasons why nothing is saved that are no failures.
_NO_NEED = frozenset({"slot_busy", "not_here", "no_peer", "path_not_allowed", "current", "not_portable"})


class _Push:
    """The newest state of one session on its way out; whoever asks for it meanwhile joins."""

    def __init__(self, why: str, n_tries: int, not_before: float) -> None:
        self.why = why
        self.n_tries = n_tries  # of the same generation before this one
        self.not_before = not_before
        self.turn_at = -math.inf  # when the session's newest turn ended
        self.to_targets = False  # it goes to the session's own order of peers
        self.urgent = asyncio.Event()
        self.binding: Binding | None = None  # what is being saved or sent; None = it has not begun
        self.saved: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
        self.sends: dict[str, asyncio.Task[SendDone]] = {}  # by node
        self.put_off: set[str] = set()  # causes that are counted already
        self.again = False  # a newer turn ended since it began
        self.is_closed = False  # its file goes
        self.n_joined = 0
        self.left = asyncio.Event()  # somebody who had joined is served
        self.task: asyncio.Task[None]

    async def pause(self, seconds: float) -> None:
        """Unless it is, or becomes, urgent."""
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.urgent.wait()

    def failed(self, error: BaseException) -> None:
        if not self.saved.done():
            self.saved.set_exception(error)
            self.saved.exception()  # nobody may have joined


class Pusher:
    """Sends states; of each session one save at a time, a newer turn following an unfinished push."""

    def __init__(
        self,
        config: KvShareSection,
        dispatcher: Dispatcher,
        layouts: EngineLayouts,
        saver: Saver,
        sender: Sender,
        targets: Targets,
        manners: Manners,
        states: SlotStates,
        stats: KvStats,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._layouts = layouts
        self._saver = saver
        self._sender = sender
        self._targets = targets
        self._manners = manners
        self._states = states
        self._stats = stats
        self._running: dict[SessionKey, _Push] = {}  # of each session the newest
        self._background = Background()
        self._room = asyncio.Semaphore(KV_PUSHES_AT_ONCE)
        self._room_asked = asyncio.Semaphore(KV_PUSHES_AT_ONCE)  # for those somebody waits for
        self._ending = False

    def turn_ended(self, key: SessionKey, binding: Binding) -> None:
        """A turn left `binding.n_tokens` tokens in its slot."""
        if binding.ref is None or binding.n_tokens < self._config.min_tokens:
            return
        push = self._running.get(key)
        if push is None:
            push = self._start(key, "turn")
        elif push.binding is not None:
            push.again = True
        push.to_targets = True
        push.turn_at = time.monotonic()

    def withhold(self, key: SessionKey) -> None:
        """The session's newest turn must not leave this node: a push that has not saved yet would send it."""
        if push := self._running.pop(key, None):
            push.again = False
            push.task.cancel()

    async def push_now(self, key: SessionKey, node: str, reason: str) -> SendDone:
        """Bring the session's newest state to a member that asks for it.

        Shares what is under way already. Raises `KvError` and `ChannelRefused`.
        """
        member = self._targets.member(node)
        binding, push = self._dispatcher.sessions.get(key), self._running.get(key)
        state = self._states.get(binding.ref) if binding is not None and binding.ref is not None else None
        if state is None or state.key != key or not state.shared:
            raise KvError("not_here", "no slot holds a state of the session that may leave this node")
        if push is None or push.is_closed or push.binding not in (None, binding):
            to_targets = push is not None and push.again
            push = self._start(key, reason)  # an older state may go on its way; the peer takes the newer
            push.to_targets = to_targets
        push.urgent.set()
        push.n_joined += 1
        try:
            saved = await asyncio.shield(push.saved)
            return await asyncio.shield(self._send(push, saved, member, reason))
        finally:
            push.n_joined -= 1
            push.left.set()

    async def hand_over(self, backend: str | None = None) -> None:
        """Bring to peers what no peer holds, the newest first; returns when that is done.

        Of one backend that ends, or of all: then this node ends, and states of turns that end from now on go
        at once.
        """
        if backend is None:
            self._ending = True
            self._targets.leaving()
            for push in self._running.values():
                push.urgent.set()
        for state in self._states.newest_first():
            ref, key = state.binding.ref, state.key
            if ref is None or (backend is not None and ref.backend != backend) or not state.is_owed:
                continue
            if state.binding.n_tokens < self._config.min_tokens:
                continue
            if key not in self._running and self._targets.holders(key, state.binding.generation):
                continue
            push = self._running.get(key) or self._start(key, "handover")
            push.to_targets = True
            push.urgent.set()
        n_owed = sum(self._is_of(key, push, backend) for key, push in self._running.items())
        if n_owed:
            log.info("kv_share.handing_over backend=%s sessions=%d", backend or "all", n_owed)
        while pushes := [push for key, push in self._running.items() if self._is_of(key, push, backend)]:
            await asyncio.wait([push.task for push in pushes])

    @property
    def pushing(self) -> int:
        """States that are on their way, or put off."""
        return len(self._running)

    async def stop(self) -> None:
        for push in self._running.values():
            push.again = False
        await self._background.stop()

    # -- one push ------------------------------------------------------------------------------------
    def _start(self, key: SessionKey, why: str, *, n_tries: int = 0, after_s: float = 0.0) -> _Push:
        push = self._running[key] = _Push(why, n_tries, time.monotonic() + after_s)
        if self._ending:
            push.urgent.set()
        push.task = self._background.go(self._push(key, push))
        push.task.add_done_callback(lambda _: self._ended(key, push))
        return push

    def _ended(self, key: SessionKey, push: _Push) -> None:
        # Also of a task that was cancelled before it began.
        if self._running.get(key) is push:
            del self._running[key]
        push.failed(KvError("cancelled", "the push was given up"))

    async def _push(self, key: SessionKey, push: _Push) -> None:
        follow_s: float | None = None
        try:
            while not push.saved.done():
                await self._until_due(key, push)
                async with self._room_asked if push.n_joined else self._room:
                    saved = await self._save(key, push)
                    if saved is not None:
                        follow_s = await self._send_all(push, saved)
                if saved is None:
                    await asyncio.sleep(KV_PUT_OFF_S)
        except (ViiworkError, OSError) as error:
            push.failed(error)
            if isinstance(error, KvError) and error.reason == "no_peer":
                follow_s = self._follow_s(key, push)
            if follow_s is None:
                self._not_saved(key, error)
        # Not left to the task's end alone: a turn that ends before that would be overlooked.
        if self._running.get(key) is push:
            del self._running[key]
            if push.again:
                self._start(key, push.why).to_targets = True
            elif follow_s is not None and not self._ending:
                later = self._start(key, push.why, n_tries=push.n_tries + 1, after_s=follow_s)
                later.to_targets = True

    def _not_saved(self, key: SessionKey, error: ViiworkError | OSError) -> None:
        if isinstance(error, KvError) and error.reason in _NO_NEED:
            self._stats.sent.skipped[error.reason] += 1
        else:
            self._sender.not_sent(key, error)

    async def _until_due(self, key: SessionKey, push: _Push) -> None:
        """Wait until a save of the session is polite; raises `KvError` when there is no use in one."""
        await push.pause(push.not_before - time.monotonic())
        while True:
            binding, layout = self._newest(key)
            missing = () if push.n_joined else self._missing(key, binding)
            waits_s = self._wait_s(push, binding), self._rest_s(push, layout, missing)
            if max(waits_s) <= 0:
                return
            await push.pause(max(waits_s))

    async def _save(self, key: SessionKey, push: _Push) -> Saved | None:
        """The session's newest state; None when it has to be put off."""
        binding, layout = self._newest(key)
        push.binding = binding
        try:
            saved = await self._saver.save(key, binding, layout, urgent=push.urgent.is_set())
        except KvError as error:
            if error.reason not in PUT_OFF:
                raise
            push.binding = None
            self._put_off(push, error.reason)
            return None
        push.saved.set_result(saved)
        return saved

    def _put_off(self, push: _Push, why: str) -> None:
        if why not in push.put_off:
            push.put_off.add(why)
            self._manners.put_off(why)

    def _missing(self, key: SessionKey, binding: Binding) -> list[Member]:
        """Who is to be given the state; raises `KvError` when that is nobody."""
        in_order = self._targets.in_order(key, binding.n_tokens)
        if not in_order:
            raise self._targets.why_nobody(key[1])
        holders = self._targets.holders(key, binding.generation)
        missing = [member for member in in_order[: self._config.replicas] if member.name not in holders]
        if not missing:
            raise KvError("current", "its peers hold it already")
        return missing

    def _newest(self, key: SessionKey) -> tuple[Binding, EngineLayout]:
        binding = self._dispatcher.sessions.get(key)
        if binding is None or binding.ref is None:
            raise KvError("not_here", "no slot holds the session any more")
        layout = self._layouts.get(binding.ref.backend)
        if layout is None:
            raise KvError("not_portable", f"the state of {key[1]} is not portable here")
        return binding, layout

    def _wait_s(self, push: _Push, binding: Binding) -> float:
        """How long the save is to be put off now."""
        if push.urgent.is_set() or binding.ref is None:
            return 0.0
        now = time.monotonic()
        state = self._states.get(binding.ref)
        why, wait_s = "debounce", 0.0
        if state is not None:
            wait_s = debounce_s(now - state.saved_at, state.new_tokens)
        if wait_s <= 0:
            why, wait_s = "budget", self._manners.wait_s(binding.ref.backend, binding.n_tokens, now)
        if wait_s > 0:
            self._put_off(push, why)
        return wait_s

    def _rest_s(self, push: _Push, layout: EngineLayout, missing: Sequence[Member]) -> float:
        """The same for a state with a recurrent part, which slow links carry only when the session rests."""
        recurrent = layout.shape.recurrent
        if push.urgent.is_set() or recurrent is None:
            return 0.0
        rest_s = push.turn_at + KV_DEBOUNCE_S - time.monotonic()
        if rest_s <= 0 or not any(self._sender.is_slow(member, recurrent.n_bytes) for member in missing):
            return 0.0
        self._put_off(push, "rest")
        return rest_s

    # -- its peers -----------------------------------------------------------------------------------
    async def _send_all(self, push: _Push, saved: Saved) -> float | None:
        """To the peers of its own order and those that asked; the answer is when to try again, if ever."""
        try:
            follow_s = await self._send_to_targets(push, saved) if push.to_targets else None
            while push.n_joined:
                push.left.clear()
                await push.left.wait()
            return follow_s
        finally:
            push.is_closed = True
            # Nobody reads the file any more then; only a push that is given up has transfers left.
            for task in push.sends.values():
                task.cancel()
            try:
                await asyncio.gather(*push.sends.values(), return_exceptions=True)
            finally:
                await remove_file(saved.path)

    async def _send_to_targets(self, push: _Push, saved: Saved) -> float | None:
        key, generation = saved.key, saved.binding.generation
        in_order = self._targets.in_order(key, saved.n_tokens)
        holders = self._targets.holders(key, generation)
        n_missing = self._config.replicas
        for member in in_order:
            if n_missing == 0 or push.again:
                return None
            if member.name not in holders:
                try:
                    await asyncio.shield(self._send(push, saved, member, push.why))
                except (ViiworkError, OSError):
                    continue  # the next one in its order, then
            n_missing -= 1
        return None if n_missing < self._config.replicas else self._follow_s(key, push)

    def _follow_s(self, key: SessionKey, push: _Push) -> float | None:
        """Until the same is tried once more, where a peer failed a moment ago; None = not at all."""
        return None if push.n_tries >= KV_PUSH_TRIES else self._targets.try_again_s(key)

    def _send(self, push: _Push, saved: Saved, member: Member, why: str) -> asyncio.Task[SendDone]:
        """The one transfer of this state to this peer."""
        task = push.sends.get(member.name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            stages_s = saved.stages_s if not push.sends else {}  # so that sums count a save once
            work = self._send_one(saved, member, why, stages_s)
            task = push.sends[member.name] = asyncio.create_task(work)
        return task

    async def _send_one(self, saved: Saved, member: Member, why: str, stages_s: dict[str, float]) -> SendDone:
        try:
            done = await self._sender.send(saved, member, why, stages_s)
        except (ViiworkError, OSError) as error:
            self._targets.failed(member.name, error)
            raise
        self._targets.sent(saved.key, member.name, saved.binding)
        return done

    def _is_of(self, key: SessionKey, push: _Push, backend: str | None) -> bool:
        if backend is None:
            return True
        binding = push.binding or self._dispatcher.sessions.get(key)
        return binding is not None and binding.ref is not None and binding.ref.backend == backend
