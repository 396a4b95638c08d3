"""One measured chat turn, and the texts the demo talks about."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from viiwork.errors import UpstreamError

Messages = list[dict[str, str]]

_PLACES = "harbour bridge market tower garden station mill library quay orchard".split()
_THINGS = "lantern ladder barrel engine compass kettle violin anchor telescope map".split()
_PEOPLE = "Ada Bruno Clara Dmitri Elena Farid Greta Hugo Ines Jonas".split()
_VERBS = "repaired carried sold painted borrowed hid measured dropped cleaned traded".split()


@dataclass(slots=True)
class Turn:
    """What one chat turn cost, as its client saw it."""

    node: str
    prompt_tokens: int
    reused_tokens: int
    ttft_s: float
    answer: str
    headers: dict[str, str] = field(default_factory=dict)


def long_text(seed: int, n_lines: int) -> str:
    """A chronicle of about 17 tokens a line that shares no opening with that of another seed."""
    rng = random.Random(seed)
    lines = [f"Chronicle number {rng.randrange(10**6)}."]
    for day in range(1, n_lines):
        lines.append(
            f"Day {day}: {rng.choice(_PEOPLE)} {rng.choice(_VERBS)} the {rng.choice(_THINGS)} "
            f"near the {rng.choice(_PLACES)} for {rng.randrange(2, 99)} coins."
        )
    return "\n".join(lines)


async def run_turn(
    http: aiohttp.ClientSession,
    api: str,
    model: str,
    messages: Messages,
    *,
    headers: dict[str, str],
    max_tokens: int,
    on_progress: Callable[[int, int], None],
) -> Turn:
    """Stream one chat completion from the node at `api`; the answer is appended to `messages`.

    `on_progress` hears (prompt tokens read, prompt tokens in all) while the engine prefills. Raises
    `UpstreamError` with the node's message when the turn fails.
    """
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_progress": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    ttft_s: float | None = None
    timings: dict[str, Any] = {}
    answer: list[str] = []
    async with http.post(f"{api}/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise UpstreamError(f"{api} answered {response.status}: {(await response.text())[:200]}")
        async for line in _lines(response):
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise UpstreamError(f"{api}: {chunk['error'].get('message', 'the stream broke')}")
            if progress := chunk.get("prompt_progress"):
                on_progress(progress["processed"], progress["total"])
            timings = chunk.get("timings") or timings
            for choice in chunk.get("choices", ()):
                if text := choice["delta"].get("content"):
                    ttft_s = ttft_s if ttft_s is not None else time.perf_counter() - started
                    answer.append(text)
        seen = {name: value for name, value in response.headers.items() if name.startswith("X-")}
    if ttft_s is None or "cache_n" not in timings:
        raise UpstreamError(f"{api}: the answer was empty or had no timings")
    messages.append({"role": "assistant", "content": "".join(answer)})
    reused, read = timings["cache_n"], timings["prompt_n"]
    return Turn(seen.get("X-Viiwork-Node", "?"), reused + read, reused, ttft_s, "".join(answer), seen)


async def _lines(response: aiohttp.ClientResponse) -> Any:
    rest = b""
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
