"""Reads llama.cpp's slot save-files: every form of them, bounded, nothing believed before it is checked.

The file names neither its memory kind nor whether cells carry extra words nor whether V rows exist, so
every known form is tried and the file is accepted when exactly one ends where it ends.
"""

from __future__ import annotations

from collections.abc import Callable

from viiwork.wire.state import Checkpoint, Layout, SaveInfo, StateShape

PRead = Callable[[int, int], bytes]  # (offset, n) -> exactly n bytes


def parse(pread: PRead, total: int, *, n_vocab: int = 0) -> SaveInfo:
    """Check a whole save-file and return its facts; rows and blobs are not read.

    Raises `SaveFileError`: `bad_file` when it is damaged or not a save-file, `not_portable` when it is a
    form that is not moved between engines, `too_large`.
    """
    raise NotImplementedError


def layout_of(probe: SaveInfo, *, slot: int, max_tokens: int, n_vocab: int = 0) -> Layout:
    """The layout a probe save of an engine tells of; checkpoints and window depth it does not."""
    raise NotImplementedError


def check_recurrent(shape: StateShape, blob: bytes | memoryview) -> int:
    """Tokens a received recurrent blob stands for; raises `SaveFileError` when it is not of this shape."""
    raise NotImplementedError


def check_checkpoint(
    shape: StateShape, pread: PRead, size: int, tokens: bytes, n_tokens: int, pos_min: int, pos_max: int
) -> Checkpoint:
    """Facts of a received checkpoint of `size` bytes, with offset 0; raises `SaveFileError`.

    `tokens` are the session's, as little-endian i32: with `ext` shapes every cell names its token.
    """
    raise NotImplementedError
