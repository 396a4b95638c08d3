"""The compiled movers alone between two namespaces over a shaped link, beside iperf3 on the same link.

What a transfer is made of, one part after the other: frames (48 bytes, a payload, 16 bytes) from a file in
/dev/shm to a file in /dev/shm, without handshake, control process or proofs. Every pair of a sending and a
receiving way is run `--runs` times, each time just after one iperf3 stream of as many bytes; the median of
the ratios counts. CPU seconds are the whole process's, starting and importing left out.

    sudo python bench/kv/link_speed.py [--mib 247] [--gbits 10] [--frame-kib 1024] [--runs 5]

ways to send:    copy = pread, then sendmsg; file = send_ranges (sendfile)
ways to receive: drop = recv only; write = recv and pwrite in turn; ring = recv beside BLAKE3 and pwrite
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from blake3 import blake3
from shaped import FAR, inside, iperf, namespaces, shape

from viiwork.native.mover import pread_exact, pwrite_all, recv_exact, send_all, send_ranges

PORT = 18087
HEAD, TAIL = 48, 16
SILENCE_MS = 8000
BUFFERS = 4
SENDING, RECEIVING = ("copy", "file"), ("drop", "write", "ring")


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def frames_of(size: int, frame: int) -> list[tuple[int, int]]:
    return [(at, min(frame, size - at)) for at in range(0, size, frame)]


def send(way: str, path: Path, frame: int) -> dict[str, float]:
    file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size
    sock = socket.create_connection((FAR, PORT))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fd, buffer = sock.fileno(), memoryview(bytearray(frame))
    begun, cpu = time.monotonic(), cpu_s()
    for at, length in frames_of(size, frame):
        if way == "copy":
            pread_exact(file, buffer[:length], at)
            send_all(fd, bytes(HEAD), buffer[:length], bytes(TAIL), SILENCE_MS, -1.0)
        else:
            send_ranges(fd, bytes(HEAD), file, [(at, length)], bytes(TAIL), SILENCE_MS, -1.0)
    recv_exact(fd, bytearray(1), SILENCE_MS, -1.0)
    return {"total_s": time.monotonic() - begun, "cpu_s": cpu_s() - cpu}


def receive(way: str, path: Path, frame: int, size: int) -> dict[str, float]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(file, size)
    with socket.create_server((FAR, PORT)) as server:
        print("ready", flush=True)
        sock, _ = server.accept()
    cpu = cpu_s()
    fd, frames = sock.fileno(), frames_of(size, frame)
    take = {"drop": receive_and_drop, "write": receive_and_write, "ring": receive_in_ring}[way]
    take(fd, file, frames, frame)
    sock.send(b"!")
    return {"cpu_s": cpu_s() - cpu}


def receive_and_drop(fd: int, _file: int, frames: list[tuple[int, int]], frame: int) -> None:
    buffer = memoryview(bytearray(HEAD + frame + TAIL))
    for _, length in frames:
        recv_exact(fd, buffer[: HEAD + length + TAIL], SILENCE_MS, -1.0)


def receive_and_write(fd: int, file: int, frames: list[tuple[int, int]], frame: int) -> None:
    buffer = memoryview(bytearray(HEAD + frame + TAIL))
    for at, length in frames:
        recv_exact(fd, buffer[: HEAD + length + TAIL], SILENCE_MS, -1.0)
        pwrite_all(file, buffer[HEAD : HEAD + length], at)


def receive_in_ring(fd: int, file: int, frames: list[tuple[int, int]], frame: int) -> None:
    empty: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    full: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(BUFFERS):
        empty.put(memoryview(bytearray(HEAD + frame + TAIL)))

    def hash_and_write() -> None:
        for at, length in frames:
            buffer = full.get()
            blake3(buffer[HEAD : HEAD + length]).digest()
            pwrite_all(file, buffer[HEAD : HEAD + length], at)
            empty.put(buffer)

    writer = threading.Thread(target=hash_and_write)
    writer.start()
    for _, length in frames:
        buffer = empty.get()
        recv_exact(fd, buffer[: HEAD + length + TAIL], SILENCE_MS, -1.0)
        full.put(buffer)
    writer.join()


def move(
    near: str, far: str, folder: Path, args: argparse.Namespace, ways: tuple[str, str]
) -> dict[str, Any]:
    def side(ns: str, role: str, way: str) -> subprocess.Popen[str]:
        options = ["--side", role, "--way", way, "--folder", str(folder), "--mib", str(args.mib)]
        command = [sys.executable, __file__, *options, "--frame-kib", str(args.frame_kib)]
        return subprocess.Popen(inside(ns, *command), stdout=subprocess.PIPE, text=True)

    receiver = side(far, "far", ways[1])
    try:
        assert receiver.stdout is not None
        if receiver.stdout.readline().strip() != "ready":
            raise SystemExit("the receiving side did not start")
        sent, _ = side(near, "near", ways[0]).communicate(timeout=120)
        received, _ = receiver.communicate(timeout=60)
    finally:
        receiver.kill()
        receiver.wait()
    return {"send": json.loads(sent), "receive": json.loads(received)}


def measure(args: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="viiwork-bench-", dir="/dev/shm"))
    size = args.mib << 20
    try:
        with (folder / "from").open("wb") as file:
            for _ in range(args.mib):
                file.write(os.urandom(1 << 20))
        with namespaces() as (near, far, dev):
            shape(near, dev, args.gbits)
            print(
                f"{args.mib} MiB at {args.gbits} Gb/s, frames of {args.frame_kib} KiB; medians of {args.runs}"
            )
            print("send receive   of iperf3   Gb/s   iperf3   CPU s send  receive")
            for ways in [(s, r) for s in SENDING for r in RECEIVING]:
                ratios, rates, bases, cpu = [], [], [], []
                for _ in range(args.runs):
                    bases.append(iperf(near, far, size))
                    done = move(near, far, folder, args, ways)
                    rates.append(size * 8 / done["send"]["total_s"] / 1e9)
                    ratios.append(rates[-1] / bases[-1])
                    cpu.append((done["send"]["cpu_s"], done["receive"]["cpu_s"]))
                mid = statistics.median
                near_cpu, far_cpu = mid(c[0] for c in cpu), mid(c[1] for c in cpu)
                line = f"{ways[0]:4} {ways[1]:7} {mid(ratios):10.1%} {mid(rates):6.2f} {mid(bases):8.2f}"
                print(f"{line} {near_cpu:12.3f} {far_cpu:8.3f}", flush=True)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=247)
    parser.add_argument("--gbits", type=int, default=10)
    parser.add_argument("--frame-kib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--side", choices=("near", "far"), help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    frame = args.frame_kib << 10
    if args.side == "far":
        print(json.dumps(receive(args.way, args.folder / "to", frame, args.mib << 20)))
    elif args.side == "near":
        print(json.dumps(send(args.way, args.folder / "from", frame)))
    else:
        measure(args)


if __name__ == "__main__":
    main()
