"""What the compiled row kernels do a second, beside a plain copy, and what planes + zstd gain.

One thread; the best of `--rounds` by CPU time counts, so a busy machine answers alike. The rows are made:
normal values, each channel with a scale of its own, rounded to the type. Given `--state FILE` (a slot
save-file of a dense model) the codec is measured on the rows of that file as well.

    python bench/kv/kernels.py [--kib 1024] [--rounds 30] [--state FILE]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

from viiwork.native.rows import gather, merge_planes, scatter, split_planes, transpose

CHANNELS = 192


def gb_per_s(work: Callable[[], object], size: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begun = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - begun)
    return size / max(min(times), 1)


def made_rows(size: int, type_: type) -> bytes:
    rng = np.random.default_rng(1)
    n_rows = size // np.dtype(type_).itemsize // CHANNELS
    scales = np.exp(rng.normal(0, 1, CHANNELS))
    return (rng.normal(0, 1, (n_rows, CHANNELS)) * scales).astype(type_).tobytes()


def kernels(size: int, rounds: int) -> None:
    src, dst = bytearray(os.urandom(size)), bytearray(size)
    path = Path(f"/dev/shm/viiwork-kernels-{os.getpid()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    scatter(fd, src, [(0, size)])
    works: dict[str, Callable[[], object]] = {
        "copy (slice assignment)": lambda: dst.__setitem__(slice(None), src)
    }
    for piece in (2048, 64 << 10):
        # Every other piece, so that none of them joins its neighbour.
        ranges = [(2 * at, piece) for at in range(0, size // 2, piece)]
        works[f"gather pieces of {piece} B"] = lambda ranges=ranges: gather(fd, ranges, dst)
        works[f"scatter pieces of {piece} B"] = lambda ranges=ranges: scatter(fd, src, ranges)
    for elem in (1, 2, 4):
        n_rows = size // elem // CHANNELS
        works[f"transpose {n_rows} x {CHANNELS} of {elem} B"] = lambda n=n_rows, e=elem: transpose(
            src, n, CHANNELS, e, dst
        )
    for width in (2, 4):
        works[f"split {width} planes"] = lambda width=width: split_planes(src, dst, width)
        works[f"merge {width} planes"] = lambda width=width: merge_planes(src, dst, width)
    for name, work in works.items():
        moved = size // 2 if "pieces" in name else size
        print(f"{name:34} {gb_per_s(work, moved, rounds):8.2f} GB/s")
    os.close(fd)


def codec(name: str, data: bytes, width: int, rounds: int) -> None:
    planes, back = bytearray(len(data)), bytearray(len(data))
    pack, unpack = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def compress() -> bytes:
        split_planes(data, planes, width)
        return pack.compress(planes)

    packed = compress()

    def decompress() -> None:
        merge_planes(unpack.decompress(packed), back, width)

    decompress()
    if back != data:
        raise SystemExit(f"{name}: what came back is something else")
    there, again = gb_per_s(compress, len(data), rounds), gb_per_s(decompress, len(data), rounds)
    raw = len(data) / len(pack.compress(data))
    gain = len(data) / len(packed)
    print(f"{name:34} {gain:8.3f} x (raw {raw:.3f} x), {there:.2f} GB/s there, {again:.2f} GB/s back")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--state", type=Path)
    args = parser.parse_args()
    size = args.kib << 10
    kernels(size, args.rounds)
    codec("planes + zstd 1, f16 made", made_rows(size, np.float16), 2, args.rounds)
    codec("planes + zstd 1, f32 made", made_rows(size, np.float32), 4, args.rounds)
    if args.state:
        state = args.state.read_bytes()
        for share in (0.25, 0.75):  # keys come first, values after them
            at = int(len(state) * share) // 4 * 4  # every field of the file is
            codec(f"planes + zstd 1, {share:.0%} into the file", state[at : at + size], 2, args.rounds)


if __name__ == "__main__":
    main()
