"""What an import costs: a render and the engine's restore, beside the engine's restore of its own save.

A real engine with a random model whose state is that of an 8B model: 32 layers, 8 heads of 128, f16: 128 KiB
a token. The rows are made. "own" is the engine's restore of a file it saved itself; "render" is the node's
worker making a file of a replica. The first round meets memory nobody used before.

    python bench/kv/render.py [--mib 1024] [--rounds 5] [--dir /dev/shm]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from gguf import GGUFReader

from tests.fakes import tiny_models
from tests.fakes.real_engine import Build, Engine, real_engine
from viiwork.host.demo_model import ensure_demo_model
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import StateFile
from viiwork.wire.savefile import layout_of, parse
from viiwork.wire.state import Layout

LAYERS, HEADS, HEAD = 32, 8, 128
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD * 2


def make_model(path: Path) -> None:
    tiny_models.HEADS = tiny_models.KV_HEADS = HEADS
    tiny_models.HEAD = HEAD
    made = tiny_models.Maker(GGUFReader(str(ensure_demo_model())), path, "llama")
    made.attention_facts(LAYERS, 64)
    made.facts(rope__dimension_count=HEAD)
    made.frame()
    for at in range(LAYERS):
        made.ones(f"blk.{at}.attn_norm")
        made.attention(f"blk.{at}", normed=False)
        made.ones(f"blk.{at}.ffn_norm")
        made.feed_forward(f"blk.{at}", 64)
    made.close()


def make_state(path: Path, n: int) -> None:
    rng = np.random.default_rng(7)
    words = [-1, 1, n, *(at % 49_000 for at in range(n)), 0]
    with path.open("wb") as out:
        out.write(np.array([0x67677371, 4, len(words)], "<u4").tobytes() + np.array(words, "<i4").tobytes())
        out.write(np.array([1, n], "<u4").tobytes())
        out.write(np.stack([np.arange(n), np.ones(n), np.zeros(n)], axis=1).astype("<i4").tobytes())
        out.write(np.array([0, LAYERS, 0, 0], "<u4").tobytes())
        for _ in range(2 * LAYERS):
            out.write(np.array([1], "<i4").tobytes() + np.array([HEADS * HEAD * 2], "<u8").tobytes())
            out.write(rng.standard_normal((n, HEADS * HEAD), dtype=np.float32).astype("<f2").tobytes())


async def restored(engine: Engine, name: str, n: int) -> float:
    begun = time.monotonic()
    done = await engine.post("/slots/0?action=restore", {"filename": name})
    if done["n_restored"] != n:
        raise SystemExit(f"the engine restored {done['n_restored']} tokens of {n}")
    return time.monotonic() - begun


async def measure(folder: Path, n: int, rounds: int) -> None:
    make_model(folder / "model.gguf")
    worker = KvWorker(folder / "store", 4 << 30)
    await worker.start()
    try:
        async with real_engine(folder / "model.gguf", folder / "engine", Build(), n + 256) as engine:
            made = engine.folder / "made"
            make_state(made, n)
            with made.open("rb") as file:
                info = parse(lambda at, size: os.pread(file.fileno(), size, at), made.stat().st_size)
            target = layout_of(info, slot=0, max_tokens=n)
            facts = {"session": b"s" * 32, "model_fp": b"m" * 32, "generation": 1, "created_unix_s": 0.0}
            kept = await worker.keep(StateFile(path=str(made), source="near", **facts))
            await restored(engine, "made", n)
            made.unlink()
            await engine.save_as(0, "own")
            await restored(engine, "own", n)
            for _ in range(rounds):
                await show(engine, worker, kept.replica, target, n)
    finally:
        await worker.stop()


async def show(engine: Engine, worker: KvWorker, replica: str, target: Layout, n: int) -> None:
    own = await restored(engine, "own", n)
    process = psutil.Process(worker.pid)
    out, before = engine.folder / "import", process.cpu_times()
    done = await worker.render(replica, target, out)
    used = sum(process.cpu_times()[:2]) - sum(before[:2])
    restore = await restored(engine, "import", n)
    out.unlink()
    render, size = done.stages.render_s, done.total_bytes / (1 << 20)
    print(
        f"{size:.0f} MiB: own {own:.3f} s; render {render:.3f} s ({used:.2f} CPU s) + restore {restore:.3f}:"
        f" {render + restore - own:+.3f} s; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="viiwork-bench-", dir=args.dir))
    try:
        asyncio.run(measure(folder, (args.mib << 20) // TOKEN_BYTES, args.rounds))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
