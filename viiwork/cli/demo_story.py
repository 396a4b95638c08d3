"""The story `viiwork demo` tells: its steps, its progress and its table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from viiwork.cli.demo_chat import Messages, Turn, long_text, run_turn
from viiwork.cli.demo_nodes import (
    MODEL,
    MODEL_OF_B,
    DemoNode,
    check_addresses,
    get_json,
    plan_nodes,
    start,
    stop,
    wait_until_ready,
)
from viiwork.config.fault import printable
from viiwork.errors import KvError, UsageError
from viiwork.host.demo_model import SIZE_MIB, ensure_demo_model

N_LINES = 125  # about 2,500 prompt tokens
SHARED_WAIT_S = 20.0


@dataclass(slots=True)
class Step:
    """One row of the table."""

    what: str
    entry: str
    turn: Turn

    @property
    def reused_share(self) -> float:
        return self.turn.reused_tokens / self.turn.prompt_tokens if self.turn.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "entry": self.entry,
            "node": self.turn.node,
            "prompt_tokens": self.turn.prompt_tokens,
            "reused_tokens": self.turn.reused_tokens,
            "reused_share": round(self.reused_share, 4),
            "ttft_s": round(self.turn.ttft_s, 4),
        }


async def tell(args: argparse.Namespace, console: Console) -> int:
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no folder {args.json.absolute().parent}")
    if args.model is None:
        with console.status(f"the demo model (SmolLM2-135M, {SIZE_MIB} MiB): looking, else downloading"):
            model = await asyncio.to_thread(ensure_demo_model)
    else:
        model = args.model.resolve()
        if not str(model).isprintable():
            raise UsageError(f"--model {printable(str(model))}: a config cannot hold this name")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    # SIGHUP too: a closed terminal must not leave nodes behind.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    with tempfile.TemporaryDirectory(prefix="viiwork-demo-") as folder:
        nodes = plan_nodes(Path(folder), model)
        check_addresses(nodes)
        try:
            for node in nodes:
                start(node)
            story = asyncio.create_task(_story(nodes, console))
            waiting = asyncio.create_task(stopped.wait())
            await asyncio.wait((story, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not story.done():
                story.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await story
                console.print("interrupted")
                return 130
            steps = story.result()
            _report(steps, args.json, console)
            if not args.exit:
                _say_where(nodes, console)
                await waiting
            waiting.cancel()
        finally:
            with console.status("stopping both nodes"):
                await stop(nodes)
            console.print("both nodes stopped")
    return 0


async def _story(nodes: tuple[DemoNode, DemoNode], console: Console) -> list[Step]:
    a, b = nodes
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting two nodes", total=None)
            await wait_until_ready(
                http, nodes, lambda name, state: progress.update(task, description=f"{name}: {state}")
            )
            progress.remove_task(task)
            teller = _Teller(http, progress)
            steps = [await teller.hello(a)]
            steps += await teller.moved_session(a, b, warm=False)
            steps += await teller.moved_session(a, b, warm=True)
    return steps


@dataclass(slots=True)
class _Teller:
    """Runs the steps with a progress bar each."""

    http: aiohttp.ClientSession
    progress: Progress

    async def hello(self, a: DemoNode) -> Step:
        messages = [{"role": "user", "content": "Say hello to the other node."}]
        return await self._turn("a chat for a model only B serves", a, MODEL_OF_B, messages, {})

    async def moved_session(self, a: DemoNode, b: DemoNode, *, warm: bool) -> list[Step]:
        """A session's long first turn on A, its next turn on B."""
        word = "kv_share on" if warm else "kv_share off"
        seed = random.SystemRandom().randrange(10**9)  # a text no cache of either engine has seen
        headers = {"X-Session-Id": f"demo-{seed}"}
        if not warm:
            headers["X-Viiwork-Kv-Share"] = "off"
        text = long_text(seed, N_LINES)
        messages: Messages = [{"role": "user", "content": f"{text}\n\nWho appears on day 1?"}]
        first = await self._turn(f"a session's 1st turn ({word})", a, MODEL, messages, headers)
        if warm:
            await self._wait_until_shared(a)
        messages.append({"role": "user", "content": "And what happened on day 2?"})
        label = f"its next turn: {'warm' if warm else 'cold'} ({word})"
        return [first, await self._turn(label, b, MODEL, messages, headers)]

    async def _turn(
        self, what: str, node: DemoNode, model: str, messages: Messages, headers: dict[str, str]
    ) -> Step:
        task = self.progress.add_task(what, total=None)

        def prefilling(read: int, total: int) -> None:
            description = f"{what}: {read:,} of {total:,} tokens read"
            self.progress.update(task, completed=read, total=total, description=description)

        headers = headers | {"X-Viiwork-Prefer": node.name}  # the story says where a session moves
        turn = await run_turn(
            self.http, node.api, model, messages, headers=headers, max_tokens=24, on_progress=prefilling
        )
        self.progress.remove_task(task)
        self.progress.console.print(
            f"{what}: {turn.prompt_tokens:,} tokens, {turn.reused_tokens:,} reused, {turn.ttft_s:.2f} s",
            soft_wrap=True,
            highlight=False,
        )
        return Step(what, node.name, turn)

    async def _wait_until_shared(self, a: DemoNode) -> None:
        task = self.progress.add_task("the session's state goes ahead to B", total=None)
        for _ in range(int(SHARED_WAIT_S / 0.05)):
            status = await get_json(self.http, f"{a.api}/v1/status")
            if status is not None and status["kv_share"]["sent"]["done"] > 0:
                self.progress.remove_task(task)
                return
            await asyncio.sleep(0.05)
        raise KvError("not_sent", f"A did not share the session within {SHARED_WAIT_S:.0f} s: {status}")


def _report(steps: list[Step], path: Path | None, console: Console) -> None:
    table = Table(title="One endpoint, two nodes, one warm move")
    table.add_column("step", min_width=24)
    for heading in ("at", "on"):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompt", "reused", "first token"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            step.what,
            step.entry.removeprefix("demo-").upper(),
            step.turn.node.removeprefix("demo-").upper(),
            f"{step.turn.prompt_tokens:,}",
            f"{step.turn.reused_tokens:,} ({step.reused_share:.1%})",
            f"{step.turn.ttft_s:.2f} s",
        )
    cold, warm = steps[2], steps[4]
    ratio = cold.turn.ttft_s / warm.turn.ttft_s
    console.print(table)
    console.print(
        f"The move with kv_share reused {warm.reused_share:.1%} of the prompt and had its first token "
        f"{ratio:.1f} times sooner ({warm.turn.ttft_s:.2f} s instead of {cold.turn.ttft_s:.2f} s)."
    )
    if path is not None:
        body = {
            "steps": [step.as_json() for step in steps],
            "cold_ttft_s": round(cold.turn.ttft_s, 4),
            "warm_ttft_s": round(warm.turn.ttft_s, 4),
            "speedup": round(ratio, 2),
            "warm_reused_share": round(warm.reused_share, 4),
        }
        path.write_text(json.dumps(body, indent=2) + "\n")
        console.print(f"numbers written to {path}")


def _say_where(nodes: tuple[DemoNode, DemoNode], console: Console) -> None:
    console.print("\nThe mesh is up; both URLs answer for every model until Ctrl-C:")
    for node in nodes:
        console.print(f"  {node.api}/v1   (status: {node.api}/v1/status, log: {node.log})", soft_wrap=True)
    console.print(
        f"\n  curl {nodes[0].api}/v1/chat/completions -d "
        f'\'{{"model": "{MODEL_OF_B}", "messages": [{{"role": "user", "content": "hi"}}]}}\'',
        soft_wrap=True,
    )
