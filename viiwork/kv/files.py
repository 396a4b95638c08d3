"""Opening and reading the files a worker is told of, without following links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from viiwork.errors import SaveFileError
from viiwork.kv.link import file_errors
from viiwork.wire.whole_file import PRead


@contextmanager
def open_save(path: str, expect_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a save-file; raises `KvError`."""
    with file_errors():
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise SaveFileError("bad_file", "the save-file is not a regular file")
        # The engine ignores an error of its last flush; only the size tells.
        if expect_bytes and found.st_size != expect_bytes:
            raise SaveFileError("bad_file", f"{found.st_size} bytes, the engine reported {expect_bytes}")
        yield fd, found.st_size
    finally:
        os.close(fd)


def pread_of(fd: int) -> PRead:
    """Reader for `whole_file.parse`; raises `KvError` where the file ends early."""

    def pread(offset: int, size: int) -> bytes:
        with file_errors():
            data = os.pread(fd, size, offset)
        if len(data) != size:
            raise SaveFileError("bad_file", "the file became shorter while it was read")
        return data

    return pread
