"""Moves the new rows of a session between two network namespaces over a shaped link, beside iperf3 on it.

Needs root, iproute2, iperf3 and about 1 GB in --dir. Both sides are real KV workers. The peer holds the
first 1,000 tokens; what is timed is the delta to the whole state. "rate" is bytes of rows over the time from
the open connection to the receiver's acknowledged commit, handshake, verification and commit included; "of
iperf3" compares it with one iperf3 stream of as many bytes, measured just before. CPU seconds are those of
the worker processes. The rows are made: f16 values, normal, each channel with a mean and a width of its own.

    python bench/kv/delta.py [--mb 259] [--gbits 1 10] [--runs 3] [--modes plain ...] [--appends] [--dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from shaped import FAR, inside, iperf, namespaces, shape

from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import ModelTerms, ReceiveGrant, SendJob, StateFile
from viiwork.wire.channel import mesh_key
from viiwork.wire.replica import Mark
from viiwork.wire.savefile import parse

KEY = mesh_key("bench")
MODEL, SESSION = b"m" * 32, b"s" * 32
PORT = 18086
MODES = ("plain", "encrypted", "compressed")
LAYERS, ROW = 30, 2048
TOKEN_BYTES = 2 * LAYERS * ROW
BASE = 1000  # tokens the peer holds


def make_state(path: Path, n: int) -> None:
    """The same session after n tokens, whatever n is."""
    rng = np.random.default_rng(7)
    words = [-1, 1, n, *(at % 49_000 for at in range(n)), 0]
    with path.open("wb") as out:
        out.write(struct.pack("<3I", 0x67677371, 4, len(words)) + struct.pack(f"<{len(words)}i", *words))
        out.write(struct.pack("<II", 1, n))
        out.write(np.stack([np.arange(n), np.ones(n), np.zeros(n)], axis=1).astype("<i4").tobytes())
        out.write(struct.pack("<4I", 0, LAYERS, 0, 0))
        for plane in range(2 * LAYERS):
            noise = np.random.default_rng(plane).standard_normal((n, ROW // 2), dtype=np.float32)
            scale, mean = rng.lognormal(0, 1, ROW // 2), rng.standard_normal(ROW // 2)
            out.write(struct.pack("<iQ", 1, ROW) + (noise * scale + mean).astype("<f2").tobytes())


# -- inside the namespaces -------------------------------------------------------------------------


def cpu_of(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def far_side(folder: Path) -> dict[str, Any]:
    state = folder / "state"
    with state.open("rb") as file:
        info = parse(lambda off, n: os.pread(file.fileno(), n, off), state.stat().st_size)
    worker = KvWorker(folder / "store", 4 << 30)
    await worker.start()
    try:
        with socket.create_server((FAR, PORT)) as server:
            server.setblocking(False)
            print("ready", flush=True)
            terms = ModelTerms(model_fp=MODEL, shape=info.shape, max_tokens=1 << 20)
            grant = ReceiveGrant(keys=(KEY,), local_name="far", peer_name="near", models=(terms,))
            for _ in range(2):
                sock, _ = await asyncio.get_running_loop().sock_accept(server)
                before = cpu_of(worker.pid)
                done = await worker.receive(sock, grant)
        return {"cpu_s": cpu_of(worker.pid) - before, "stages": stages_of(done)}
    finally:
        await worker.stop()


async def near_side(folder: Path, mode: str) -> dict[str, Any]:
    worker = KvWorker(folder / "near-store", 1 << 20)
    await worker.start()
    try:
        for generation, name in enumerate(("base", "state"), start=1):
            sock = socket.create_connection((FAR, PORT))
            before = cpu_of(worker.pid)
            file = StateFile(
                path=str(folder / name),
                session=SESSION,
                model_fp=MODEL,
                generation=generation,
                created_unix_s=0.0,
                source="near",
                known=(Mark(generation=1, source="near", keep=BASE),) if generation > 1 else (),
            )
            job = SendJob(
                file=file,
                key=KEY,
                local_name="near",
                peer_name="far",
                encrypt=mode == "encrypted",
                compress="on" if mode == "compressed" else "off",
            )
            done = await worker.send(sock, job)
        result = {"cpu_s": cpu_of(worker.pid) - before, "stages": stages_of(done)}
        sizes = {"rows": done.info.n_tokens - done.kept, "raw": done.raw_bytes, "wire": done.wire_bytes}
        return {**result, **sizes, "total_s": done.stages.total_s}
    finally:
        await worker.stop()


def stages_of(done: Any) -> dict[str, float]:
    return {name: round(getattr(done.stages, name), 3) for name in done.stages.__struct_fields__}


# -- outside ---------------------------------------------------------------------------------------


def move(near: str, far: str, folder: Path, mode: str) -> dict[str, Any]:
    def side(ns: str, role: str) -> subprocess.Popen[str]:
        command = inside(
            ns, sys.executable, __file__, "--side", role, "--folder", str(folder), "--mode", mode
        )
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    receiver = side(far, "far")
    try:
        assert receiver.stdout is not None
        if receiver.stdout.readline().strip() != "ready":
            raise SystemExit("the receiving side did not start")
        sender = side(near, "near")
        sent, _ = sender.communicate(timeout=300)
        received, _ = receiver.communicate(timeout=60)
    finally:
        receiver.kill()
        receiver.wait()
    return {"send": json.loads(sent), "receive": json.loads(received)}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="viiwork-bench-", dir=args.dir))
    rows = []
    try:
        make_state(folder / "base", BASE)
        with namespaces() as (near, far, dev):
            if args.appends:
                for added in (1, 10, 100, 1000):
                    make_state(folder / "state", BASE + added)
                    show_append(added, move(near, far, folder, "plain")["send"])
            make_state(folder / "state", BASE + args.mb * 1_000_000 // TOKEN_BYTES)
            for gbits in args.gbits:
                shape(near, dev, gbits)
                for mode in args.modes:
                    rows.append(measure_one(args, near, far, folder, gbits, mode))
                    show(rows[-1])
    finally:
        shutil.rmtree(folder)
    return rows


def measure_one(
    args: argparse.Namespace, near: str, far: str, folder: Path, gbits: int, mode: str
) -> dict[str, Any]:
    size = args.mb * 1_000_000 // TOKEN_BYTES * TOKEN_BYTES
    rates, baselines, last = [], [], {}
    cpu: dict[str, list[float]] = {"send": [], "receive": []}
    for _ in range(args.runs):
        baselines.append(iperf(near, far, size))
        last = move(near, far, folder, mode)
        rates.append(size * 8 / last["send"]["total_s"] / 1e9)
        for side, used in cpu.items():
            used.append(round(last[side]["cpu_s"], 2))
    pairs = [rate / base for rate, base in zip(rates, baselines, strict=True)]
    return {
        "link_gbits": gbits,
        "mode": mode,
        "bytes": size,
        "iperf3_gbits": [round(x, 3) for x in baselines],
        "rate_gbits": [round(x, 3) for x in rates],
        "of_iperf3": round(statistics.median(pairs), 3),
        "best_of_iperf3": round(max(pairs), 3),
        "cpu_s": cpu,
        "load": os.getloadavg()[0],
        "last": last,
    }


def show_append(added: int, sent: dict[str, Any]) -> None:
    rows = added * TOKEN_BYTES
    print(f"{added} tokens: {rows} bytes of rows, {sent['wire']} on the wire, {sent['wire'] - rows} more")


def show(row: dict[str, Any]) -> None:
    wire = row["last"]["send"]["wire"]
    print(f"{row['link_gbits']:>3} Gb/s {row['mode']:<10} {row['bytes'] / 1e6:.0f} MB, {wire / 1e6:.1f} sent")
    share = f"{row['of_iperf3']:.1%} (median), {row['best_of_iperf3']:.1%} (best); load {row['load']:.1f}"
    print(f"    rate {row['rate_gbits']} Gb/s, iperf3 {row['iperf3_gbits']} Gb/s: {share}")
    for side in ("send", "receive"):
        last = row["last"][side]
        stages = ", ".join(f"{k} {v}" for k, v in last["stages"].items() if v)
        print(f"    {side}: CPU s {row['cpu_s'][side]}; last: {stages}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=259)
    parser.add_argument("--gbits", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=("near", "far"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--appends", action="store_true", help="also what small turns cost")
    args = parser.parse_args()
    if args.side == "far":
        print(json.dumps(asyncio.run(far_side(args.folder))))
    elif args.side == "near":
        print(json.dumps(asyncio.run(near_side(args.folder, args.mode))))
    else:
        rows = measure(args)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
