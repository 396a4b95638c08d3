"""The far end of a link's measurement: takes raw streams and states of one other host at a time."""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import platform
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from blake3 import blake3

from viiwork.bench.janitor import Janitor
from viiwork.bench.rawtcp import receive_raw
from viiwork.bench.talk import (
    FAR_NAME,
    NEAR_NAME,
    TOKEN_BYTES,
    Address,
    Answer,
    Begin,
    Drop,
    Dropped,
    No,
    Opening,
    Question,
    Ready,
    Received,
    Render,
    Rendered,
    TakeResult,
    Talk,
    answer_line,
    read_line,
    read_opening,
)
from viiwork.core.addresses import is_acceptable, is_loopback
from viiwork.errors import BenchError, ChannelError, KvError
from viiwork.host.cpus import usable_cpus
from viiwork.host.network import link_addresses, port_owner
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import ModelTerms, ReceiveDone, ReceiveGrant
from viiwork.limits import (
    BENCH_AWAITED_S,
    BENCH_CONNECTIONS_MAX,
    BENCH_OPEN_S,
    BENCH_SIZE_MAX_BYTES,
    BENCH_SPARE_BYTES,
    MIB,
)
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import canonical_ip, host_port
from viiwork.node.paths import SHM
from viiwork.version import VERSION

log = logging.getLogger("viiwork.bench")

MODEL = blake3(b"viiwork bench model").digest()
SESSION = blake3(b"viiwork bench session").digest()
# A host that vanished is noticed within 25 s: while nothing is on its way, and while an answer is.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


@dataclass(slots=True)
class _Run:
    """What there is for the host that measures now."""

    token: str
    folder: Path
    worker: KvWorker | None = None
    terms: tuple[ModelTerms, ...] = ()
    receiving: asyncio.Task[tuple[ReceiveDone, float]] | None = None  # and its CPU seconds
    last: ReceiveDone | None = None


class Listener:
    """Serves until it is cancelled; with `once` until one host is done, or none comes.

    Owns its folder, its worker and all sockets; all are gone then.
    """

    def __init__(
        self,
        keys: tuple[bytes, ...],
        *,
        is_secured: bool,
        once: bool = False,
        folder: Path | None = None,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        """States are kept in `folder`, None = in memory. `said` hears, in lines, what happens."""
        self._keys, self._is_secured, self._once, self._said = keys, is_secured, once, said
        self._root = folder if folder is not None else memory_folder()
        self._run: _Run | None = None
        self._came, self._done = asyncio.Event(), asyncio.Event()  # a host, and it is done
        self._connections: set[asyncio.Task[None]] = set()
        self._janitor = Janitor()

    async def serve(self, server: socket.socket) -> None:
        """Take connections at a listening socket, which is closed in the end."""
        server.setblocking(False)
        loop = asyncio.get_running_loop()
        accepting = asyncio.create_task(self._accept(loop, server))
        ending = asyncio.create_task(self._ended())
        try:
            await asyncio.wait({accepting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
        finally:
            for task in (accepting, ending, *self._connections):
                task.cancel()
            await asyncio.gather(accepting, ending, *self._connections, return_exceptions=True)
            server.close()
            await asyncio.to_thread(self._janitor.close)

    async def _ended(self) -> None:
        if self._once:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), BENCH_AWAITED_S)
            if self._came.is_set():
                await self._done.wait()
            return
        await asyncio.Event().wait()  # until it is cancelled

    async def _accept(self, loop: asyncio.AbstractEventLoop, server: socket.socket) -> None:
        while True:
            sock, addr = await loop.sock_accept(server)
            sock.setblocking(False)
            if len(self._connections) >= BENCH_CONNECTIONS_MAX:
                sock.close()
                continue
            task = asyncio.create_task(self._serve_one(sock, _plain(addr[0])))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve_one(self, sock: socket.socket, remote: str) -> None:
        try:
            with suppress(OSError, TimeoutError):
                await self._serve_opened(sock, remote)
        finally:
            sock.close()

    async def _serve_opened(self, sock: socket.socket, remote: str) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(BENCH_OPEN_S):
            opening = read_opening(await read_line(sock))
        if opening is None:
            return  # a scanner, or a browser
        said = self._judge(opening, remote)
        await loop.sock_sendall(sock, answer_line(said))
        if said != "ok" or opening.version != VERSION:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        run = self._run
        if opening.what == "control":
            await self._control(sock, remote)
        elif run is not None and opening.what == "raw":
            sock.setblocking(True)
            await asyncio.to_thread(receive_raw, sock, opening.n_bytes)
        elif run is not None and opening.what == "state":
            await self._receive(run, sock)

    def _judge(self, opening: Opening, remote: str) -> str:
        if not self._is_secured and not _is_near(remote):
            return "denied"
        if opening.what == "look":
            return "ok"
        if opening.what == "control":
            return "ok" if self._run is None else "busy"
        run = self._run
        known = run is not None and hmac.compare_digest(run.token, opening.token)
        return "ok" if known and opening.what in ("probe", "raw", "state") else "denied"

    # -- the control connection
    async def _control(self, sock: socket.socket, remote: str) -> None:
        _keep_alive(sock)
        run: _Run | None = None
        try:
            talk = await Talk.respond(sock, self._keys)
            if self._run is not None:  # another one proved itself meanwhile
                await talk.next_question()
                await talk.answer(No(message="it is measuring with another host; try again later"))
                return
            run = self._run = self._new_run()
            self._said(f"measuring with {remote}")
            while (question := await talk.next_question()) is not None:
                await talk.answer(await self._answer(run, question))
            self._said(f"done with {remote}")
        except ChannelError as error:
            hint = "; the mesh secret differs" if error.reason == "wrong_key" else ""
            self._said(f"refused {remote}: {one_line(str(error))}{hint}")
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            self._said(f"lost {remote}: {one_line(str(error) or 'no answer in time')}")
        finally:
            if run is not None:
                await self._end(run)

    def _new_run(self) -> _Run:
        folder = Path(tempfile.mkdtemp(prefix="viiwork-bench-", dir=self._root))
        self._janitor.owes_folder(folder)
        self._came.set()
        return _Run(secrets.token_hex(TOKEN_BYTES), folder)

    async def _answer(self, run: _Run, question: Question) -> Answer:
        try:
            match question:
                case Begin():
                    return await self._begin(run, question)
                case TakeResult():
                    return await self._result(run)
                case Render():
                    return await self._render(run, question)
                case Drop():
                    return await self._drop(run)
        except (KvError, BenchError) as error:
            return No(message=one_line(str(error)))

    async def _begin(self, run: _Run, begin: Begin) -> Answer:
        if run.worker is not None:
            return No(message="it has begun already")
        if not 0 < begin.n_bytes <= BENCH_SIZE_MAX_BYTES:
            return No(message=f"states of {begin.n_bytes} bytes are not taken")
        # The replica, and the file that is rendered of it.
        need, free = 2 * begin.n_bytes + BENCH_SPARE_BYTES, shutil.disk_usage(run.folder).free
        if free < need:
            where = run.folder.parent
            return No(message=f"no space: {need // MIB} MiB are needed in {where}, {free // MIB} are free")
        worker = KvWorker(run.folder / "replicas", 2 * begin.n_bytes + BENCH_SPARE_BYTES)
        await worker.start()
        run.worker = worker
        run.terms = (ModelTerms(model_fp=MODEL, shape=begin.shape, max_tokens=begin.n_tokens),)
        addresses = [
            Address(addr=mine.addr, speed_mbps=mine.speed_mbps, mtu=mine.mtu)
            for mine in await asyncio.to_thread(link_addresses)
        ]
        return Ready(token=run.token, host=host_facts(), addresses=addresses)

    async def _receive(self, run: _Run, sock: socket.socket) -> None:
        if run.worker is None or run.receiving is not None:
            return
        sock.setblocking(True)
        run.receiving = asyncio.create_task(self._received(run.worker, run.terms, sock))
        await asyncio.wait({run.receiving})

    async def _received(
        self, worker: KvWorker, terms: tuple[ModelTerms, ...], sock: socket.socket
    ) -> tuple[ReceiveDone, float]:
        grant = ReceiveGrant(keys=self._keys, local_name=FAR_NAME, peer_name=NEAR_NAME, models=terms)
        before = cpu_of(worker.pid)
        done = await worker.receive(sock, grant)
        return done, cpu_of(worker.pid) - before

    async def _result(self, run: _Run) -> Answer:
        receiving, run.receiving = run.receiving, None
        if receiving is None:
            return No(message="no state came")
        run.last, cpu_s = await receiving
        return Received(stages=run.last.stages, cpu_s=cpu_s)

    async def _render(self, run: _Run, render: Render) -> Answer:
        if run.worker is None or run.last is None:
            return No(message="there is no state to render")
        out = run.folder / "rendered"
        done = await run.worker.render(run.last.replica, render.target, out)
        out.unlink()
        return Rendered(seconds=done.stages.total_s)

    async def _drop(self, run: _Run) -> Answer:
        if run.worker is not None and run.last is not None:
            await run.worker.drop(run.last.replica)
        run.last = None
        return Dropped()

    async def _end(self, run: _Run) -> None:
        self._run = None
        if run.receiving is not None:
            run.receiving.cancel()
            await asyncio.gather(run.receiving, return_exceptions=True)
        if run.worker is not None:
            await run.worker.stop()
        shutil.rmtree(run.folder, ignore_errors=True)
        self._done.set()


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket; "" = at every address. Raises `BenchError`."""
    families = [socket.AF_INET6 if ":" in host else socket.AF_INET]
    if not host and socket.has_dualstack_ipv6():
        families.insert(0, socket.AF_INET6)
    for family in families:
        try:
            dual = family == socket.AF_INET6 and not host
            return socket.create_server((host, port), family=family, dualstack_ipv6=dual, backlog=64)
        except OSError as error:
            if family != families[-1] and error.errno != errno.EADDRINUSE:
                continue  # a machine whose IPv6 is switched off
            owner = port_owner(port, "tcp")
            by = f" (held by {owner})" if owner else ""
            where = host_port(host, port) if host else f"port {port}"
            why = os.strerror(error.errno) if error.errno else str(error)  # without the library's words
            raise BenchError(f"{where}/tcp cannot be used: {why}{by}; see --port") from None
    raise AssertionError("there is always a family to try")


def host_facts() -> dict[str, str | int]:
    """This machine, for a report."""
    return {
        "name": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def cpu_of(pid: int | None) -> float:
    """CPU seconds of a process, 0 for one that is gone."""
    try:
        times = psutil.Process(pid).cpu_times() if pid else None
    except psutil.Error:
        return 0.0
    return times.user + times.system if times else 0.0


def memory_folder() -> Path | None:
    """Where a node keeps replicas too; None = the system's folder for such files."""
    return SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else None


def _is_near(remote: str) -> bool:
    """Without a secret: only from this machine, a private network or the tailnet."""
    local = is_loopback(remote) or remote.startswith("fe80:")
    return local or is_acceptable(remote, "lan") or is_acceptable(remote, "tailnet")


def _plain(remote: str) -> str:
    """An address as people write it: IPv4 as such, no zone."""
    return canonical_ip(remote.partition("%")[0])


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
