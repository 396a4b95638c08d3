"""What a relay adds: latency at concurrency 1, requests a second at 16, memory and time to listening.

    python bench/relay/run.py [--seconds 3] [--rounds 3] [--json FILE]
                              [--targets direct,nginx,aiohttp,relay,node]

Client, relay and backend share the machine's cores, as they do on a small node. Rounds visit the
targets in turn, so that a busy moment of the machine does not fall on one of them alone; the best
round counts. `relay` is the relay alone with a fixed answer to
every routing question; `node` is a whole `viiwork serve` that supervises the backend as its engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
_UNITS_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}
_NGINX = """
daemon off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  upstream engine {{ server 127.0.0.1:{backend}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port}; tcp_nodelay on; keepalive_requests 1000000000;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
_NODE = """
node: {{name: bench, state_dir: {folder}/state}}
api: {{host: 127.0.0.1, port: {port}}}
mesh: {{network: lan, advertise: 127.0.0.1, bind_port: {mesh_port}, open: true}}
models:
  - name: m
    engine: llamacpp
    path: {folder}/m.gguf
    context: 4096
    parallel: 32
    llamacpp: {{binary: {folder}/engine}}
"""


@dataclass
class Figures:
    """Best values of all rounds; latencies are of whole answers."""

    p50_plain_ms: float = float("inf")
    p50_streamed_ms: float = float("inf")
    plain_per_s: float = 0.0
    streamed_per_s: float = 0.0
    rss_mib: float = 0.0
    all_pss_mib: float = 0.0
    listening_s: float = 0.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A process that listens at `port`, and how long it took to do so."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)}, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() - started > 60:
                raise SystemExit(f"did not start: {shlex.join(command)}")
            time.sleep(0.005)
        yield process, time.monotonic() - started
    finally:
        process.terminate()
        process.wait(20)


def wrk(port: int, *, connections: int, streamed: bool, seconds: int) -> tuple[float, float]:
    """Median latency in ms and requests a second; any failed request ends the benchmark."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    load = [f"-c{connections}", f"-d{seconds}s", "-t1", "--latency", "-s", str(HERE / "post.lua"), url]
    done = subprocess.run(
        ["wrk", *load],
        env={**os.environ, "STREAM": "1" if streamed else "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    p50 = re.search(r"50%\s+([\d.]+)(us|ms|s)", done)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done)
    if p50 is None or rate is None or "Socket errors" in done or "Non-2xx" in done:
        raise SystemExit(f"wrk met errors:\n{done}")
    return float(p50[1]) * _UNITS_MS[p50[2]], float(rate[1])


def measure(port: int, figures: Figures, seconds: int) -> None:
    for streamed in (False, True):
        kind = "streamed" if streamed else "plain"
        p50, _ = wrk(port, connections=1, streamed=streamed, seconds=seconds)
        _, rate = wrk(port, connections=16, streamed=streamed, seconds=seconds)
        setattr(figures, f"p50_{kind}_ms", min(getattr(figures, f"p50_{kind}_ms"), p50))
        setattr(figures, f"{kind}_per_s", max(getattr(figures, f"{kind}_per_s"), rate))


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory of the process, and what it and its children take of the machine, an engine excepted.

    The second counts a page that several share once (PSS).
    """
    process = psutil.Process(pid)
    ours = [p for p in [process, *process.children(recursive=True)] if p.name() != "engine"]
    return process.memory_info().rss / 2**20, sum(p.memory_full_info().pss for p in ours) / 2**20


def node_command(folder: Path, backend: Path, port: int) -> list[str]:
    """A node whose engine is a copy of the backend under the name `memory_mib` leaves out."""
    shutil.copy(backend, folder / "engine")
    (folder / "m.gguf").write_bytes(b"GGUF")
    config = folder / "node.yaml"
    config.write_text(_NODE.format(folder=folder, port=port, mesh_port=free_port()))
    return [sys.executable, "-m", "viiwork", "serve", "--config", str(config)]


def wait_until_served(port: int) -> None:
    """A node listens before its engine is healthy."""
    while True:
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.05)


def run(targets: list[str], rounds: int, seconds: int) -> dict[str, Figures]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backend = folder / "backend"
        subprocess.run(["cc", "-O2", "-w", "-o", str(backend), str(HERE / "backend.c")], check=True)
        engine_port = free_port()
        stack.enter_context(running([str(backend), str(engine_port)], engine_port))
        ports, pids, results = {"direct": engine_port}, {}, {name: Figures() for name in targets}
        for name in targets:
            if name == "direct":
                continue
            ports[name] = free_port()
            if name == "nginx":
                conf = folder / "nginx.conf"
                conf.write_text(_NGINX.format(dir=folder, backend=engine_port, port=ports[name]))
                command = [shutil.which("nginx") or "/usr/sbin/nginx", "-c", str(conf), "-p", str(folder)]
            elif name == "node":
                command = node_command(folder, backend, ports[name])
            else:
                program = "aiohttp_relay.py" if name == "aiohttp" else "static_node.py"
                command = [sys.executable, str(HERE / program), "--port", str(ports[name])]
                command += ["--backend", f"http://127.0.0.1:{engine_port}"]
            process, results[name].listening_s = stack.enter_context(running(command, ports[name]))
            pids[name] = process.pid
            if name == "node":
                wait_until_served(ports[name])
        for _ in range(rounds):
            for name in targets:
                measure(ports[name], results[name], seconds)
        for name, pid in pids.items():
            results[name].rss_mib, results[name].all_pss_mib = memory_mib(pid)
        return results


def show(results: dict[str, Figures]) -> None:
    direct = results.get("direct")
    print(
        f"{'':8}{'p50 plain':>16}{'p50 streamed':>16}"
        f"{'plain/s':>10}{'streamed/s':>12}{'MiB':>7}{'all MiB':>9}{'listening':>11}"
    )
    for name, f in results.items():
        cells = []
        for attribute in ("p50_plain_ms", "p50_streamed_ms"):
            value = getattr(f, attribute)
            added = (
                "" if direct is None or name == "direct" else f" (+{value - getattr(direct, attribute):.2f})"
            )
            cells.append(f"{value:.2f}{added} ms")
        tail = "" if name == "direct" else f"{f.rss_mib:7.0f}{f.all_pss_mib:9.0f}{f.listening_s:9.2f} s"
        print(f"{name:8}{cells[0]:>16}{cells[1]:>16}{f.plain_per_s:10.0f}{f.streamed_per_s:12.0f}{tail}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--targets", default="direct,nginx,aiohttp,relay,node")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = run(args.targets.split(","), args.rounds, args.seconds)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps({name: asdict(f) for name, f in figures.items()}, indent=2))
