"""Moves one whole state between two network namespaces over a shaped link, beside iperf3 on the same link.

Needs root, iproute2, iperf3 and about 1 GB in /dev/shm. Both sides are real KV workers. "rate" is file
bytes over the time from the open connection to the receiver's acknowledged commit, handshake,
verification and commit included; "of iperf3" compares it with one iperf3 stream of as many bytes,
measured just before. CPU seconds are those of the worker processes.

    python bench/kv/whole_state.py [--mb 250] [--gbits 1 10] [--runs 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from shaped import FAR, inside, iperf, namespaces, shape

from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import ModelTerms, ReceiveGrant, SendJob
from viiwork.wire.channel import mesh_key
from viiwork.wire.whole_file import parse

KEY = mesh_key("bench")
MODEL, SESSION = b"m" * 32, b"s" * 32
PORT = 18086
LAYERS, ROW = 30, 2048


def make_state(path: Path, mb: int) -> None:
    saves = Path(__file__).parents[2] / "tests" / "kv" / "saves.py"
    spec = importlib.util.spec_from_file_location("saves", saves)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_bytes(module.make_save(mb * 1_000_000 // (LAYERS * 2 * ROW), n_layer=LAYERS, row=ROW))


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
            sock, _ = await asyncio.get_running_loop().sock_accept(server)
        terms = ModelTerms(model_fp=MODEL, shape=info.shape, max_tokens=1 << 20)
        before = cpu_of(worker.pid)
        grant = ReceiveGrant(keys=(KEY,), local_name="far", peer_name="near", models=(terms,))
        done = await worker.receive(sock, grant)
        return {"cpu_s": cpu_of(worker.pid) - before, "stages": stages_of(done)}
    finally:
        await worker.stop()


async def near_side(folder: Path, encrypt: bool) -> dict[str, Any]:
    worker = KvWorker(folder / "near-store", 1 << 20)
    await worker.start()
    try:
        sock = socket.create_connection((FAR, PORT))
        before = cpu_of(worker.pid)
        job = SendJob(
            path=str(folder / "state"),
            session=SESSION,
            model_fp=MODEL,
            generation=1,
            created_unix_s=0.0,
            key=KEY,
            local_name="near",
            peer_name="far",
            encrypt=encrypt,
        )
        done = await worker.send(sock, job)
        result = {"cpu_s": cpu_of(worker.pid) - before, "stages": stages_of(done)}
        return {**result, "total_s": done.stages.total_s, "bytes": done.total_bytes}
    finally:
        await worker.stop()


def stages_of(done: Any) -> dict[str, float]:
    return {name: round(getattr(done.stages, name), 3) for name in done.stages.__struct_fields__}


# -- outside ---------------------------------------------------------------------------------------


def move(near: str, far: str, folder: Path, encrypt: bool) -> dict[str, Any]:
    def side(ns: str, role: str) -> subprocess.Popen[str]:
        command = inside(ns, sys.executable, __file__, "--side", role, "--folder", str(folder))
        if encrypt:
            command.append("--encrypt")
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
    folder = Path(tempfile.mkdtemp(prefix="viiwork-bench-", dir="/dev/shm"))
    rows = []
    try:
        make_state(folder / "state", args.mb)
        size = (folder / "state").stat().st_size
        with namespaces() as (near, far, dev):
            for gbits in args.gbits:
                shape(near, dev, gbits)
                for encrypt in (False, True):
                    rows.append(measure_one(args, near, far, folder, size, gbits, encrypt))
                    show(rows[-1])
    finally:
        shutil.rmtree(folder)
    return rows


def measure_one(
    args: argparse.Namespace, near: str, far: str, folder: Path, size: int, gbits: int, encrypt: bool
) -> dict[str, Any]:
    rates, baselines, last = [], [], {}
    for _ in range(args.runs):
        baselines.append(iperf(near, far, size))
        last = move(near, far, folder, encrypt)
        rates.append(size * 8 / last["send"]["total_s"] / 1e9)
    pairs = [rate / base for rate, base in zip(rates, baselines, strict=True)]
    return {
        "link_gbits": gbits,
        "encrypt": encrypt,
        "bytes": size,
        "iperf3_gbits": [round(x, 3) for x in baselines],
        "rate_gbits": [round(x, 3) for x in rates],
        "of_iperf3": round(statistics.median(pairs), 3),
        "last": last,
    }


def show(row: dict[str, Any]) -> None:
    name = "encrypted" if row["encrypt"] else "plain"
    print(f"{row['link_gbits']:>3} Gb/s {name:<10} {row['bytes'] / 1e6:.0f} MB")
    share = f"{row['of_iperf3']:.1%} (median)"
    print(f"    rate {row['rate_gbits']} Gb/s, iperf3 {row['iperf3_gbits']} Gb/s: {share}")
    for side in ("send", "receive"):
        last = row["last"][side]
        stages = ", ".join(f"{k} {v}" for k, v in last["stages"].items() if v)
        print(f"    {side}: {last['cpu_s']:.2f} CPU s; {stages}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=250)
    parser.add_argument("--gbits", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=("near", "far"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--encrypt", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side == "far":
        print(json.dumps(asyncio.run(far_side(args.folder))))
    elif args.side == "near":
        print(json.dumps(asyncio.run(near_side(args.folder, args.encrypt))))
    else:
        rows = measure(args)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
