"""The worker process: `python -m viiwork.kv.worker`. Moves bytes as control asks; decides nothing.

The main thread only reads the control socket. Its end means that the node is gone: every job is
cancelled, the replicas are removed and the process ends.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from viiwork.errors import KvError
from viiwork.kv import jobs
from viiwork.kv.ciphers import prefers_aes
from viiwork.kv.extract import facts_of
from viiwork.kv.files import open_save, pread_of
from viiwork.kv.keep import keep_state
from viiwork.kv.link import Cancel
from viiwork.kv.receiver import receive_state
from viiwork.kv.render import render
from viiwork.kv.sender import send_state
from viiwork.kv.store import ReplicaStore
from viiwork.limits import KV_CONTROL_MAX_BYTES, KV_JOBS_MAX, KV_LOCAL_JOBS, KV_PREFIX_TOKENS
from viiwork.wire.channel import warm_up
from viiwork.wire.replica import TOKEN_BYTES, common_prefix
from viiwork.wire.savefile import parse

STOP_WITHIN_S = 5.0  # after the node is gone; then the process ends whatever its threads do
_PR_SET_PDEATHSIG = 1


class Worker:
    """Serves one control socket until it ends."""

    def __init__(self, control: socket.socket, store: ReplicaStore, *, aes: bool) -> None:
        self._control, self._store, self._aes = control, store, aes
        # Two pools: whatever peers do, a turn that waits for its render gets a thread.
        self._transfers = ThreadPoolExecutor(KV_JOBS_MAX, thread_name_prefix="kv-transfer")
        self._local = ThreadPoolExecutor(KV_LOCAL_JOBS, thread_name_prefix="kv-local")
        self._lock = threading.Lock()  # the three fields below
        self._running: dict[int, Cancel] = {}
        self._n_transfers = 0
        self._stopping = False
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        self._reply(0, jobs.Ready(pid=os.getpid()))
        while (received := self._next()) is not None:
            request, sock = received
            if isinstance(request.job, jobs.CancelJob):
                self._cancel(request.job.id)
            else:
                self._begin(request.id, request.job, sock)

    def stop(self) -> None:
        """Cancel what runs, wait for it, remove the replicas."""
        with self._lock:
            self._stopping = True
            running = list(self._running.values())
        for cancel in running:
            cancel.set()
        self._transfers.shutdown(cancel_futures=True)
        self._local.shutdown(cancel_futures=True)
        self._store.close()

    def _next(self) -> tuple[jobs.Request, socket.socket | None] | None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, KV_CONTROL_MAX_BYTES, 2)
        except ConnectionError:
            return None
        if not data:
            return None
        sock = socket.socket(fileno=fds[0]) if fds else None
        for extra in fds[1:]:
            os.close(extra)
        return jobs.unpack_request(data), sock

    def _begin(self, id_: int, job: jobs.Job, sock: socket.socket | None) -> None:
        cancel = Cancel()
        with self._lock:
            full = sock is not None and self._n_transfers >= KV_JOBS_MAX
            if not full:
                self._running[id_] = cancel
                self._n_transfers += sock is not None
        if not full:
            pool = self._local if sock is None else self._transfers
            pool.submit(self._run, id_, job, sock, cancel)
            return
        if sock is not None:
            sock.close()
        self._reply(id_, jobs.Failed(reason="busy", message="the worker has its most transfers running"))

    def _cancel(self, id_: int) -> None:
        with self._lock:
            cancel = self._running.get(id_)
        if cancel is not None:
            cancel.set()

    def _run(self, id_: int, job: jobs.Job, sock: socket.socket | None, cancel: Cancel) -> None:
        done: jobs.Done
        try:
            done = self._do(job, sock, cancel)
        except KvError as error:
            # Cancelling works by cutting the socket; what the job then reports is not the reason.
            reason = cancel.reason if cancel.is_set else error.reason
            done = jobs.Failed(reason=reason, message=str(error)[:500])
        except Exception as error:  # noqa: BLE001 - one job's bug must not take the other jobs along
            sys.excepthook(type(error), error, error.__traceback__)
            done = jobs.Failed(reason="bug", message=f"{type(error).__name__}: {error}"[:500])
        finally:
            if sock is not None:
                sock.close()
        with self._lock:
            del self._running[id_]
            self._n_transfers -= sock is not None
        self._reply(id_, done)

    def _do(self, job: jobs.Job, sock: socket.socket | None, cancel: Cancel) -> jobs.Done:
        match job:
            case jobs.SendJob():
                return send_state(_need(sock), job, cancel, aes=self._aes)
            case jobs.ReceiveGrant():
                return receive_state(_need(sock), job, self._store, cancel, aes=self._aes)
            case jobs.KeepJob():
                return keep_state(job, self._store, cancel)
            case jobs.RenderJob():
                return self._render(job, cancel)
            case jobs.MatchJob():
                return self._match(job)
            case jobs.InspectJob():
                with open_save(job.path) as (fd, size):
                    return jobs.InspectDone(info=facts_of(parse(pread_of(fd), size, n_vocab=job.n_vocab)))
            case jobs.DropJob():
                return jobs.DropDone(dropped=self._store.drop(job.replica))
            case jobs.StatsJob():
                return self._stats()

    def _render(self, job: jobs.RenderJob, cancel: Cancel) -> jobs.RenderDone:
        replica = self._store.open(job.replica)
        try:
            return render(replica, job, cancel)
        except KvError as error:
            if error.reason in ("corrupt", "bad_file"):
                self._store.drop(job.replica)
            raise
        finally:
            replica.close()

    def _match(self, job: jobs.MatchJob) -> jobs.MatchDone:
        replica = self._store.open(job.replica)
        try:
            tokens = replica.manifest.tokens
        finally:
            replica.close()
        n_same = common_prefix(job.prefix, tokens)
        following = tokens[TOKEN_BYTES * n_same :][: TOKEN_BYTES * KV_PREFIX_TOKENS]
        return jobs.MatchDone(n_same=n_same, next=following)

    def _stats(self) -> jobs.StoreStats:
        replicas, replica_bytes, unfinished, incoming = self._store.counts()
        with self._lock:
            transfers = self._n_transfers
        return jobs.StoreStats(
            replicas=replicas,
            replica_bytes=replica_bytes,
            unfinished=unfinished,
            incoming=incoming,
            budget_bytes=self._store.budget_bytes,
            transfers=transfers,
        )

    def _reply(self, id_: int, done: jobs.Done) -> None:
        try:
            data = jobs.pack(jobs.Reply(id=id_, done=done))
        except KvError as error:
            data = jobs.pack(jobs.Reply(id=id_, done=jobs.Failed(reason=error.reason, message=str(error))))
        try:
            with self._send_lock:
                self._control.send(data)
        except OSError:
            return  # the node is gone; the main thread sees that too


def _need(sock: socket.socket | None) -> socket.socket:
    if sock is None:
        raise KvError("protocol", "a transfer without a socket")
    return sock


class _ParentGone(BaseException):
    pass


class _ParentWatch:
    """Handler of the signal of the parent's death: it interrupts serving, and nothing that comes after."""

    def __init__(self) -> None:
        self.serving = True

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        if self.serving:
            raise _ParentGone


def _tie_to(parent: int, watch: _ParentWatch) -> None:
    """Hear of the parent's death by signal too: the control socket ends only when every copy is closed."""
    signal.signal(signal.SIGHUP, watch)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    if os.getppid() != parent:
        raise _ParentGone


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="viiwork.kv.worker")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--budget", type=int, required=True)
    args = parser.parse_args(argv)
    # The node decides when its workers end: signals to the whole group are not for them.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    control = socket.socket(fileno=args.control)
    try:
        store = ReplicaStore(args.store, args.budget)
    except KvError as error:
        control.send(jobs.pack(jobs.Reply(id=0, done=jobs.Failed(reason=error.reason, message=str(error)))))
        return 1
    warm_up()
    worker = Worker(control, store, aes=prefers_aes())
    watch = _ParentWatch()
    try:
        _tie_to(args.parent, watch)
        worker.serve()
        watch.serving = False
    except _ParentGone:
        watch.serving = False
    watchdog = threading.Timer(STOP_WITHIN_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    worker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
