"""The state that is moved: a save-file made of seeded rows, and whether it lies in the page cache."""

from __future__ import annotations

import errno
import os
import random
import struct
from dataclasses import dataclass
from pathlib import Path

from viiwork.errors import BenchError
from viiwork.limits import BENCH_SIZE_MAX_BYTES, BENCH_SIZE_MIN_BYTES, MIB

LAYERS, ROW_BYTES = 16, 2048  # 64 KiB a token: the attention layers of a 27B hybrid model
TOKEN_BYTES = 2 * LAYERS * ROW_BYTES
HELD_TOKENS = 64  # what the peer has of the session before the delta comes
_CHANNELS = ROW_BYTES // 2
# Rows that differ. A frame holds at most 1,024 (32 tokens of 32 segments) and is packed by itself, so no
# compressor sees a row again.
_POOL_ROWS = 2048
_SEGMENT_STEP = 64  # rows by which one segment's part of the pool is ahead of the one before
_F16 = 1  # ggml's number
_BLOCK_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class BenchState:
    """A save-file that is sent, and the earlier one of the same session that the peer holds by then."""

    path: Path
    base: Path | None  # None = the peer holds nothing
    held: int  # tokens in `base`


def make_state(folder: Path, n_bytes: int, seed: int = 7) -> BenchState:
    """A dense model's save-file with a delta of about `n_bytes` in `folder`; raises `BenchError`.

    f16 values, normal, each channel with a mean and a width of its own, as those of real caches are.
    """
    if not BENCH_SIZE_MIN_BYTES <= n_bytes <= BENCH_SIZE_MAX_BYTES:
        raise BenchError(f"a state of {n_bytes} bytes cannot be made")
    n = HELD_TOKENS + max(n_bytes // TOKEN_BYTES, 1)
    pool = _pool(seed)
    state = BenchState(folder / "state", folder / "base", HELD_TOKENS)
    try:
        _write(folder / "base", HELD_TOKENS, pool)
        _write(folder / "state", n, pool)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = n * TOKEN_BYTES / MIB
            raise BenchError(f"no space for a state of {need:.0f} MiB in {folder}; see --dir") from None
        raise BenchError(f"cannot write to {folder}: {error.strerror}") from None
    return state


def warm(path: Path) -> None:
    """Read the file, so that it lies in the page cache."""
    buffer = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def cool(path: Path) -> bool:
    """Drop the file from the page cache; False where it stays there (a memory filesystem)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if not hasattr(os, "posix_fadvise"):
            return False
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return not _is_cached(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_cached(fd: int) -> bool:
    """Would the middle of the file be read without waiting for the disk?"""
    try:
        os.preadv(fd, [bytearray(1)], os.fstat(fd).st_size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):
        return True  # the system does not tell; a warm run must not be called a cold one
    return True


def _pool(seed: int) -> memoryview:
    """`_POOL_ROWS` rows, twice, so that a run of them that begins anywhere is one piece."""
    rng = random.Random(seed)
    widths = [rng.lognormvariate(0, 1) for _ in range(_CHANNELS)]
    means = [rng.gauss(0, 1) for _ in range(_CHANNELS)]
    channels = list(zip(means, widths, strict=True))
    pack = struct.Struct(f"<{_CHANNELS}e").pack
    gauss = rng.gauss
    rows = b"".join(
        pack(*[mean + width * gauss(0, 1) for mean, width in channels]) for _ in range(_POOL_ROWS)
    )
    return memoryview(rows + rows)


def _write(path: Path, n: int, pool: memoryview) -> None:
    words = [-1, 1, n, *(at % 49_000 for at in range(n)), 0]
    with path.open("xb") as out:
        out.write(struct.pack("<3I", 0x67677371, 4, len(words)) + struct.pack(f"<{len(words)}i", *words))
        out.write(struct.pack("<II", 1, n))
        out.write(b"".join(struct.pack("<3i", at, 1, 0) for at in range(n)))
        out.write(struct.pack("<4I", 0, LAYERS, 0, 0))
        for segment in range(2 * LAYERS):
            out.write(struct.pack("<iQ", _F16, ROW_BYTES))
            for at in range(0, n, _POOL_ROWS):
                begin = (segment * _SEGMENT_STEP + at) % _POOL_ROWS * ROW_BYTES
                out.write(pool[begin : begin + min(_POOL_ROWS, n - at) * ROW_BYTES])
        out.flush()
        os.fsync(out.fileno())
