"""What the state of each local engine looks like, learned from a probe save after every start of it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from viiwork.core.capacity import KvIdentity
from viiwork.engine.slots import SlotsClient
from viiwork.engine.supervisor import BackendView
from viiwork.errors import ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.limits import KV_PROBE_SAVE_S
from viiwork.wire.savefile import GGML_TYPES, Layout, SaveInfo, StateShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One running engine, as kv_share must know it before a file may go to it."""

    view: BackendView
    model_fp: bytes
    shape: StateShape
    n_stream: int
    client: SlotsClient

    @property
    def save_dir(self) -> Path:
        assert self.view.save_dir is not None
        return self.view.save_dir

    def target(self, slot: int) -> Layout:
        return Layout(shape=self.shape, n_stream=self.n_stream, slot=slot, max_tokens=self.view.ctx)

    def identity(self) -> KvIdentity:
        shape = self.shape
        digest = blake3(msgspec.msgpack.encode(shape)).hexdigest(length=8)
        return KvIdentity(
            model_fp=self.model_fp.hex(),
            state=f"{shape.state_version}:{digest}",
            cache_type_k=GGML_TYPES[shape.k[0].type][0],
            cache_type_v=GGML_TYPES[(shape.v or shape.k)[0].type][0],
            v_trans=shape.v_trans,
            n_ctx=self.view.ctx,
        )


class EngineLayouts:
    """Layouts of the healthy backends, by backend id; a new epoch of an engine is learned anew."""

    def __init__(
        self,
        worker: KvWorker,
        fingerprint: Callable[[str], Awaitable[bytes]],
        client_of: Callable[[str, int], SlotsClient],
    ) -> None:
        """`fingerprint` takes a model's name, `client_of` an engine's base URL and slot count."""
        self._worker = worker
        self._fingerprint = fingerprint
        self._client_of = client_of
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
        learning = self._learning.get(view.id)
        if view.status != "healthy" or view.save_dir is None or view.url is None:
            return
        if learning is not None and learning[0] == view.epoch:
            return
        self._why_not.pop(view.model, None)
        task = asyncio.get_running_loop().create_task(self._learn(view, view.save_dir))
        self._learning[view.id] = (view.epoch, task)

    async def stop(self) -> None:
        tasks = [task for _, task in self._learning.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _learn(self, view: BackendView, save_dir: Path) -> None:
        assert view.url is not None
        client = self._client_of(view.url, view.n_slots)
        name = f"probe-{uuid.uuid4().hex}"
        try:
            model_fp = await self._fingerprint(view.model)
            # Slot 0 holds the token of its warm-up. A busy slot would make the engine put the save off.
            await client.save(0, name, KV_PROBE_SAVE_S)
            info: SaveInfo = await self._worker.inspect(save_dir / name)
            self._known[view.id] = EngineLayout(view, model_fp, info.shape, info.n_stream, client)
        except (ViiworkError, OSError) as error:
            self._why_not[view.model] = str(error)
            log.info("kv_share.not_portable model=%s: %s", view.model, error)
        finally:
            (save_dir / name).unlink(missing_ok=True)
