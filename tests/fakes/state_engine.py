"""A stand-in for llama-server whose slots hold tokens, which it saves and restores; it computes nothing.

A chat's prompt has a token for each word; reading a new one takes PREFILL_MS. A token's state is ROW_BYTES
that follow from the tokens up to it and cannot be packed. A save takes SAVE_S and stops every slot, as the
real engine's does. What happens is written to the file SEEN, a line each: `begin TEXT`, `end TEXT`, `save`,
`saved`, `restore N`; the node's probe and self-test leave no lines. While the file LIES is there, a restore
answers well and the slot's next turn reuses nothing.
"""

import asyncio
import json
import os
import random
import struct
import sys
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

from aiohttp import web

MAGIC, N_LAYER = 0x67677371, 4


def argument(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


N_SLOTS = int(argument("--parallel", "1"))
N_CTX = int(argument("--ctx-size", "0")) // N_SLOTS
SAVES = Path(argument("--slot-save-path", "."))
PREFILL_S = float(os.environ.get("PREFILL_MS", "0")) / 1000
ROW_BYTES = int(os.environ.get("ROW_BYTES", "8192"))
SAVE_S = float(os.environ.get("SAVE_S", "0"))
LIES = Path(os.environ.get("LIES", "/nonexistent"))


def tokens_of(messages: list[dict[str, str]]) -> list[int]:
    words = [word for message in messages for word in ("<turn>", *message["content"].split())]
    return [zlib.crc32(word.encode()) % 49_000 for word in words]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def save_file(tokens: list[int], slot: int) -> bytes:
    """As `tests/fakes/savefiles.py` makes them, of one dense cache."""
    n, row = len(tokens), ROW_BYTES // (2 * N_LAYER)
    words = [-1, 1, n, *tokens, 0]
    out = [struct.pack("<3I", MAGIC, 4, len(words)), struct.pack(f"<{len(words)}i", *words)]
    out.append(struct.pack("<I", N_SLOTS) + bytes(4 * slot) + struct.pack("<I", n))
    out += [struct.pack("<iIi", position, 1, slot) for position in range(n)]
    out.append(struct.pack("<4I", 0, N_LAYER, 0, 0))
    seeds = list(
        accumulate(tokens, lambda seed, token: zlib.crc32(struct.pack("<I", token), seed), initial=0)
    )
    for segment in range(2 * N_LAYER):
        rows = [random.Random(seed << 8 | segment).randbytes(row) for seed in seeds[1:]]
        out += [struct.pack("<iQ", 1, row), *rows]
    return b"".join([*out, bytes(4 * (N_SLOTS - 1 - slot))])


def saved_tokens(data: bytes) -> list[int]:
    (n,) = struct.unpack_from("<i", data, 20)
    return list(struct.unpack_from(f"<{n}i", data, 24))


def is_test(path: Path) -> bool:
    return path.name.startswith(("probe-", "test-"))


def seen(what: str) -> None:
    with open(os.environ["SEEN"], "a") as file:
        file.write(what + "\n")


class Engine:
    def __init__(self) -> None:
        self.held: list[list[int]] = [[1] for _ in range(N_SLOTS)]
        self.busy: set[int] = set()
        self.tasks = list(range(N_SLOTS))  # the last one of each slot
        self.useless: set[int] = set()  # slots whose restored state will give no reuse
        self.stop = asyncio.Lock()  # held while all slots stand still

    async def slots(self, request: web.Request) -> web.Response:
        return web.json_response(
            [
                {
                    "id": i,
                    "n_ctx": N_CTX,
                    "is_processing": i in self.busy,
                    "id_task": self.tasks[i],
                    "n_prompt_tokens": len(self.held[i]),
                }
                for i in range(N_SLOTS)
            ]
        )

    async def completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        slot, prompt = body.get("id_slot", 0), body["prompt"]
        prompt = [1] if isinstance(prompt, str) else prompt
        reused = self.begin(slot, prompt)
        self.held[slot] = prompt
        told = {"cache_n": reused, "prompt_n": len(prompt) - reused}
        return web.json_response({"content": "x", "tokens": [7], "id_slot": slot, "timings": told})

    def begin(self, slot: int, prompt: list[int]) -> int:
        """A task starts in the slot; the answer is how many tokens it needs not read."""
        self.tasks[slot] = max(self.tasks) + 1
        if slot in self.useless:
            self.useless.discard(slot)
            return 0
        return min(common(prompt, self.held[slot]), len(prompt) - 1)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": tokens_of([{"content": body["content"]}])})

    async def act(self, request: web.Request) -> web.Response:
        slot, action = int(request.match_info["slot"]), request.query["action"]
        if action == "erase":
            n, self.held[slot] = len(self.held[slot]), []
            return web.json_response({"id_slot": slot, "n_erased": n})
        path = SAVES / (await request.json())["filename"]
        async with self.stop:
            return web.json_response(await (self.save if action == "save" else self.restore)(slot, path))

    async def save(self, slot: int, path: Path) -> dict[str, Any]:
        if not is_test(path):
            seen("save")
        await asyncio.sleep(SAVE_S)
        data = save_file(self.held[slot], slot)
        path.write_bytes(data)
        if not is_test(path):
            seen("saved")
        done = {"n_saved": len(self.held[slot]), "n_written": len(data)}
        return {"id_slot": slot, **done, "timings": {"save_ms": SAVE_S * 1000}}

    async def restore(self, slot: int, path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        self.held[slot] = saved_tokens(data)
        if LIES.exists():
            self.useless.add(slot)
        if not is_test(path):
            seen(f"restore {len(self.held[slot])}")
        done = {"n_restored": len(self.held[slot]), "n_read": len(data)}
        return {"id_slot": slot, **done, "timings": {"restore_ms": 1.0}}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        slot, text = body["id_slot"], body["messages"][-1]["content"][:40]
        if slot in self.busy:
            return web.json_response({"error": {"message": f"slot {slot} runs two requests"}}, status=500)
        self.busy.add(slot)
        seen(f"begin {text}")
        try:
            prompt = tokens_of(body["messages"])
            reused = self.begin(slot, prompt)
            await asyncio.sleep((len(prompt) - reused) * PREFILL_S)
            n_words = body.get("max_tokens", 3)
            told = {"cache_n": reused, "prompt_n": len(prompt) - reused, "predicted_n": n_words}
            answer = [f"w{i}" for i in range(n_words)]
            self.held[slot] = prompt + tokens_of([{"content": " ".join(answer)}])
            if body.get("stream"):
                return await self.stream(request, answer, told)
            await asyncio.sleep(body.get("hold_s", 0))
            message = {"role": "assistant", "content": " ".join(answer)}
            return web.json_response({"choices": [{"index": 0, "message": message}], "timings": told})
        finally:
            self.busy.discard(slot)
            seen(f"end {text}")

    async def stream(
        self, request: web.Request, answer: list[str], told: dict[str, int]
    ) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for word in answer:
            async with self.stop:
                chunk = {"choices": [{"index": 0, "delta": {"content": word + " "}}]}
            await out.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0.01)
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": told}
        await out.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return out


def main() -> None:
    if "--help" in sys.argv:
        print("a state engine for tests")
        return
    engine = Engine()
    app = web.Application()

    async def props(request: web.Request) -> web.Response:
        return web.json_response({"total_slots": N_SLOTS, "default_generation_settings": {"n_ctx": N_CTX}})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.router.add_get("/health", health)
    app.router.add_get("/props", props)
    app.router.add_get("/slots", engine.slots)
    app.router.add_post("/completion", engine.completion)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_post("/slots/{slot}", engine.act)
    app.router.add_post("/v1/chat/completions", engine.chat)
    web.run_app(
        app,
        host="127.0.0.1",
        port=int(argument("--port")),
        print=None,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.1,
    )


if __name__ == "__main__":
    main()
