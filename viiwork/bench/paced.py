"""A simulated llama.cpp server: its slots, its reuse, its save-files, and the pace it is told; no model.

It takes llama-server's command line and a few `--paced-` options of its own. Prompts are read and tokens made
one batch after the other for all slots together; a save or a restore stops them all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from viiwork.bench.paced_slots import PacedSlot, PacedSlots, answer_text, chat_prompt, tokens_of
from viiwork.bench.paced_state import PacedModel, PacedStates
from viiwork.limits import MIB, PACED_BODY_MAX_BYTES

BUILD = "viiwork-paced"
BATCH = 512  # prompt tokens read at once, as llama.cpp's micro-batch
STEP_S = 0.04  # the least time a step takes: several tokens then come in one event
SHARED = 0.15  # by so much of a single slot's step each further slot makes a step longer
RAM_MIB = 8192  # --cache-ram of llama.cpp, when none is given
ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates of the modelled engine, times `speed`."""

    prefill_per_s: float  # prompt tokens
    decode_per_s: float  # tokens of one slot alone
    save_bytes_per_s: float
    speed: float
    scale: int

    def step_s(self, n_prompt: int, n_decoding: int, n_each: int) -> float:
        decode = n_each * (1 + SHARED * (n_decoding - 1)) / self.decode_per_s if n_decoding else 0.0
        return (n_prompt / self.prefill_per_s + decode) / self.speed

    def stall_s(self, n_bytes: int) -> float:
        """Of a save or restore, by the size the state has at full scale."""
        return n_bytes * self.scale / self.save_bytes_per_s / self.speed

    def tokens_a_step(self) -> int:
        return max(1, round(self.decode_per_s * self.speed * STEP_S))


@dataclass(slots=True)
class Task:
    """One completion."""

    prompt: array[int]
    n_predict: int
    wanted: int | None
    slot: PacedSlot | None = None
    n_cached: int = 0
    n_read: int = 0
    n_made: int = 0
    answer: list[str] = field(default_factory=list)
    began_at: float = 0.0
    read_at: float = 0.0
    left: bool = False  # the client is gone
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        return self.read_at > 0 and self.n_made >= self.n_predict

    def timings(self, now: float) -> dict[str, Any]:
        return {
            "cache_n": self.n_cached,
            "prompt_n": self.n_read,
            "prompt_ms": round(1000 * (self.read_at - self.began_at), 3),
            "predicted_n": self.n_made,
            "predicted_ms": round(1000 * max(now - self.read_at, 0.0), 3),
        }


class PacedEngine:
    """One loop does all the work, a step at a time; handlers wait for what it tells them."""

    def __init__(self, pace: Pace, n_slots: int, ram_bytes: int, save_dir: Path | None) -> None:
        model = PacedModel(pace.scale)
        self.slots = PacedSlots(n_slots, ram_bytes, model.bytes_of)
        self.save_dir = save_dir
        self._pace = pace
        self._states = PacedStates(model, n_slots)
        self._queue: deque[Task] = deque()
        self._running: list[Task] = []
        self._actions: deque[tuple[PacedSlot, Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()

    def submit(self, task: Task) -> None:
        self._queue.append(task)
        self._wake.set()

    async def act(self, slot: PacedSlot, action: Callable[[], Any]) -> tuple[Any, float]:
        """Run `action` in a thread once the slot is idle, with all slots stopped; what it said, and ms."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._actions.append((slot, action, future))
        self._wake.set()
        return await future  # type: ignore[no-any-return]

    async def run(self) -> None:
        at = 0.0
        while True:
            await self._act_all()
            self._start_all()
            if not self._running:
                self._wake.clear()
                if not self._actions:
                    await self._wake.wait()
                at = 0.0
                continue
            n_prompt, decoding, n_each = self._plan()
            now = time.monotonic()
            at = max(at, now) + self._pace.step_s(sum(n_prompt.values()), len(decoding), n_each)
            await asyncio.sleep(max(at - now, 0))
            self._step(n_prompt, decoding, n_each)

    # -- the loop's parts --------------------------------------------------------------------------
    async def _act_all(self) -> None:
        for _ in range(len(self._actions)):
            slot, action, future = self._actions.popleft()
            if future.cancelled():
                continue
            if slot.busy:
                self._actions.append((slot, action, future))
                continue
            began = time.monotonic()
            try:
                said, n_bytes = await asyncio.to_thread(action)
                await asyncio.sleep(max(0.0, self._pace.stall_s(n_bytes) - (time.monotonic() - began)))
            except (OSError, ValueError) as error:
                if not future.cancelled():
                    future.set_exception(error)
                continue
            if not future.cancelled():
                future.set_result((said, 1000 * (time.monotonic() - began)))

    def _start_all(self) -> None:
        for _ in range(len(self._queue)):
            task = self._queue.popleft()
            if task.left:
                continue
            slot = self.slots.choose(task.prompt, task.wanted)
            if slot is None:
                self._queue.append(task)
                continue
            task.slot, task.began_at = slot, time.monotonic()
            task.n_cached = self.slots.begin(slot, task.prompt)
            task.answer = answer_text(task.prompt, task.n_predict)
            self._running.append(task)

    def _plan(self) -> tuple[dict[int, int], list[Task], int]:
        """Prompt tokens by index of the running task, who makes tokens, and how many each."""
        room, n_prompt = BATCH, {}
        for at, task in enumerate(self._running):
            if not task.read_at and room:
                n_prompt[at] = min(room, len(task.prompt) - task.n_cached - task.n_read)
                room -= n_prompt[at]
        decoding = [task for task in self._running if task.read_at]
        return n_prompt, decoding, 1 if n_prompt else self._pace.tokens_a_step()

    def _step(self, n_prompt: dict[int, int], decoding: list[Task], n_each: int) -> None:
        now = time.monotonic()
        for task in decoding:
            made = min(n_each, task.n_predict - task.n_made)
            # The last token made is not in memory: it would be read with the next one.
            self._extend(task, tokens_of("".join(task.answer[task.n_made - 1 : task.n_made + made - 1])))
            task.n_made += made
            task.news.set()
        for at, n in n_prompt.items():
            task = self._running[at]
            begin = task.n_cached + task.n_read
            self._extend(task, task.prompt[begin : begin + n])
            task.n_read += n
            if begin + n == len(task.prompt):
                assert task.slot is not None
                task.slot.held.prompt_read()
                task.read_at = now
                task.n_made = min(1, task.n_predict)
                task.news.set()
        for task in [task for task in self._running if task.done or task.left]:
            assert task.slot is not None
            task.slot.busy = False
            self._running.remove(task)
            task.news.set()

    def _extend(self, task: Task, tokens: array[int]) -> None:
        assert task.slot is not None
        task.slot.held.tokens.extend(tokens)

    # -- slot actions ------------------------------------------------------------------------------
    async def save(self, slot: PacedSlot, path: Path) -> dict[str, Any]:
        def write() -> tuple[int, int]:
            size = self._states.save(path, slot.held.tokens, slot.id)
            return size, size

        size, ms = await self.act(slot, write)
        return {"n_saved": len(slot.held.tokens), "n_written": size, "timings": {"save_ms": round(ms, 3)}}

    async def restore(self, slot: PacedSlot, path: Path) -> dict[str, Any]:
        def read() -> tuple[int, int]:
            slot.held.cut(0)  # also when the file turns out to be wrong
            tokens, size = self._states.restore(path, slot.id)
            self.slots.restored(slot, tokens)
            return size, size

        size, ms = await self.act(slot, read)
        n = len(slot.held.tokens)
        return {"n_restored": n, "n_read": size, "timings": {"restore_ms": round(ms, 3)}}

    async def erase(self, slot: PacedSlot) -> dict[str, Any]:
        n = len(slot.held.tokens)

        def empty() -> tuple[None, int]:
            slot.held.cut(0)
            return None, 0

        await self.act(slot, empty)
        return {"n_erased": n}


class PacedServer:
    """Its HTTP face, as far as viiwork and agents use it."""

    def __init__(self, engine: PacedEngine, name: str, n_ctx: int) -> None:
        self._engine = engine
        self._name = name
        self._n_ctx = n_ctx

    def app(self) -> web.Application:
        app = web.Application(client_max_size=PACED_BODY_MAX_BYTES)
        app.router.add_get("/health", _json({"status": "ok"}))
        app.router.add_get("/v1/models", _json({"data": [{"id": self._name, "object": "model"}]}))
        app.router.add_get("/props", self._props)
        app.router.add_get("/slots", self._slots)
        app.router.add_post("/slots/{id}", self._act)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/apply-template", self._apply_template)
        app.router.add_post("/completion", self._completion)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _props(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "total_slots": len(self._engine.slots.slots),
                "build_info": BUILD,
                "model_path": self._name,
                "is_sleeping": False,
                "default_generation_settings": {"n_ctx": self._n_ctx},
            }
        )

    async def _slots(self, request: web.Request) -> web.Response:
        found: list[dict[str, Any]] = []
        for slot in self._engine.slots.slots:
            found.append({"id": slot.id, "n_ctx": self._n_ctx, "is_processing": slot.busy})
            if slot.task is not None:
                found[-1] |= {"id_task": slot.task, "n_prompt_tokens": len(slot.held.tokens)}
        return web.json_response(found)

    async def _act(self, request: web.Request) -> web.Response:
        slots = self._engine.slots.slots
        slot = slots[int(request.match_info["id"]) % len(slots)]
        action = request.query.get("action")
        if action == "erase":
            return web.json_response({"id_slot": slot.id} | await self._engine.erase(slot))
        if action not in ("save", "restore") or self._engine.save_dir is None:
            return _refused(f"no such action: {action}")
        path = self._engine.save_dir / Path(str((await _body(request)).get("filename", ""))).name
        act = self._engine.save if action == "save" else self._engine.restore
        try:
            done = await act(slot, path)
        except (OSError, ValueError) as error:
            return _refused(f"unable to {action} slot: {error}")
        return web.json_response({"id_slot": slot.id, "filename": path.name} | done)

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = str((await _body(request)).get("content", ""))
        return web.json_response({"tokens": tokens_of(text).tolist()})

    async def _apply_template(self, request: web.Request) -> web.Response:
        body = await _body(request)
        return web.json_response({"prompt": chat_prompt(body.get("messages") or [], body.get("tools"))})

    async def _completion(self, request: web.Request) -> web.Response:
        body = await _body(request)
        prompt = body.get("prompt", "")
        tokens = array("i", prompt) if isinstance(prompt, list) else tokens_of(str(prompt))
        task = Task(tokens, _count(body.get("n_predict"), ANSWER_TOKENS), _slot(body))
        if (refusal := self._refusal(task)) is not None:
            return refusal
        await self._finished(task)
        content = "".join(task.answer[: task.n_made])
        more = {"tokens": tokens_of(content).tolist()} if body.get("return_tokens") else {}
        return web.json_response(
            more
            | {
                "content": content,
                "id_slot": task.slot.id if task.slot else -1,
                "stop": True,
                "tokens_cached": task.n_cached + task.n_read + max(task.n_made - 1, 0),
                "tokens_evaluated": len(tokens),
                "timings": task.timings(time.monotonic()),
            }
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        tokens = tokens_of(chat_prompt(body.get("messages") or [], body.get("tools")))
        task = Task(tokens, max(1, _count(body.get("max_tokens"), ANSWER_TOKENS)), _slot(body))
        if (refusal := self._refusal(task)) is not None:
            return refusal
        if body.get("stream"):
            return await self._stream(request, task)
        await self._finished(task)
        message = {"role": "assistant", "content": "".join(task.answer)}
        return web.json_response(
            {
                "object": "chat.completion",
                "model": self._name,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
            | _counts(task)
        )

    async def _stream(self, request: web.Request, task: Task) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._engine.submit(task)
        told = 0
        try:
            while True:
                await task.news.wait()
                task.news.clear()
                if task.n_made > told:
                    delta = {"content": "".join(task.answer[told : task.n_made])}
                    told = task.n_made
                    await _event(answer, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                if task.done:
                    break
        finally:
            task.left = True
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        await _event(answer, end | _counts(task))
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _refusal(self, task: Task) -> web.Response | None:
        n = len(task.prompt)
        if not n or n + task.n_predict > self._n_ctx:
            return _refused(f"a prompt of {n} tokens, the slot takes {self._n_ctx}")
        return None

    async def _finished(self, task: Task) -> None:
        self._engine.submit(task)
        try:
            while not task.done:
                await task.news.wait()
                task.news.clear()
        finally:
            task.left = True


def _counts(task: Task) -> dict[str, Any]:
    timings = task.timings(time.monotonic())
    n = len(task.prompt)
    usage = {"prompt_tokens": n, "completion_tokens": task.n_made, "total_tokens": n + task.n_made}
    usage["prompt_tokens_details"] = {"cached_tokens": task.n_cached}  # type: ignore[assignment]
    return {"usage": usage, "timings": timings}


async def _event(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        found = await request.json()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _slot(body: dict[str, Any]) -> int | None:
    wanted = body.get("id_slot")
    return wanted if isinstance(wanted, int) and wanted >= 0 else None


def _json(value: dict[str, Any]) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(value)

    return answer


def _refused(why: str) -> web.Response:
    return web.json_response({"error": {"code": 400, "message": why}}, status=400)


def arguments(pace: Pace) -> list[str]:
    """The options that make an engine of this pace."""
    return [
        *("--paced-prefill", f"{pace.prefill_per_s:g}"),
        *("--paced-decode", f"{pace.decode_per_s:g}"),
        *("--paced-save-mb", f"{pace.save_bytes_per_s / 1e6:g}"),
        *("--paced-speed", f"{pace.speed:g}"),
        *("--paced-scale", str(pace.scale)),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="viiwork-paced", description="A simulated llama.cpp server.", allow_abbrev=False
    )
    parser.add_argument("--alias", default="paced")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--cache-ram", type=int, default=RAM_MIB, help="MiB of full scale")
    parser.add_argument("--slot-save-path", type=Path)
    parser.add_argument("--paced-prefill", type=float, default=1500.0, help="prompt tokens a second")
    parser.add_argument("--paced-decode", type=float, default=35.0, help="tokens a second of one slot")
    parser.add_argument("--paced-save-mb", type=float, default=2000.0, help="MB/s of a save or a restore")
    parser.add_argument("--paced-speed", type=float, default=1.0, help="all of it so many times faster")
    parser.add_argument("--paced-scale", type=int, default=1, help="states so many times smaller")
    return parser


def main() -> None:
    args, _ = _parser().parse_known_args()
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    pace = Pace(
        args.paced_prefill, args.paced_decode, args.paced_save_mb * 1e6, args.paced_speed, args.paced_scale
    )
    ram = MIB * (args.cache_ram if args.cache_ram >= 0 else 1 << 30) // pace.scale
    engine = PacedEngine(pace, args.parallel, ram, args.slot_save_path)
    app = PacedServer(engine, args.alias, args.ctx_size // args.parallel).app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    sys.stderr.write(f"{BUILD}: simulated engine on {args.host}:{args.port}\n")
    with contextlib.suppress(asyncio.CancelledError):
        await engine.run()
    await runner.cleanup()


if __name__ == "__main__":
    main()
