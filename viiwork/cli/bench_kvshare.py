"""Runs `viiwork bench kvshare`: one end of a link, the other one, or the lab."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from viiwork.api.bench import BENCH_PATH
from viiwork.bench.engine import BenchEngine
from viiwork.bench.janitor import Janitor
from viiwork.bench.lab import run_lab
from viiwork.bench.link import ALL_WAYS, LinkBench, Target, look, resolve
from viiwork.bench.listen import Listener, bound_socket, host_facts
from viiwork.bench.net import check_lab
from viiwork.bench.progress import BenchProgress
from viiwork.bench.results import Phase, Results
from viiwork.bench.states import BenchState, make_state
from viiwork.bench.tunnel import check_overlay
from viiwork.cli.bench_output import check_outputs, put_out
from viiwork.cli.control import ControlClient
from viiwork.config.model import ApiSection
from viiwork.errors import BenchError, NobodyListens, NodeRefused, NodeUnreachable, UsageError
from viiwork.limits import BENCH_BUSY_LOOK_S, BENCH_PORT, BENCH_START_S
from viiwork.version import VERSION
from viiwork.wire.channel import mesh_key


async def listen(args: argparse.Namespace, secrets: tuple[bytes, ...]) -> int:
    """Be the other end until Ctrl-C."""
    _check_files(args)
    keys = tuple(mesh_key(secret) for secret in secrets) or (mesh_key(b""),)
    server = bound_socket("", args.port)
    listener = Listener(keys, is_secured=bool(secrets), once=args.once, folder=args.dir, said=_say)
    port = "" if args.port == BENCH_PORT else f":{args.port}"
    how = "with the mesh's secret" if secrets else "without a secret, to private networks only"
    _say(
        f"listening on port {args.port} {how}; on the other host: viiwork bench kvshare --to THIS-HOST{port}"
    )
    serving = asyncio.create_task(listener.serve(server))
    if args.once:
        with suppress(OSError):  # a plain file, which has no end to wait for
            asyncio.get_running_loop().add_reader(0, _cancel_at_end, serving)
    try:
        await serving
    except asyncio.CancelledError:
        if not serving.cancelled():
            raise
    return 0


async def link(args: argparse.Namespace, secrets: tuple[bytes, ...]) -> int:
    """Measure every path to the other end."""
    _check_files(args)
    started, (host, said) = time.time(), args.to
    busy = await asyncio.to_thread(_busy_share)
    addr, key = await resolve(host, said or BENCH_PORT), mesh_key(secrets[0] if secrets else b"")
    phases: list[Phase] = []
    with BenchProgress() as progress:
        janitor = Janitor()
        try:
            async with AsyncExitStack() as ending:
                await _listening_port(args, addr, said)  # before work that would be for nothing
                state, restore = await _state(args, janitor, ending)
                port = await _listening_port(args, addr, said)  # a node's end does not wait for that long
                target = Target(addr, port, key)
                bench = await ending.enter_async_context(LinkBench(target, state, progress, restore))
                for path in await bench.paths():
                    phases.append(await bench.measure(path, ALL_WAYS, args.runs))
        finally:
            await asyncio.to_thread(janitor.close)
    settings = {"to": f"{host}:{port}", "secret": bool(secrets), "far": bench.far.host, "busy_share": busy}
    _report(args, "link", started, settings, phases)
    return 0


async def _listening_port(args: argparse.Namespace, addr: str, said: int) -> int:
    """Where the other end listens; a node that runs there is asked to begin. Raises `BenchError`."""
    port = said or BENCH_PORT
    try:
        await look(addr, port)
    except NobodyListens as nobody:
        node = argparse.Namespace(**vars(args), node=(addr, said or ApiSection().port), timeout=BENCH_START_S)
        begin = "start `viiwork bench kvshare --listen` on that host"
        try:
            answer = await asyncio.to_thread(ControlClient.from_args(node).send, "POST", BENCH_PATH)
        except NodeUnreachable:
            raise BenchError(f"{nobody}; {begin}{f' with --port {port}' if said else ''}") from None
        except NodeRefused as refused:
            there = f" and name no port, or that one's: {port} is the node's" if said else ""
            raise BenchError(f"the node there does not take part: {refused}; {begin}{there}") from None
        told = answer.get("port") if isinstance(answer, dict) else None
        if not isinstance(told, int) or not 0 < told <= 65535:
            raise BenchError(f"what answers at {addr} is no node; {begin}") from None
        return told
    return port


def lab(args: argparse.Namespace) -> int:
    """The published settings on this machine."""
    check_lab()
    if args.overlay:
        check_overlay()
    _check_files(args)
    started, busy = time.time(), _busy_share()
    with BenchProgress() as progress:
        phases = run_lab(
            size_bytes=args.size,
            file=args.file,
            folder=args.dir,
            runs=args.runs,
            overlay=args.overlay,
            progress=progress,
        )
    _report(args, "lab", started, {"overlay": args.overlay, "busy_share": busy}, phases)
    return 0


def _check_files(args: argparse.Namespace) -> None:
    """Wrong files are told before anything is measured."""
    if args.model is not None and not args.to:
        raise UsageError("--model goes with --to, or with --workload")
    if args.model is not None and args.file is not None:
        raise UsageError("--file and --model both make the state: name one of them")
    if args.model is not None and not Path(args.model).is_file():
        raise UsageError(f"--model: there is no file {args.model}")
    if args.file is not None and not args.file.is_file():
        raise UsageError(f"--file: there is no file {args.file}")
    check_outputs(args)


async def _state(
    args: argparse.Namespace, janitor: Janitor, ending: AsyncExitStack
) -> tuple[BenchState, Callable[[], Awaitable[float]] | None]:
    """What is sent, and what imports it where there is an engine."""
    if args.file is not None:
        return BenchState(args.file, None, 0), None
    folder = Path(tempfile.mkdtemp(prefix="viiwork-bench-", dir=args.dir))
    janitor.owes_folder(folder)
    if args.model is None:
        return await asyncio.to_thread(make_state, folder, args.size), None
    engine = await ending.enter_async_context(BenchEngine(Path(args.model), folder))
    return await engine.make_state(), engine.restore


def _report(
    args: argparse.Namespace,
    kind: Literal["link", "lab"],
    started: float,
    settings: dict[str, Any],
    phases: list[Phase],
) -> None:
    sent = max((run.bytes for phase in phases for run in phase.runs), default=args.size)
    size = args.size if args.file is None and args.model is None else sent
    results = Results(
        viiwork=VERSION,
        kind=kind,
        started_unix_s=started,
        host=host_facts(),
        settings={"size_bytes": size, "file": bool(args.file), "runs": args.runs, **settings},
        phases=phases,
    )
    put_out(args, results)


def _cancel_at_end(serving: asyncio.Task[None]) -> None:
    """What stands on standard input is of no use, its end is."""
    if not os.read(0, 4096):
        asyncio.get_running_loop().remove_reader(0)
        serving.cancel()


def _busy_share() -> float:
    """Of this machine's CPUs, by other work."""
    return psutil.cpu_percent(BENCH_BUSY_LOOK_S) / 100


def _say(line: str) -> None:
    print(line, flush=True)
