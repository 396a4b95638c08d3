"""The importing side of kv_share: a newer replica is restored into the leased slot before the turn runs in
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from viiwork.core.replicas import Replica, ReplicaTable, is_newer, warmth
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slots import SlotRef
from viiwork.core.turn import Grant, Outcome
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.limits import KV_IMPORT_MAX_S, KV_IMPORT_MIN_S, KV_NO_REUSE_MAX
from viiwork.node.background import Background, remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_layouts import EngineLayout, EngineLayouts
from viiwork.node.kv_prompt import Prompts
from viiwork.node.kv_push import EngineGates
from viiwork.node.kv_stats import KvStats, Transfer, stages_of

log = logging.getLogger(__name__)

PREFILL_ALPHA = 0.3  # weight of the newest turn in a model's prefill time


@dataclass(frozen=True, slots=True)
class _Import:
    replica: Replica
    failed: str = ""  # reason word


class Importer:
    """Restores replicas, and checks by the engine's own counts what that achieved."""

    def __init__(
        self,
        me: str,
        dispatcher: Dispatcher,
        replicas: ReplicaTable,
        layouts: EngineLayouts,
        worker: KvWorker,
        gates: EngineGates,
        stats: KvStats,
        prompts: Prompts,
    ) -> None:
        self._prompts = prompts
        self._me = me
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._layouts = layouts
        self._worker = worker
        self._gates = gates
        self._stats = stats
        self._background = Background()
        self._imports: dict[int, _Import] = {}  # by lease, while its turn runs
        self._prefill_s: dict[str, float] = {}  # model -> measured seconds a prompt token
        self._no_reuse: dict[str, int] = {}  # model -> imports in a row of which nothing was reused

    async def stop(self) -> None:
        await self._background.stop()

    async def prepare(self, grant: Grant) -> None:
        """Restore the session's newer state into the granted slot, if any; faults are counted, not raised."""
        ask = grant.ask
        if ask.session is None or grant.slot is None:
            return
        key, ref = (ask.session, ask.model), SlotRef(grant.backend, grant.slot)
        replica = self._replicas.get(key)
        if replica is None or not is_newer(replica, self._dispatcher.sessions.get(key)):
            return
        if not ask.pinnable:
            self._stats.imports.skipped["not_pinnable"] += 1
            return
        try:
            layout = self._layouts.get(ref.backend)
            if layout is None:
                raise KvError("not_portable", f"the state of {ask.model} is not portable here")
            async with asyncio.timeout(self._worth_s(replica)):
                await self._restore(grant, replica, layout, ref)
        except (ViiworkError, OSError, TimeoutError) as error:
            reason = error.reason if isinstance(error, KvError) else _reason_of(error)
            self._failed(grant, replica, ref, reason, str(error) or reason)
            return
        binding = Binding(self._me, ref, replica.n_tokens, replica.generation, replica.tip, replica.scope)
        self._dispatcher.sessions.ran_here(key, binding)
        self._imports[grant.lease] = _Import(replica)

    def turn_ended(self, grant: Grant, outcome: Outcome) -> None:
        """Say warm, partly warm or cold of an imported turn, and learn how fast this model prefills."""
        usage = outcome.usage
        done = self._imports.pop(grant.lease, None) if not grant.is_forward else None
        if usage is None or usage.cached is None or usage.prefilled is None:
            return
        if outcome.ttft_s is not None and usage.prefilled >= 256 and not grant.is_forward:
            rate = outcome.ttft_s / usage.prefilled
            before = self._prefill_s.get(grant.ask.model, rate)
            self._prefill_s[grant.ask.model] = before + PREFILL_ALPHA * (rate - before)
        if done is None:
            return
        found = warmth(usage.cached, usage.cached + usage.prefilled)
        cause = done.failed or ("diverged" if usage.cached else "no_reuse")
        self._stats.moved(found, cause, usage.cached)
        log.info(
            "kv_share.move request=%s how=%s session=%s model=%s reused=%d of=%d%s",
            grant.ask.request_id,
            found,
            done.replica.key[0][:8],
            grant.ask.model,
            usage.cached,
            usage.cached + usage.prefilled,
            f" cause={cause}" if found != "warm" else "",
        )
        if not done.failed:
            self._judge_reuse(grant.ask.model, done.replica, usage.cached)

    def _judge_reuse(self, model: str, replica: Replica, cached: int) -> None:
        # A restore that answers 200 proves nothing: some models' states give no reuse whatever they say.
        if cached > 0:
            self._no_reuse.pop(model, None)
            return
        self._forget(replica)
        self._no_reuse[model] = self._no_reuse.get(model, 0) + 1
        if self._no_reuse[model] >= KV_NO_REUSE_MAX:
            why = f"{KV_NO_REUSE_MAX} restored states in a row gave no reuse (cache_n 0)"
            self._layouts.not_portable(model, why)
            self._no_reuse.pop(model)

    def _worth_s(self, replica: Replica) -> float:
        """How long an import may take: never longer than reading the same tokens cold would."""
        rate = self._prefill_s.get(replica.key[1])
        cold_s = rate * replica.n_tokens if rate is not None else KV_IMPORT_MAX_S
        return min(max(cold_s, KV_IMPORT_MIN_S), KV_IMPORT_MAX_S)

    async def _restore(self, grant: Grant, replica: Replica, layout: EngineLayout, ref: SlotRef) -> None:
        started = time.monotonic()
        useful = await self._prompts.common_tokens(grant.ask, layout, replica)
        if useful == 0:
            raise KvError("diverged", "the prompt has nothing in common with the state")
        name = f"in-{uuid.uuid4().hex}"
        path = layout.save_dir / name
        try:
            rendered = await self._worker.render(
                replica.name, layout.target(ref.slot), path, at_most=useful or 0
            )
            render_s = time.monotonic() - started
            async with self._gates.of(ref.backend):
                queued_s = time.monotonic() - started - render_s
                if self._dispatcher.sessions.replaces(ref):
                    # A restore overwrites what the slot holds; one token of another prompt saves it to RAM.
                    await layout.client.warm_up(ref.slot, KV_IMPORT_MAX_S)
                done = await layout.client.restore(ref.slot, name, KV_IMPORT_MAX_S)
        finally:
            self._background.go(remove_file(path))  # the turn need not wait for it
        self._stats.stalled(ref.backend, done.ms / 1000)
        if done.n_restored != rendered.n_tokens or done.n_read != rendered.total_bytes:
            raise KvError(
                "restore_short",
                f"the engine restored {done.n_restored} of {rendered.n_tokens} tokens, "
                f"{done.n_read} of {rendered.total_bytes} bytes",
            )
        self._stats.ended(
            Transfer(
                what="import",
                session=replica.key[0],
                model=replica.key[1],
                peer=replica.source,
                tokens=done.n_restored,
                state_bytes=rendered.total_bytes,
                took_s=time.monotonic() - started,
                stages_s=stages_of(None, render=render_s, queued=queued_s, restore=done.ms / 1000),
            )
        )

    def _failed(self, grant: Grant, replica: Replica, ref: SlotRef, reason: str, message: str) -> None:
        self._stats.ended(
            Transfer(
                what="import",
                session=replica.key[0],
                model=replica.key[1],
                reason=reason,
                detail=message,
                request=grant.ask.request_id,
                peer=replica.source,
            )
        )
        self._imports[grant.lease] = _Import(replica, failed=reason)
        # Whatever the slot held may be gone: a failed restore empties it.
        self._dispatcher.sessions.emptied(ref)
        # The turn now runs without it; restored later, it would replace the newer state that leaves behind.
        self._forget(replica)

    def _forget(self, replica: Replica) -> None:
        self._replicas.remove(replica.name)
        self._background.go(self._drop(replica.name))

    async def _drop(self, name: str) -> None:
        with suppress(KvError):  # a worker that is gone has dropped it
            await self._worker.drop(name)


def _reason_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "import_timeout"
    return getattr(error, "code", "io_error")


def key_of(grant: Grant) -> SessionKey | None:
    """The session a grant's turn belongs to."""
    return (grant.ask.session, grant.ask.model) if grant.ask.session is not None else None
