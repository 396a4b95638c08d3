"""What the state of each local engine looks like, learned from a probe save after every start of it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from blake3 import blake3

from viiwork.core.capacity import KvIdentity
from viiwork.core.slots import SlotRef
from viiwork.engine.slots import SlotsClient
from viiwork.engine.supervisor import BackendView
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.limits import KV_PROBE_AGAIN_S, KV_PROBE_SAVE_S
from viiwork.node.background import Background, remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.wire.state import GGML_TYPES, Layout, Plane, StateShape

log = logging.getLogger(__name__)

# The engine or its state is not to blame: the next try may well succeed.
_PASSING = frozenset({"slot_busy", "worker_down", "worker_died", "worker_stuck"})


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One running engine, as kv_share must know it before a file may go to it."""

    view: BackendView
    model_fp: bytes
    shape: StateShape
    n_stream: int
    v_trans: bool
    client: SlotsClient

    @property
    def save_dir(self) -> Path:
        assert self.view.save_dir is not None
        return self.view.save_dir

    def target(self, slot: int) -> Layout:
        return Layout(
            shape=self.shape,
            n_stream=self.n_stream,
            slot=slot,
            v_trans=self.v_trans,
            max_tokens=self.view.ctx,
        )

    def identity(self) -> KvIdentity:
        shape = self.shape
        digest = blake3(msgspec.msgpack.encode(shape)).hexdigest(length=8)
        return KvIdentity(
            model_fp=self.model_fp.hex(),
            state=f"{shape.state_version}:{digest}",
            cache_type_k=_type_of(shape, "k"),
            cache_type_v=_type_of(shape, "v"),
            v_trans=self.v_trans,
            n_ctx=self.view.ctx,
        )


def _type_of(shape: StateShape, part: Literal["k", "v"]) -> str:
    """Of the first attention cache; "" for a purely recurrent model."""
    if not shape.caches:
        return ""
    cache = shape.caches[0]
    planes: tuple[Plane, ...] = cache.k if part == "k" else cache.v or cache.k
    return GGML_TYPES[planes[0].type][0]


class EngineLayouts:
    """Layouts of the healthy backends, by backend id; a new epoch of an engine is learned anew."""

    def __init__(
        self,
        worker: KvWorker,
        fingerprint: Callable[[str], Awaitable[bytes]],
        client_of: Callable[[str, int], SlotsClient],
        dispatcher: Dispatcher,
        *,
        again_s: float = KV_PROBE_AGAIN_S,
    ) -> None:
        """`fingerprint` takes a model's name, `client_of` an engine's base URL and slot count."""
        self._worker = worker
        self._fingerprint = fingerprint
        self._client_of = client_of
        self._dispatcher = dispatcher
        self._again_s = again_s
        self._background = Background()
        self._known: dict[str, EngineLayout] = {}
        self._why_not: dict[str, str] = {}  # model -> why its state is not portable
        self._learning: dict[str, tuple[int, asyncio.Task[None]]] = {}

    def get(self, backend: str) -> EngineLayout | None:
        return self._known.get(backend)

    def identity(self, model: str) -> KvIdentity | None:
        """What peers must match; None while the model has no portable backend."""
        found = [known for known in self._known.values() if known.view.model == model]
        if not found:
            return None
        # All backends of a model have the same flags; contexts may differ, and the smallest fits every slot.
        return min((known.identity() for known in found), key=lambda identity: identity.n_ctx)

    def any_of(self, model: str) -> EngineLayout | None:
        return next((known for known in self._known.values() if known.view.model == model), None)

    def why_not(self) -> dict[str, str]:
        return dict(self._why_not)

    def not_portable(self, model: str, why: str) -> None:
        """Restoring proved to give no reuse: stop sharing this model until its engine restarts."""
        self._why_not[model] = why
        for backend in [b for b, known in self._known.items() if known.view.model == model]:
            del self._known[backend]
        log.warning("kv_share.stopped model=%s: %s", model, why)

    def changed(self, view: BackendView) -> None:
        """Follow a backend: forget it when it is gone, probe it when it is healthy for the first time."""
        known = self._known.get(view.id)
        if known is not None and (known.view.epoch != view.epoch or view.url is None):
            del self._known[view.id]
        epoch, task = self._learning.get(view.id, (0, None))
        if task is not None and (epoch != view.epoch or view.url is None):
            task.cancel()  # it would tell of a process that is gone
        if view.status != "healthy" or view.save_dir is None or view.url is None or epoch == view.epoch:
            return
        self._why_not.pop(view.model, None)
        client = self._client_of(view.url, view.n_slots)
        task = self._background.go(self._learn(view, view.save_dir, client))
        self._learning[view.id] = view.epoch, task

    def removed(self, backend: str, model: str) -> None:
        """The backend is gone for good; another one may come by its name."""
        self._known.pop(backend, None)
        _, task = self._learning.pop(backend, (0, None))
        if task is not None:
            task.cancel()
        if not any(known.rpartition("/")[0] == model for known in self._learning):
            self._why_not.pop(model, None)

    async def stop(self) -> None:
        await self._background.stop()

    async def _learn(self, view: BackendView, save_dir: Path, client: SlotsClient) -> None:
        """Probe until that says yes or no."""
        while True:
            try:
                self._known[view.id] = await self._probe(view, save_dir, client)
                self._why_not.pop(view.model, None)
                return
            except (ViiworkError, OSError) as error:
                self._why_not[view.model] = str(error)
                if not isinstance(error, KvError) or error.reason not in _PASSING:
                    log.info("kv_share.not_portable model=%s: %s", view.model, error)
                    return
            await asyncio.sleep(self._again_s)

    async def _probe(self, view: BackendView, save_dir: Path, client: SlotsClient) -> EngineLayout:
        model_fp = await self._fingerprint(view.model)
        path = save_dir / f"probe-{uuid.uuid4().hex}"
        # The emptiest slot, usually with the one token of its warm-up, so that the save is small.
        held = sorted(await client.slots(), key=lambda slot: slot.n_prompt_tokens or 0)
        for slot in held:
            lease = self._dispatcher.take_idle_slot(SlotRef(view.id, slot.id))
            if lease is not None:
                break
        else:
            raise KvError("slot_busy", f"no slot of {view.id} was idle yet")
        try:
            try:
                await client.save(slot.id, path.name, KV_PROBE_SAVE_S)
            finally:
                self._dispatcher.give_back(lease)
            info = await self._worker.inspect(path)
        finally:
            await remove_file(path)
        return EngineLayout(view, model_fp, info.shape, info.n_stream, info.v_trans, client)
