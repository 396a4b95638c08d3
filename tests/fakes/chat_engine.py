"""A stand-in for llama-server that answers chats: takes its command line, does what a request's body says.

`hold_s` in the body delays the answer, `max_tokens` chunks of a stream come 10 ms apart, `told` are the
token counts at its end. `GET /seen` lists
the chats that came in. With CHAT_ENGINE_LIES=1 it reports its busy slots up to two seconds late, and at times
more of them than it has. A question named in CHAT_ENGINE_LOSES is taken and never begun. While the file of
CHAT_ENGINE_DEAD is there no token is computed, though all else is answered; SIGTERM is ignored.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque

from aiohttp import web


def argument(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


N_SLOTS = int(argument("--parallel", "1"))
N_CTX = int(argument("--ctx-size", "0")) // N_SLOTS
DEAD = os.environ.get("CHAT_ENGINE_DEAD", "")
LIES = os.environ.get("CHAT_ENGINE_LIES") == "1"


class Engine:
    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.seen: list[str] = []
        self.past: deque[tuple[float, set[int]]] = deque(maxlen=4096)
        self.n_asked = 0

    def changed(self) -> None:
        self.past.append((time.monotonic(), set(self.busy)))

    def reported(self) -> set[int]:
        if not LIES:
            return self.busy
        self.n_asked += 1
        if self.n_asked % 5 == 0:
            return set(range(N_SLOTS + 3))
        until = time.monotonic() - 2.0 * (self.n_asked % 3) / 2
        return next((busy for at, busy in reversed(self.past) if at <= until), set())

    async def slots(self, request: web.Request) -> web.Response:
        busy = self.reported()
        ids = range(max(N_SLOTS, len(busy)) if LIES else N_SLOTS)
        return web.json_response(
            [
                {"id": i, "n_ctx": N_CTX, "is_processing": i in busy, "id_task": 1, "n_prompt_tokens": 1}
                for i in ids
            ]
        )

    async def completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        await alive()
        return web.json_response({"content": "x", "id_slot": body.get("id_slot", 0)})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        slot = body.get("id_slot", -1)
        self.seen.append(body["messages"][-1]["content"])
        if self.seen[-1] == os.environ.get("CHAT_ENGINE_LOSES"):
            await asyncio.Event().wait()
        await alive()
        if slot in self.busy:
            return web.json_response({"error": {"message": f"slot {slot} runs two requests"}}, status=500)
        self.busy.add(slot)
        self.changed()
        try:
            await asyncio.sleep(body.get("hold_s", 0))
            if body.get("stream"):
                return await self.stream(request, body.get("max_tokens", 3), body.get("told"))
            return web.json_response(
                {
                    "object": "chat.completion",
                    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}],
                    "timings": {"cache_n": 0, "prompt_n": 5, "predicted_n": 1},
                }
            )
        finally:
            self.busy.discard(slot)
            self.changed()

    async def stream(self, request: web.Request, n_chunks: int, told: object) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(n_chunks):
            await answer.write(b'data: {"choices":[{"index":0,"delta":{"content":"tok "}}]}\n\n')
            await asyncio.sleep(0.01)
        if told is not None:
            last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": told}
            await answer.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def alive() -> None:
    while DEAD and os.path.exists(DEAD):
        await asyncio.sleep(0.02)


def main() -> None:
    if "--help" in sys.argv:
        print("a chat engine for tests")
        return
    engine = Engine()
    app = web.Application()
    app.router.add_get("/health", lambda request: _ok())
    app.router.add_get("/slots", engine.slots)
    app.router.add_get("/seen", lambda request: _json(engine.seen))
    app.router.add_post("/completion", engine.completion)
    app.router.add_post("/v1/chat/completions", engine.chat)
    if DEAD:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    web.run_app(
        app,
        handle_signals=not DEAD,
        host="127.0.0.1",
        port=int(argument("--port")),
        print=None,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.1,
    )


async def _ok() -> web.Response:
    return web.json_response({"status": "ok"})


async def _json(value: object) -> web.Response:
    return web.Response(text=json.dumps(value), content_type="application/json")


if __name__ == "__main__":
    main()
