"""Control's side of a KV worker: one process, its jobs as awaitables, started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from viiwork.errors import KvError
from viiwork.kv import jobs
from viiwork.kv.store import wipe
from viiwork.limits import (
    KV_CONTROL_MAX_BYTES,
    KV_LOG_LINE_MAX_BYTES,
    KV_RESTART_MAX_S,
    KV_RESTART_MIN_S,
    KV_STABLE_S,
)
from viiwork.wire.replica import TOKEN_BYTES, longest_common, prefix_digests
from viiwork.wire.state import Layout

log = logging.getLogger("viiwork.kv")

START_WITHIN_S = 20.0  # importing takes 0.3 s on an idle machine
STOP_WITHIN_S = 7.0
GRACE_S = 10.0  # beyond a job's own deadline; a worker that is silent then is stuck and is killed
LOCAL_JOB_S = 120.0  # inspect, render, drop: no peer involved

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class KvStats:
    """Counters since the node started, as shown in /v1/status."""

    up: bool
    pid: int | None
    restarts: int
    running: int
    sent: int
    sent_bytes: int
    send_mb_per_s: float | None  # of the last one
    received: int
    received_bytes: int
    receive_mb_per_s: float | None
    kept: int  # of this node's own save-files
    kept_bytes: int
    rendered: int
    rendered_bytes: int
    failures: dict[str, int]  # by reason word


class KvWorker:
    """One worker process. Jobs raise `KvError`; reason `worker_died` = the process ended under them.

    `on_lost` is called each time the process ended by itself: every replica it held is gone.
    """

    def __init__(
        self,
        store: Path,
        budget_bytes: int,
        *,
        hidden_env: frozenset[str] = frozenset(),
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._budget = store, budget_bytes
        self._hidden_env, self._on_lost = hidden_env, on_lost
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[jobs.Done]] = {}
        self._next_id = 0
        self._up = asyncio.Event()
        self._restarts = 0
        self._done: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._rate: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._sending = asyncio.Lock()

    # -- life

    async def start(self) -> None:
        """Returns when the worker serves; raises `KvError` when it cannot."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the process and its replicas; running jobs fail."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        process = self._process
        self._close_control()
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
            except TimeoutError:
                process.kill()
                await process.wait()
            if process.returncode != 0:
                wipe(self._store)  # it could not do that itself
        self._process = None
        self._fail_all("stopped")

    async def wait_up(self) -> None:
        """Until a worker serves, for instance after one died."""
        await self._up.wait()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._up.is_set() else None

    # -- jobs

    async def send(self, sock: socket.socket, job: jobs.SendJob) -> jobs.SendDone:
        """Send a save-file over `sock`, which is closed here in every case."""
        done = await self._transfer(sock, job, jobs.SendDone, job.deadline_s)
        self._count("sent", done.raw_bytes, done.stages)
        return done

    async def receive(self, sock: socket.socket, grant: jobs.ReceiveGrant) -> jobs.ReceiveDone:
        """Take a replica from the peer on `sock`, which is closed here in every case."""
        done = await self._transfer(sock, grant, jobs.ReceiveDone, grant.deadline_s)
        self._count("received", done.raw_bytes, done.stages)
        return done

    async def keep(self, file: jobs.StateFile) -> jobs.ReceiveDone:
        """Keep a save-file of this node as a replica."""
        done = await self._ask(jobs.KeepJob(file=file), jobs.ReceiveDone, LOCAL_JOB_S)
        self._count("kept", done.raw_bytes, done.stages)
        return done

    async def render(self, replica: str, target: Layout, out: Path, *, at_most: int = 0) -> jobs.RenderDone:
        """Write `out`, which must not exist, as a file `target` restores; it is the caller's to remove.

        At most so many tokens (0 = all); how many it came to is in the answer.
        """
        if os.path.lexists(out):
            raise KvError("io_error", f"{out} exists already")
        job = jobs.RenderJob(replica=replica, target=target, out=str(out), at_most=at_most)
        try:
            done = await self._ask(job, jobs.RenderDone, LOCAL_JOB_S)
        except BaseException:
            # A worker that was killed half-way cannot clean up.
            with suppress(OSError):
                out.unlink()
            raise
        self._count("rendered", done.total_bytes, done.stages)
        return done

    async def common_tokens(self, replica: str, tokens: bytes) -> int:
        """How many leading tokens a prompt, as little-endian i32, shares with a replica."""
        job = jobs.MatchJob(replica=replica, prefix=prefix_digests(tokens))
        done = await self._ask(job, jobs.MatchDone, LOCAL_JOB_S)
        return done.n_same + longest_common(tokens[TOKEN_BYTES * done.n_same :], done.next)

    async def inspect(self, path: Path, *, n_vocab: int = 0) -> jobs.SaveFacts:
        job = jobs.InspectJob(path=str(path), n_vocab=n_vocab)
        return (await self._ask(job, jobs.InspectDone, LOCAL_JOB_S)).info

    async def drop(self, replica: str) -> bool:
        return (await self._ask(jobs.DropJob(replica=replica), jobs.DropDone, LOCAL_JOB_S)).dropped

    async def store_stats(self) -> jobs.StoreStats:
        return await self._ask(jobs.StatsJob(), jobs.StoreStats, LOCAL_JOB_S)

    def stats(self) -> KvStats:
        return KvStats(
            up=self._up.is_set(),
            pid=self.pid,
            restarts=self._restarts,
            running=len(self._waiting),
            sent=self._done["sent"],
            sent_bytes=self._bytes["sent"],
            send_mb_per_s=self._rate.get("sent"),
            received=self._done["received"],
            received_bytes=self._bytes["received"],
            receive_mb_per_s=self._rate.get("received"),
            kept=self._done["kept"],
            kept_bytes=self._bytes["kept"],
            rendered=self._done["rendered"],
            rendered_bytes=self._bytes["rendered"],
            failures=dict(self._failures),
        )

    def _count(self, what: str, size: int, stages: jobs.Stages) -> None:
        self._done[what] += 1
        self._bytes[what] += size
        if stages.total_s > 0:
            self._rate[what] = size / stages.total_s / 1e6

    async def _transfer(self, sock: socket.socket, job: jobs.Job, kind: type[D], deadline_s: float) -> D:
        try:
            return await self._ask(job, kind, deadline_s + GRACE_S, sock)
        finally:
            sock.close()

    async def _ask(
        self, job: jobs.Job, kind: type[D], limit_s: float, sock: socket.socket | None = None
    ) -> D:
        try:
            return await self._ask_uncounted(job, kind, limit_s, sock)
        except KvError as error:
            self._failures[error.reason] += 1
            raise

    async def _ask_uncounted(
        self, job: jobs.Job, kind: type[D], limit_s: float, sock: socket.socket | None
    ) -> D:
        if not self._up.is_set():
            raise KvError("worker_down", "the KV worker is not running")
        self._next_id += 1
        id_ = self._next_id
        future: asyncio.Future[jobs.Done] = asyncio.get_running_loop().create_future()
        data = jobs.pack(jobs.Request(id=id_, job=job))
        self._waiting[id_] = future
        try:
            async with asyncio.timeout(limit_s):
                await self._send_control(data, sock)
                if sock is not None:
                    sock.close()  # the worker has its own copy; ours would keep the connection open
                done = await future
        except TimeoutError:
            self._kill()
            raise KvError("worker_stuck", f"no answer from the KV worker in {limit_s:.0f} s") from None
        except asyncio.CancelledError:
            await self._give_up(id_)
            raise
        finally:
            self._waiting.pop(id_, None)
            if future.done() and not future.cancelled():
                future.exception()  # when sending failed first, nobody else looks at it
        if isinstance(done, jobs.Failed):
            raise KvError(done.reason, done.message)
        if not isinstance(done, kind):
            raise KvError("protocol", f"the worker answered with {type(done).__name__}")
        return done

    async def _give_up(self, id_: int) -> None:
        control = self._control
        if control is None:
            return
        with suppress(OSError):  # full or gone: the job ends by its own deadline
            control.send(jobs.pack(jobs.Request(id=0, job=jobs.CancelJob(id=id_))))

    async def _send_control(self, data: bytes, sock: socket.socket | None) -> None:
        fds = [sock.fileno()] if sock is not None else []
        async with self._sending:
            while True:
                control = self._control
                if control is None:
                    raise KvError("worker_died", "the KV worker ended")
                try:
                    socket.send_fds(control, [data], fds)
                    return
                except BlockingIOError:
                    await _writable(control)
                except OSError as error:
                    raise KvError("worker_died", f"the KV worker ended: {error}") from None

    # -- the process

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        env = {name: value for name, value in os.environ.items() if name not in self._hidden_env}
        command = [sys.executable, "-m", "viiwork.kv.worker"]
        command += ["--control", str(theirs.fileno()), "--parent", str(os.getpid())]
        command += ["--store", str(self._store), "--budget", str(self._budget)]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=env,
                limit=KV_LOG_LINE_MAX_BYTES,
            )
        except OSError as error:
            ours.close()
            raise KvError("worker_start", f"cannot start the KV worker: {error}") from None
        finally:
            theirs.close()
        self._process, self._control = process, ours
        ready: asyncio.Future[jobs.Done] = asyncio.get_running_loop().create_future()
        self._waiting[0] = ready
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)
        try:
            async with asyncio.timeout(START_WITHIN_S):
                first = await ready
        except (TimeoutError, KvError) as error:
            await self._reap()
            raise KvError("worker_start", f"the KV worker does not start: {error}") from None
        except BaseException:
            await self._reap()
            raise
        finally:
            self._waiting.pop(0, None)
        if isinstance(first, jobs.Failed):
            await self._reap()
            raise KvError(first.reason, first.message)
        self._up.set()

    async def _keep(self) -> None:
        """Watch the process; start another one when it ended."""
        pause = KV_RESTART_MIN_S
        while True:
            started = time.monotonic()
            if self._process is not None:
                await self._drain_log(self._process)
                await self._reap()
                self._fail_all("worker_died")
                self._on_lost()
                if time.monotonic() - started >= KV_STABLE_S:
                    pause = KV_RESTART_MIN_S
            await asyncio.sleep(pause)
            pause = min(pause * 2, KV_RESTART_MAX_S)
            try:
                await self._spawn()
                self._restarts += 1
            except KvError as error:
                log.warning("worker.failed reason=%s %s", error.reason, error)

    async def _drain_log(self, process: asyncio.subprocess.Process) -> None:
        """Log what the process writes until it ends."""
        assert process.stderr is not None
        while line := await _line(process.stderr):
            log.warning("worker.said %s", line)
        await process.wait()
        log.warning("worker.ended code=%s", process.returncode)

    async def _reap(self) -> None:
        self._close_control()
        process, self._process = self._process, None
        if process is not None:
            self._kill_process(process)
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None:
            self._kill_process(self._process)

    @staticmethod
    def _kill_process(process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.kill()

    def _close_control(self) -> None:
        self._up.clear()
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()

    def _on_readable(self) -> None:
        control = self._control
        if control is None:
            return
        while True:
            try:
                data = control.recv(KV_CONTROL_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close_control()
                self._kill()  # whatever is left of it serves nobody
                self._fail_all("worker_died")
                return
            reply = jobs.unpack_reply(data)
            future = self._waiting.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply.done)

    def _fail_all(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(KvError(reason, "the KV worker ended"))


async def _line(stream: asyncio.StreamReader) -> str:
    """The next piece of output with control characters escaped; "" at its end."""
    data = await stream.read(KV_LOG_LINE_MAX_BYTES)
    return data.decode(errors="replace").encode("unicode_escape").decode("ascii")


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock.fileno(), lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock.fileno())
