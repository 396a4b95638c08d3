"""What a prompt shares with a state: as many tokens as the engine itself finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.real_engine import Build, Engine, real_engine
from viiwork.core.replicas import Replica
from viiwork.core.turn import Ask, Outcome, Usage
from viiwork.engine.slots import SlotsClient
from viiwork.errors import EngineError, KvError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import StateFile
from viiwork.node.kv_prompt import CHAT, COMPLETION, Prompts, packed

from .importing import KEY, Bench
from .importing import ask as asking

TEXT = "The river town kept a ledger of every flood. "
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Layout:
    """Of an engine whose states are not cut anywhere."""

    cuts_anywhere = False

    def __init__(self, client: Any) -> None:
        self.client = client


def ask(body: bytes, request_id: str = "1") -> Ask:
    return Ask(request_id, "m", session="s", body_bytes=len(body))


def replica(name: str, n_tokens: int = 100) -> Replica:
    return Replica(name, ("s", "m"), n_tokens, 1000, 1, "b")


async def common(worker: Any, client: Any, path: str, body: bytes, name: str = "r") -> int | None:
    prompts = Prompts(worker)
    prompts.put("1", path, body)
    layout: Any = Layout(client)
    return await prompts.common_tokens(ask(body), layout, replica(name))


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[KvWorker]:
    made = KvWorker(tmp_path / "replicas", 1 << 30)
    await made.start()
    yield made
    await made.stop()


async def kept(engine: Engine, worker: KvWorker) -> str:
    """A replica of slot 0."""
    path, _ = await engine.save_as(0, "s.bin")
    facts: Any = {"session": b"s" * 32, "model_fp": b"m" * 32, "generation": 1}
    return (await worker.keep(StateFile(path=str(path), created_unix_s=1.0, source="a", **facts))).replica


def chat(*said: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return {"model": "m", "messages": messages, **more}


@pytest.mark.engine
async def test_as_many_tokens_are_shared_as_the_engine_reuses(
    smollm2: Path, tmp_path: Path, worker: KvWorker
) -> None:
    first = chat("Tell me of floods. " + TEXT * 30)
    async with (
        real_engine(smollm2, tmp_path / "e", Build()) as engine,
        aiohttp.ClientSession() as http,
    ):
        client = SlotsClient(engine.url, http, 1)
        run = {"id_slot": 0, "max_tokens": 4, "temperature": 0}
        said = await engine.post(CHAT, first | run)
        name = await kept(engine, worker)
        answer = said["choices"][0]["message"]["content"]
        nexts = [
            (CHAT, chat(first["messages"][0]["content"], answer, "And then?")),
            (CHAT, chat(first["messages"][0]["content"], answer + " More.", "And then?", stream=True)),
            (CHAT, chat("Tell me of floods. " + TEXT * 3 + "No.")),
            (CHAT, chat("Say it.", tools=[TOOL])),
            (COMPLETION, {"model": "m", "prompt": TEXT}),
        ]
        for path, body in nexts:
            shared = await common(worker, client, path, json.dumps(body).encode(), name)
            await engine.restore(0, (engine.folder / "s.bin").read_bytes())
            ran = await engine.post(path, body | run | {"stream": False})
            timings = ran["timings"]
            whole = timings["cache_n"] + timings["prompt_n"]
            # The last token of a prompt is read again, if the state has it all.
            assert shared is not None and timings["cache_n"] == min(shared, whole - 1)


class Tokenizer:
    """Makes a token of each character, if it is let."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault, self.n_asked = fault, 0
        self.silent = False

    async def templated(self, body: bytes, timeout_s: float) -> str:
        if self.fault is not None:
            raise self.fault
        return "".join(message["content"] for message in json.loads(body)["messages"])

    async def tokenized(self, text: str, timeout_s: float) -> list[int]:
        self.n_asked += 1
        if self.silent:
            await asyncio.Event().wait()
        return [ord(char) for char in text]


class Holds:
    """A worker whose replicas hold these tokens."""

    def __init__(self, tokens: str) -> None:
        self.tokens = packed([ord(char) for char in tokens])
        self.fault: Exception | None = None

    async def common_tokens(self, name: str, tokens: bytes) -> int:
        if self.fault is not None:
            raise self.fault
        same = (i for i in range(0, min(len(tokens), len(self.tokens)), 4))
        return next((i // 4 for i in same if tokens[i : i + 4] != self.tokens[i : i + 4]), len(tokens) // 4)


@pytest.mark.parametrize(
    ("path", "body", "n"),
    [
        (CHAT, chat("abcxyz"), 3),
        (COMPLETION, {"prompt": "abcdxy"}, 4),
        (COMPLETION, {"prompt": [97, 98, 7]}, 2),
        (COMPLETION, {"prompt": "x"}, 0),
        (COMPLETION, {"prompt": ["abc", "abd"]}, None),
        (COMPLETION, {"prompt": [97, 2**40]}, None),
        (COMPLETION, {"prompt": ""}, None),
        (COMPLETION, {}, None),
        ("/v1/messages", chat("abc"), None),
    ],
)
async def test_prompts_of_each_endpoint(path: str, body: Any, n: int | None) -> None:
    assert await common(Holds("abcdefg"), Tokenizer(), path, json.dumps(body).encode()) == n


@pytest.mark.parametrize("fault", [EngineError("500"), KvError("too_large", "too many")])
async def test_an_engine_that_does_not_tell_leaves_it_unknown(fault: Exception) -> None:
    assert await common(Holds("abc"), Tokenizer(fault), CHAT, json.dumps(chat("abc")).encode()) is None
    holds = Holds("abc")
    holds.fault = fault
    assert await common(holds, Tokenizer(), CHAT, json.dumps(chat("abc")).encode()) is None


async def test_an_engine_that_is_silent_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viiwork.node.kv_prompt.KV_PROMPT_S", 0.01)
    silent = Tokenizer()
    silent.silent = True
    assert await common(Holds("abc"), silent, CHAT, json.dumps(chat("abc")).encode()) is None


async def test_a_dense_state_needs_no_tokens_and_the_tokens_of_a_request_are_made_once() -> None:
    body, tokenizer = json.dumps(chat("abc")).encode(), Tokenizer()
    holds: Any = Holds("abcdefg")
    prompts, layout = Prompts(holds), Layout(tokenizer)
    hybrid: Any = layout
    prompts.put("1", CHAT, body)
    assert await prompts.common_tokens(ask(body), hybrid, replica("r")) == 3
    assert await prompts.common_tokens(ask(body), hybrid, replica("r")) == 3
    assert tokenizer.n_asked == 1
    layout.cuts_anywhere = True
    assert await prompts.common_tokens(ask(body), hybrid, replica("r")) is None


async def test_a_state_is_rendered_as_far_as_the_prompt_shares_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.put(1000, 2, 10)
    bench.prompts.shared = 900
    grant = await bench.d.acquire(asking(1))
    assert bench.worker.useful == 900 and bench.engine.asked == ["restore 0"]
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(900, 100, 1)))


async def test_a_state_the_prompt_shares_nothing_with_is_not_restored(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.put(1000, 2, 10)
    bench.prompts.shared = 0
    grant = await bench.d.acquire(asking(1))
    assert bench.worker.useful is None and bench.engine.asked == []
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(0, 1000, 1)))


async def test_a_slot_stays_as_it_is_where_nothing_that_was_kept_is_of_the_prompt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    grant = await bench.d.acquire(asking(1, 1))
    bench.engine.ran(0, 500)
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(0, 500, 1)))
    replica = bench.put(1000, 2, 10**15)
    bench.prompts.shared, bench.worker.faults = 900, ["not_held"]
    grant = await bench.d.acquire(asking(2))
    held = bench.d.sessions.get(KEY)
    assert held is not None and held.n_tokens == 500 and held.ref is not None
    assert bench.engine.asked == [] and bench.replicas.get(KEY) is None
    await bench.importer.stop()
    assert bench.worker.dropped in ([], [replica.name])
    bench.d.finish(grant, Outcome("done", 200, usage=Usage(500, 500, 1)))


async def test_a_request_that_is_over_or_another_of_its_name_is_not_known() -> None:
    body = json.dumps(chat("abc")).encode()
    holds: Any = Holds("abc")
    prompts = Prompts(holds)
    layout: Any = Layout(Tokenizer())
    prompts.put("1", CHAT, body)
    assert await prompts.common_tokens(ask(body + b" "), layout, replica("r")) is None
    prompts.forget("1")
    prompts.forget("1")
    assert await prompts.common_tokens(ask(body), layout, replica("r")) is None
