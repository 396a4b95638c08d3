"""The self-test: is a moved state of use to the engine? A short one is saved, rendered and restored."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from viiwork.engine.slots import Ran, SlotsClient
from viiwork.errors import EngineError, KvError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import StateFile
from viiwork.limits import KV_CHECKPOINTS_KEPT, KV_TEST_STEP_S, KV_TEST_TOKENS
from viiwork.node.background import remove_file
from viiwork.node.kv_replicas import drop
from viiwork.node.kv_verdicts import Verdict, Word
from viiwork.wire.state import Layout

BACK = 3  # tokens before the end at which the second prompt diverges
MORE = 4  # tokens that are new in either prompt
USED_SHARE = 0.5  # of the state; a checkpoint in it lies a few tokens before its end

# Plain words: any vocabulary makes a token at least of each, and they seldom make the same one twice.
_TEXT = (
    "The harbour master counted every boat before dawn, wrote down its name and cargo, then walked along the "
    "cold stone pier towards the lighthouse where seven lamps burned behind thick green glass. Nobody had "
    "asked him why this old custom still mattered, yet each captain trusted those patient figures more than "
    "any chart, compass or prayer."
)


class SelfTest:
    """One test of one engine in one of its slots, which is the caller's and is left empty."""

    def __init__(
        self,
        client: SlotsClient,
        worker: KvWorker,
        save_dir: Path,
        model_fp: bytes,
        target: Callable[[int], Layout],
    ) -> None:
        """`target` is the slot's layout with so many checkpoints in a file."""
        self._client = client
        self._worker = worker
        self._save_dir = save_dir
        self._model_fp = model_fp
        self._target = target
        self._slot = target(0).slot
        self._checkpoints = KV_CHECKPOINTS_KEPT

    async def run(self) -> Verdict:
        """The verdict. Raises `EngineError` or `KvError` where engine or worker do not get so far."""
        tokens = (await self._client.tokenized(_TEXT, KV_TEST_STEP_S))[: KV_TEST_TOKENS + MORE]
        held, more = tokens[:-MORE], tokens[-MORE:]
        if len(held) < 2 * BACK:
            raise EngineError(f"the engine makes {len(tokens)} tokens of {len(_TEXT)} characters")
        replica = None
        try:
            await self._run(held, 0)
            replica = await self._keep(len(held))
            home = await self._run(held + more, 1)
            appended = await self._moved(replica, held + more)
            diverged = await self._moved(replica, held[:-BACK] + more)
        finally:
            if replica is not None:
                await drop(replica, self._worker)
        await self._client.erase(self._slot)
        return self._judge(len(held), home, appended, diverged)

    def _judge(self, n: int, home: Ran, appended: Ran, diverged: Ran) -> Verdict:
        word: Word = "portable"
        why = ""
        if appended.n_cached < USED_SHARE * n:
            why = f"a restored state gave no reuse ({appended.n_cached} of {n} tokens at an exact append)"
            word = "not portable"
        elif appended.n_cached == home.n_cached and appended.tokens != home.tokens:
            word, why = "not portable", "a restored state gave another answer"
        elif diverged.n_cached < USED_SHARE * n:
            why = f"a prompt that diverges {BACK} tokens before the end reuses {diverged.n_cached} of {n}"
            word = "append-only"
        return Verdict(
            word=word,
            why=why,
            n_tokens=n,
            n_appended=appended.n_cached,
            n_diverged=diverged.n_cached,
            checkpoints=self._checkpoints,
        )

    async def _run(self, tokens: list[int], n_predict: int) -> Ran:
        return await self._client.run(self._slot, tokens, n_predict, KV_TEST_STEP_S)

    async def _keep(self, n_tokens: int) -> str:
        """A replica of what the slot holds now."""
        path = self._save_dir / f"test-{uuid.uuid4().hex}"
        try:
            done = await self._client.save(self._slot, path.name, KV_TEST_STEP_S)
            if done.n_saved != n_tokens:
                raise KvError("not_portable", f"the engine saved {done.n_saved} of {n_tokens} tokens")
            file = StateFile(
                path=str(path),
                session=secrets.token_bytes(32),
                model_fp=self._model_fp,
                generation=1,
                created_unix_s=time.time(),
                source="self-test",
                checkpoints=KV_CHECKPOINTS_KEPT,
                n_written=done.n_written,
                n_saved=done.n_saved,
            )
            return (await self._worker.keep(file)).replica
        finally:
            await remove_file(path)

    async def _moved(self, replica: str, tokens: list[int]) -> Ran:
        """The prompt after the replica was restored into the empty slot."""
        if not await self._restored(replica) and self._checkpoints:
            self._checkpoints = 0  # the engine does not read them
            await self._restored(replica)
        return await self._run(tokens, 1)

    async def _restored(self, replica: str) -> bool:
        """Did the engine read the whole file?"""
        path = self._save_dir / f"test-{uuid.uuid4().hex}"
        try:
            rendered = await self._worker.render(replica, self._target(self._checkpoints), path)
            await self._client.erase(self._slot)
            done = await self._client.restore(self._slot, path.name, KV_TEST_STEP_S)
        finally:
            await remove_file(path)
        if done.n_restored != rendered.n_tokens:
            raise KvError(
                "not_portable", f"the engine restored {done.n_restored} of {rendered.n_tokens} tokens"
            )
        return done.n_read == rendered.total_bytes
