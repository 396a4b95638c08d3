"""Coding agents that build a todo app from a spec: what each says and when, from its own seed; and its turns.

A session is a plan without end: a task is read, files are looked at and written, tests are run, and when the
context is full the agent begins anew with a summary. Nothing of it depends on how fast it is answered.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from viiwork.limits import AGENT_ANSWER_MAX_BYTES, AGENT_TURN_MAX_S

PLANNED_TOKENS_PER_S = 30.0  # of an answer
CHARS_A_TOKEN = 4  # of the simulated engine exactly, of a real one about
_PARTS = (
    "model storage api views filters search tags due-dates reminders archive undo sync auth settings "
    "import export keyboard theme tests docs"
).split()
_TOOLS = ("read", "write", "grep", "run-tests", "lint", "list")
_WORDS = (
    "todo item list user due date done filter store query index view state event click save load error "
    "test assert render route field form input button label async await return value key json schema "
    "update delete create patch merge sort group count page limit offset cache token session"
).split()


@dataclass(frozen=True, slots=True)
class Shape:
    """What sessions are like: tokens and seconds of the modelled system, medians of lognormal draws."""

    system_tokens: int = 6000  # system prompt and tools: the same for all agents
    spec_tokens: int = 8000  # its own spec, and the files it begins with
    result_tokens: float = 1150.0  # what a tool answers
    result_most: int = 1600
    answer_tokens: float = 200.0
    answer_most: int = 600
    think_s: float = 16.0  # the tool runs, or the agent's user reads
    think_most_s: float = 120.0
    begin_s: float = 120.0  # within which sessions begin, one here and one there
    compact_tokens: int = 48_000  # where a session begins anew
    summary_tokens: int = 1500
    spread: float = 0.6  # sigma of the draws

    def fitting(self, context: int) -> Shape:
        """The same sessions, made smaller to fit a slot of `context` tokens."""
        room = (self.compact_tokens + self.result_most + self.answer_most) * 1.2
        share = min(1.0, context / room)
        if share == 1.0:
            return self
        return replace(
            self,
            system_tokens=int(self.system_tokens * share),
            spec_tokens=int(self.spec_tokens * share),
            result_tokens=self.result_tokens * share,
            result_most=int(self.result_most * share),
            answer_tokens=self.answer_tokens * share,
            answer_most=max(8, int(self.answer_most * share)),
            compact_tokens=int(self.compact_tokens * share),
            summary_tokens=int(self.summary_tokens * share),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The next turn: wait, then ask with these messages."""

    think_s: float
    messages: list[dict[str, str]]
    max_tokens: int
    compacted: bool  # the context before is gone, so nothing can be warm

    @property
    def planned_s(self) -> float:
        """How long it takes by the plan, whatever it takes in fact: all runs of a seed do the same work."""
        return self.think_s + self.max_tokens / PLANNED_TOKENS_PER_S


class Agent:
    """One session's plan; `next_step` and `answered` take turns."""

    def __init__(self, number: int, seed: int, shape: Shape) -> None:
        self.key = f"bench-{seed}-{number}"
        self._rng = random.Random(f"{seed}/{number}")
        self._shape = shape
        shared = random.Random(seed)
        tools = "\n".join(f"{tool}: {prose(shared, shape.system_tokens // len(_TOOLS))}" for tool in _TOOLS)
        self._system = {"role": "system", "content": f"You build software with these tools.\n{tools}"}
        self._spec = f"Spec of the todo app of {self.key}:\n{prose(self._rng, shape.spec_tokens)}"
        self._n = 0
        self._has_begun = True
        self._tokens = 0
        self._messages: list[dict[str, str]] = []
        self._begin("")
        # As if it had gone on for a while: all contexts being small at once would be no session's everyday.
        so_far = self._rng.randrange(max(1, shape.compact_tokens - shape.system_tokens - shape.spec_tokens))
        while self._tokens < shape.system_tokens + shape.spec_tokens + so_far:
            step = self.next_step()
            self.answered(prose(self._rng, step.max_tokens))
        self._has_begun = False

    def next_step(self) -> Step:
        compacted = self._tokens > self._shape.compact_tokens
        if compacted:
            self._begin(f"Done so far: {prose(self._rng, self._shape.summary_tokens)}")
        elif self._n:
            tool, part = self._rng.choice(_TOOLS), self._rng.choice(_PARTS)
            n = min(self._draw(self._shape.result_tokens), self._shape.result_most)
            self._say("user", f"Result of {tool} {part}:\n{prose(self._rng, max(1, int(n)))}")
        think_s = min(self._draw(self._shape.think_s), self._shape.think_most_s)
        if not self._has_begun:
            think_s = self._rng.uniform(0.0, self._shape.begin_s)
        self._n += 1
        self._has_begun = True
        n = min(self._draw(self._shape.answer_tokens), self._shape.answer_most)
        return Step(think_s, list(self._messages), max(8, int(n)), compacted)

    def answered(self, text: str) -> None:
        self._say("assistant", text)

    def _begin(self, summary: str) -> None:
        self._tokens = len(self._system["content"]) // CHARS_A_TOKEN
        self._messages = [self._system]
        part = self._rng.choice(_PARTS)
        self._say("user", f"{self._spec}\n{summary}\nBuild its {part}. Begin.")

    def _say(self, role: str, text: str) -> None:
        self._messages.append({"role": role, "content": text})
        self._tokens += len(text) // CHARS_A_TOKEN

    def _draw(self, median: float) -> float:
        return self._rng.lognormvariate(0.0, self._shape.spread) * median


def prose(rng: random.Random, n_tokens: int) -> str:
    """About `n_tokens` of words, in lines."""
    words: list[str] = []
    left = CHARS_A_TOKEN * n_tokens
    while left > 0:
        word = rng.choice(_WORDS)
        if rng.random() < 0.3:
            word = f"{word}{rng.randrange(1000)}"
        words.append(word + ("\n" if len(words) % 12 == 11 else " "))
        left -= len(words[-1])
    return "".join(words)


@dataclass(slots=True)
class Turn:
    """How one turn went."""

    session: int
    at_s: float  # since the run began
    ttft_s: float = 0.0
    node: str = ""
    cached: int | None = None  # tokens of the prompt the engine had; None = it did not say
    prompt: int | None = None
    moved: bool = False  # another node than the session's turn before
    compacted: bool = False
    failed: str = ""
    counts: bool = True  # not of the time in which all began


@dataclass(slots=True)
class Drive:
    """What all agents of one run share."""

    model: str
    speed: float  # think times are so many times shorter
    began_at: float
    planned_s: float  # a session ends when its plan's own clock says so
    warm_s: float  # and its turns count from there on
    until: float  # no turn begins later, on the monotonic clock
    tell: Callable[[Turn], None]
    turns: list[Turn] = field(default_factory=list)


async def drive(
    number: int, agent: Agent, api: str, http: aiohttp.ClientSession, run: Drive, retry_s: float = 1.0
) -> None:
    """Have one agent take its turns at `api` until the run is over; a refused turn is asked again."""
    before, planned_s = "", 0.0
    while True:
        step = agent.next_step()
        planned_s += step.planned_s
        if planned_s > run.planned_s:
            return
        await asyncio.sleep(step.think_s / run.speed)
        while True:
            if time.monotonic() >= run.until:
                return
            turn = Turn(number, time.monotonic() - run.began_at, compacted=step.compacted)
            turn.counts = planned_s > run.warm_s
            text = await _take(turn, step, agent.key, api, http, run.model)
            run.turns.append(turn)
            turn.moved = bool(before and turn.node and turn.node != before)
            run.tell(turn)
            if not turn.failed:
                break
            await asyncio.sleep(retry_s)
        before = turn.node
        agent.answered(text)


async def _take(turn: Turn, step: Step, key: str, api: str, http: aiohttp.ClientSession, model: str) -> str:
    """One streamed chat; what it said. A fault is written into `turn`."""
    body = {
        "model": model,
        "messages": step.messages,
        "max_tokens": step.max_tokens,
        "stream": True,
        "temperature": 0,
    }
    began_at = time.monotonic()
    try:
        async with asyncio.timeout(AGENT_TURN_MAX_S):
            async with http.post(
                f"{api}/v1/chat/completions", json=body, headers={"X-Session-Id": key}
            ) as answer:
                turn.node = answer.headers.get("X-Viiwork-Node", "")
                if answer.status != 200:
                    turn.failed = f"status {answer.status}"
                    return ""
                return await _read(turn, answer, began_at)
    except (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError, ValueError) as error:
        turn.failed = type(error).__name__
        return ""


async def _read(turn: Turn, answer: aiohttp.ClientResponse, began_at: float) -> str:
    parts: list[str] = []
    n_bytes = 0
    async for line in answer.content:
        n_bytes += len(line)
        if n_bytes > AGENT_ANSWER_MAX_BYTES:
            raise ValueError("an answer without end")
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            turn.failed = "cut off"
            return ""
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            if said := delta.get("content") or delta.get("reasoning_content"):
                turn.ttft_s = turn.ttft_s or time.monotonic() - began_at
                parts.append(said)
        timings = event.get("timings")
        if isinstance(timings, dict) and "cache_n" in timings:
            turn.cached = int(timings["cache_n"])
            turn.prompt = turn.cached + int(timings.get("prompt_n", 0))
    if not parts:
        turn.failed = "no answer"
    return "".join(parts)
