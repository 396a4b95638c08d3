"""What each local engine's state looks like and is good for, learned in an idle slot after every start."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from blake3 import blake3

from viiwork.core.capacity import KvIdentity
from viiwork.core.slots import SlotRef
from viiwork.engine.slots import SlotsClient
from viiwork.engine.supervisor import BackendView
from viiwork.errors import KvError, ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SaveFacts
from viiwork.limits import KV_PROBE_AGAIN_MAX_S, KV_PROBE_AGAIN_S, KV_PROBE_SAVE_S, KV_TEST_LOOK_S
from viiwork.node.background import Background, remove_file
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_selftest import SelfTest
from viiwork.node.kv_verdicts import Verdict, Verdicts
from viiwork.wire.state import GGML_TYPES, Layout, Plane, StateShape

log = logging.getLogger(__name__)

T = TypeVar("T")

# The engine or its state is not to blame: the next try may well succeed.
_PASSING = frozenset({"slot_busy", "worker_down", "worker_died", "worker_stuck"})
_EMPTY_TOKENS = 1  # a slot that was only warmed up holds so many
_UNTESTED = Verdict(word="append-only")


class StateFacts(Protocol):
    """What a model's files and arguments tell of its states. Both raise `ModelFileError`."""

    async def of(self, model: str) -> bytes:
        """What two nodes must have in common to exchange them."""
        ...

    async def swa_rows(self, model: str) -> int | None:
        """Rows a slot's sliding-window cache takes: 0 = not known, None = all of its tokens'."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One running engine, as kv_share must know it before a file may go to it."""

    view: BackendView
    model_fp: bytes
    shape: StateShape
    n_stream: int
    v_trans: bool
    client: SlotsClient
    build: str
    swa_rows: int  # of a sliding-window cache, 0 = not known
    verdict: Verdict

    @property
    def save_dir(self) -> Path:
        assert self.view.save_dir is not None
        return self.view.save_dir

    @property
    def cuts_anywhere(self) -> bool:
        """Does the engine go back to any token of a state? Else it must be known what a prompt shares."""
        return self.shape.kind == "dense"

    def target(self, slot: int) -> Layout:
        return Layout(
            shape=self.shape,
            n_stream=self.n_stream,
            slot=slot,
            v_trans=self.v_trans,
            max_tokens=self.view.ctx,
            checkpoints=self.verdict.checkpoints,
            swa_rows=self.swa_rows,
            swa_pad=self.swa_rows > 0,
        )

    @property
    def test_key(self) -> str:
        """Everything the verdict of the self-test depends on."""
        facts = self.model_fp, self.build, self.shape, self.n_stream > 1, self.v_trans, self.swa_rows
        return blake3(msgspec.msgpack.encode(facts)).hexdigest(length=16)

    def as_json(self) -> dict[str, Any]:
        """For the status page."""
        verdict = self.verdict
        return {
            "verdict": verdict.word,
            "kind": self.shape.kind,
            "build": self.build,
            "tested_tokens": verdict.n_tokens,
            "append_reused": verdict.n_appended,
            "diverging_reused": verdict.n_diverged,
            "bytes_per_token": self.shape.token_bytes,
        } | ({"why": verdict.why} if verdict.why else {})

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
        facts: StateFacts,
        verdicts: Verdicts,
        client_of: Callable[[str, int], SlotsClient],
        dispatcher: Dispatcher,
        *,
        again_s: float = KV_PROBE_AGAIN_S,
    ) -> None:
        """`client_of` takes an engine's base URL and slot count."""
        self._worker = worker
        self._facts = facts
        self._verdicts = verdicts
        self._client_of = client_of
        self._dispatcher = dispatcher
        self._again_s = again_s
        self._background = Background()
        self._known: dict[str, EngineLayout] = {}
        self._why_not: dict[str, str] = {}  # model -> why its state is not portable
        self._learning: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._testing = asyncio.Lock()  # backends alike need one test, and a machine not two at once

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

    def status(self) -> dict[str, Any]:
        """Each model of an engine that was looked at: what moved states of it are good for."""
        found: dict[str, Any] = {known.view.model: known.as_json() for known in self._known.values()}
        for model, why in self._why_not.items():
            found.setdefault(model, {"verdict": "not portable", "why": why})
        return found

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
        again_s = self._again_s
        while True:
            try:
                known = await self._probe(view, save_dir, client)
            except (ViiworkError, OSError) as error:
                self._why_not[view.model] = str(error)
                if not isinstance(error, KvError) or error.reason not in _PASSING:
                    log.info("kv_share.not_portable model=%s: %s", view.model, error)
                    return
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, KV_PROBE_AGAIN_MAX_S)
                continue
            self._known[view.id] = known
            self._why_not.pop(view.model, None)
            return

    async def _probe(self, view: BackendView, save_dir: Path, client: SlotsClient) -> EngineLayout:
        """The engine's layout. Raises `KvError` when its state is not portable or no slot is idle."""
        model_fp, build = await self._facts.of(view.model), (await client.props()).build_info
        if view.embedded:
            build = f"xllamacpp {version('xllamacpp')}"  # its engine does not know its own
        async with self._idle_slot(view, client) as (ref, held):
            path = save_dir / f"probe-{uuid.uuid4().hex}"
            if self._dispatcher.is_wanted(ref, view.model):
                raise KvError("slot_busy", f"requests for {view.model} wait")
            try:
                await client.save(ref.slot, path.name, KV_PROBE_SAVE_S)
                info = await self._worker.inspect(path)
                layout = await self._layout(view, model_fp, build, info, client)
                verdict = await self._verdicts.get(layout.test_key)
                if verdict is None:
                    try:
                        verdict = await self._unless_wanted(ref, view.model, self._tested(layout, ref.slot))
                    finally:
                        if held > _EMPTY_TOKENS:
                            await self._put_back(client, ref, path.name)
            finally:
                await remove_file(path)
        if verdict.word == "not portable":
            raise KvError("not_portable", verdict.why)
        return replace(layout, verdict=verdict)

    async def _layout(
        self, view: BackendView, model_fp: bytes, build: str, info: SaveFacts, client: SlotsClient
    ) -> EngineLayout:
        swa_rows = 0
        if any(cache.name == "swa" for cache in info.shape.caches):
            found = await self._facts.swa_rows(view.model)
            if found is None:
                # They are not saved, and the engine would take those before a restored window for there.
                raise KvError("not_portable", "with --swa-full the engine goes back to rows it does not save")
            swa_rows = found
        facts = info.shape, info.n_stream, info.v_trans
        return EngineLayout(view, model_fp, *facts, client, build, swa_rows, _UNTESTED)

    @asynccontextmanager
    async def _idle_slot(self, view: BackendView, client: SlotsClient) -> AsyncIterator[tuple[SlotRef, int]]:
        """The emptiest slot that nobody uses, and how many tokens it holds."""
        for slot in sorted(await client.slots(), key=lambda slot: slot.n_prompt_tokens or 0):
            ref = SlotRef(view.id, slot.id)
            lease = self._dispatcher.take_idle_slot(ref)
            if lease is not None:
                break
        else:
            raise KvError("slot_busy", f"no slot of {view.id} was idle yet")
        try:
            yield ref, slot.n_prompt_tokens or 0
        finally:
            self._dispatcher.give_back(lease)

    async def _tested(self, layout: EngineLayout, slot: int) -> Verdict:
        def target(checkpoints: int) -> Layout:
            return msgspec.structs.replace(layout.target(slot), checkpoints=checkpoints)

        async with self._testing:
            verdict = await self._verdicts.get(layout.test_key)
            if verdict is None:
                test = SelfTest(layout.client, self._worker, layout.save_dir, layout.model_fp, target)
                verdict = await test.run()
                await self._verdicts.put(layout.test_key, verdict)
        log.info(
            "kv_share.tested model=%s verdict=%s kind=%s build=%s tokens=%d append=%d diverging=%d%s",
            layout.view.model,
            verdict.word.replace(" ", "-"),
            layout.shape.kind,
            layout.build,
            verdict.n_tokens,
            verdict.n_appended,
            verdict.n_diverged,
            f": {verdict.why}" if verdict.why else "",
        )
        return verdict

    async def _unless_wanted(self, ref: SlotRef, model: str, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; it is given up as soon as a request waits for the slot."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((task,), timeout=KV_TEST_LOOK_S))[0]:
                if self._dispatcher.is_wanted(ref, model):
                    raise KvError("slot_busy", f"requests for {model} wait, its self-test comes later")
            return await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, ViiworkError, OSError):
                await task

    async def _put_back(self, client: SlotsClient, ref: SlotRef, name: str) -> None:
        """What the slot held before the test."""
        try:
            await client.restore(ref.slot, name, KV_PROBE_SAVE_S)
        except KvError as error:
            log.info("kv_share.not_put_back backend=%s slot=%d: %s", *ref, error)
            self._dispatcher.sessions.emptied(ref)
