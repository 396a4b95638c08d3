"""Writes a replica as a file for one engine's slots, proving every byte against the manifest on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from blake3 import blake3

from viiwork.errors import KvError
from viiwork.kv.files import pread_of
from viiwork.kv.jobs import RenderDone, RenderJob, Stages
from viiwork.kv.link import Cancel, file_errors
from viiwork.kv.store import Opened
from viiwork.native.mover import pread_exact, pwrite_all
from viiwork.wire.replica import n_chunks, root_of
from viiwork.wire.whole_file import Literal, Segment, Span, plan_bytes, render_plan

THREADS = 2  # one copies at about 1 GB/s; more would take the cores the engine prefills with
PARALLEL_FROM_CHUNKS = 16  # below, starting a second thread costs more than it saves


def render(replica: Opened, job: RenderJob, cancel: Cancel) -> RenderDone:
    """Write `job.out`; it is there and whole, or `KvError` is raised and it is not there."""
    started = time.monotonic()
    plan = render_plan(replica.info, job.target, pread_of(replica.fd))
    size = plan_bytes(plan)
    with file_errors():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        out = os.open(job.out, flags, 0o600)
    try:
        with file_errors():
            os.ftruncate(out, size)
        _write(replica, plan, out, cancel)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(job.out)
        raise
    finally:
        os.close(out)
    total = time.monotonic() - started
    return RenderDone(
        replica=replica.name,
        n_tokens=replica.info.n_tokens,
        total_bytes=size,
        stages=Stages(render_s=total, total_s=total),
    )


def _write(replica: Opened, plan: list[Segment], out: int, cancel: Cancel) -> None:
    moves: list[tuple[int, int, int]] = []  # (from, to, size)
    at = 0
    for part in plan:
        match part:
            case Literal(data):
                with file_errors():
                    pwrite_all(out, data, at)
                at += len(data)
            case Span(offset, size):
                moves.append((offset, at, size))
                at += size
    count = n_chunks(replica.manifest.offer)
    threads = THREADS if count >= PARALLEL_FROM_CHUNKS else 1
    step = -(-count // threads)
    stripes = [range(first, min(first + step, count)) for first in range(0, count, step)]
    with ThreadPoolExecutor(threads, thread_name_prefix="kv-render") as pool:
        parts = list(pool.map(lambda stripe: _copy(replica, stripe, moves, out, cancel), stripes))
    if root_of(b"".join(parts)) != replica.manifest.root:
        raise KvError("corrupt", "the replica changed since it was verified")


def _copy(
    replica: Opened, chunks: range, moves: list[tuple[int, int, int]], out: int, cancel: Cancel
) -> bytes:
    """Copy what the plan keeps of these chunks; their digests."""
    offer = replica.manifest.offer
    buffer = memoryview(bytearray(offer.chunk_bytes))
    digests = bytearray()
    for index in chunks:
        cancel.check()
        start = index * offer.chunk_bytes
        view = buffer[: min(offer.chunk_bytes, offer.total_bytes - start)]
        with file_errors():
            pread_exact(replica.fd, view, start)
            digests += blake3(view).digest()
            for low, high, to in _overlaps(moves, start, start + len(view)):
                pwrite_all(out, view[low - start : high - start], to)
    return bytes(digests)


def _overlaps(moves: list[tuple[int, int, int]], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    for source, target, size in moves:
        low, high = max(start, source), min(end, source + size)
        if low < high:
            yield low, high, target + (low - source)
