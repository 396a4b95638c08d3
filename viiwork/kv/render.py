"""Writes a replica as a file for one engine's slot, proving every byte against the manifest on the way."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from viiwork.errors import KvError, SaveFileError
from viiwork.kv.buffers import new_buffer
from viiwork.kv.files import pread_of
from viiwork.kv.jobs import RenderDone, RenderJob, Stages
from viiwork.kv.link import Cancel, file_errors
from viiwork.kv.rowfile import RowFile
from viiwork.kv.store import Opened
from viiwork.limits import KV_BLOB_PIECE_BYTES, KV_FRAME_MAX_BYTES, KV_RENDER_THREADS
from viiwork.native.mover import pread_exact, pwrite_all
from viiwork.native.rows import scatter, transpose
from viiwork.wire.checkpoint import check_checkpoint
from viiwork.wire.groups import DIGEST_BYTES, groups_of
from viiwork.wire.plan import BlobBytes, BlobTurned, Bytes, Part, StoreRows, StoreStrips, plan_bytes
from viiwork.wire.rendering import Stored, StoredRows, most_useful, render_plan
from viiwork.wire.replica import Manifest
from viiwork.wire.state import Checkpoint, Segment, segments_of

PARALLEL_FROM_GROUPS = 8  # below, starting more threads costs more than it saves


def render(replica: Opened, job: RenderJob, cancel: Cancel) -> RenderDone:
    """Write `job.out`; it is there and whole, or `KvError` is raised and it is not there."""
    started = time.monotonic()
    manifest = replica.manifest
    stored = _stored(replica)
    n = most_useful(stored, job.target, job.at_most or manifest.n_tokens)
    if n == 0:
        raise SaveFileError("not_held", "no state this engine could take is held of these tokens")
    plan = render_plan(stored, manifest.tokens, job.target, n)
    size = plan_bytes(plan)
    turned = any(isinstance(part, StoreStrips | BlobTurned) for part in plan)
    with _created(job.out, size, turned) as (fd, view):
        _Rendering(replica, plan, n, fd, view, cancel).run()
    total = time.monotonic() - started
    return RenderDone(
        replica=replica.name,
        n_tokens=n,
        total_bytes=size,
        stages=Stages(render_s=total, total_s=total),
    )


@contextmanager
def _created(path: str, size: int, view: bool) -> Iterator[tuple[int, mmap.mmap | None]]:
    """A new file, and a view of it if wanted; removed again when what is done with it fails."""
    with file_errors():
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with file_errors():
            if view:
                os.posix_fallocate(fd, 0, size)  # a view of a file without its blocks would end the process
            else:
                os.ftruncate(fd, size)
        with mmap.mmap(fd, size) if view else nullcontext() as mapped:
            yield fd, mapped
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def _stored(replica: Opened) -> Stored:
    manifest = replica.manifest
    checkpoints: list[Checkpoint] = []
    for blob, fd in zip(manifest.blobs, replica.blobs, strict=True):
        facts = blob.facts
        if facts.kind == "checkpoint":
            where = facts.n_tokens, facts.pos_min, facts.pos_max
            checkpoints.append(
                check_checkpoint(manifest.shape, pread_of(fd), facts.size, manifest.tokens, *where)
            )
    return Stored(
        shape=manifest.shape,
        n_tokens=manifest.n_tokens,
        rows=tuple(StoredRows(lo=cache.lo, needed=cache.needed) for cache in manifest.caches),
        recurrent=tuple(b.facts.n_tokens for b in manifest.blobs if b.facts.kind == "recurrent"),
        checkpoints=tuple(checkpoints),
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one segment goes in the file."""

    segment: Segment
    part: StoreRows | StoreStrips
    at: int


class _Rendering:
    def __init__(
        self, replica: Opened, plan: list[Part], n: int, fd: int, view: mmap.mmap | None, cancel: Cancel
    ) -> None:
        self._replica, self._n, self._fd, self._cancel = replica, n, fd, cancel
        self._view = view  # there when something is transposed
        self._targets: list[list[_Target]] = [[] for _ in replica.manifest.caches]
        self._blobs: list[tuple[BlobBytes | BlobTurned, int]] = []
        self._literals: list[tuple[bytes, int]] = []
        segments = segments_of(replica.manifest.shape)
        at = 0
        for part in plan:
            match part:
                case Bytes(data):
                    self._literals.append((data, at))
                case StoreRows() | StoreStrips():
                    segment = segments[part.segment]
                    self._targets[segment.cache].append(_Target(segment, part, at))
                case BlobBytes() | BlobTurned():
                    self._blobs.append((part, at))
            at += part.size

    def run(self) -> None:
        with file_errors():
            for data, at in self._literals:
                pwrite_all(self._fd, data, at)
        self._copy_blobs()
        jobs: list[Callable[[], None]] = []
        for index, cache in enumerate(self._replica.manifest.shape.caches):
            rows = RowFile(self._replica.rows[index], cache)
            first = self._targets[index][0].part.pos // rows.group
            end = groups_of(self._n, rows.group)
            threads = KV_RENDER_THREADS if end - first >= PARALLEL_FROM_GROUPS else 1
            step = -(-(end - first) // threads)
            for low in range(first, end, step):
                stripe = range(low, min(low + step, end))
                jobs.append(partial(self._copy, index, rows, stripe))
        if len(jobs) == 1:
            jobs[0]()
        elif jobs:
            with ThreadPoolExecutor(KV_RENDER_THREADS, thread_name_prefix="kv-render") as pool:
                for done in [pool.submit(job) for job in jobs]:
                    done.result()

    # -- rows

    def _copy(self, index: int, rows: RowFile, stripe: range) -> None:
        """Prove these groups of a cache, and put into the file what it takes of them."""
        manifest = self._replica.manifest
        held = manifest.caches[index]
        buffer = new_buffer(KV_FRAME_MAX_BYTES)
        for group in stripe:
            self._cancel.check()
            lo = max(held.lo, group * rows.group)
            hi = min(manifest.n_tokens, (group + 1) * rows.group)
            view = buffer[: (hi - lo) * rows.row_bytes]
            rows.read(lo, hi - lo, view)
            at = (group - held.lo // rows.group) * DIGEST_BYTES
            if blake3(view).digest(length=DIGEST_BYTES) != held.digests[at : at + DIGEST_BYTES]:
                raise KvError("corrupt", "the replica changed since it was verified")
            self._place(index, lo, hi, view)

    def _place(self, index: int, lo: int, hi: int, view: memoryview) -> None:
        """`view` holds rows [lo, hi) of every segment."""
        held = hi - lo
        ranges: list[tuple[int, int]] = []
        begun = at = 0
        for target in self._targets[index]:
            part, width = target.part, target.segment.row_bytes
            low, high = max(lo, part.pos), min(hi, part.pos + part.n)
            whole = (low, high) == (lo, hi)
            if isinstance(part, StoreRows) and whole:
                ranges.append((target.at + (low - part.pos) * width, held * width))
            else:
                self._write(view[begun:at], ranges)
                if low < high:
                    self._place_some(
                        target, low, high, view[at + (low - lo) * width : at + (high - lo) * width]
                    )
                ranges, begun = [], at + held * width
            at += held * width
        self._write(view[begun:at], ranges)

    def _write(self, data: memoryview, ranges: list[tuple[int, int]]) -> None:
        if ranges:
            with file_errors():
                scatter(self._fd, data, ranges)

    def _place_some(self, target: _Target, low: int, high: int, rows: memoryview) -> None:
        part = target.part
        if isinstance(part, StoreRows):
            self._write(rows, [(target.at + (low - part.pos) * target.segment.row_bytes, len(rows))])
            return
        # Row r, channel c goes to strip c, cell r: a transposition straight into the file.
        elem = part.elem_bytes
        first = target.at + (low - part.pos) * elem
        assert self._view is not None
        with memoryview(self._view) as whole, whole[first : target.at + part.size] as out:
            transpose(rows, high - low, part.n_channels, elem, out, dst_stride=part.n * elem)

    # -- blobs

    def _copy_blobs(self) -> None:
        wanted = {(part.kind, part.n_tokens) for part, _ in self._blobs}
        for blob, fd in zip(self._replica.manifest.blobs, self._replica.blobs, strict=True):
            if (blob.facts.kind, blob.facts.n_tokens) in wanted and _digest_of(
                fd, blob.facts.size
            ) != blob.digest:
                raise KvError("corrupt", "a blob changed since it was verified")
        for part, at in self._blobs:
            fd = self._blob_fd(self._replica.manifest, part)
            if isinstance(part, BlobTurned):
                source = memoryview(bytearray(part.size))
                with file_errors():
                    pread_exact(fd, source, part.offset)
                assert self._view is not None
                with memoryview(self._view) as whole, whole[at : at + part.size] as out:
                    transpose(source, part.n_rows, part.n_columns, part.elem_bytes, out)
            else:
                self._copy_bytes(fd, part.offset, at, part.size)

    def _blob_fd(self, manifest: Manifest, part: BlobBytes | BlobTurned) -> int:
        for blob, fd in zip(manifest.blobs, self._replica.blobs, strict=True):
            if (blob.facts.kind, blob.facts.n_tokens) == (part.kind, part.n_tokens):
                return fd
        raise KvError("bug", "the plan names a blob that is not held")

    def _copy_bytes(self, fd: int, source: int, target: int, size: int) -> None:
        buffer = memoryview(bytearray(min(size, KV_BLOB_PIECE_BYTES)))
        for at in range(0, size, KV_BLOB_PIECE_BYTES):
            self._cancel.check()
            piece = buffer[: min(KV_BLOB_PIECE_BYTES, size - at)]
            with file_errors():
                pread_exact(fd, piece, source + at)
                pwrite_all(self._fd, piece, target + at)


def _digest_of(fd: int, size: int) -> bytes:
    whole = blake3()
    buffer = memoryview(bytearray(min(size, KV_BLOB_PIECE_BYTES)))
    for at in range(0, size, KV_BLOB_PIECE_BYTES):
        piece = buffer[: min(KV_BLOB_PIECE_BYTES, size - at)]
        with file_errors():
            pread_exact(fd, piece, at)
        whole.update(piece)
    return whole.digest()
