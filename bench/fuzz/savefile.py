"""Coverage-guided fuzzing of the save-file reader and of rendering what it accepts.

    pip install -e '.[fuzz]'
    python bench/fuzz/savefile.py -runs=200000 -rss_limit_mb=512 [CORPUS]

Found faults stop it: an exception that is not a `SaveFileError`, a read past the file, or a rendered file
that does not read back. The memory limit is the bound on what a claim may make the reader allocate.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["viiwork"]):
    from viiwork.wire.savefile import layout_of, parse

from tests.fakes.savefiles import FORMS, make
from tests.fakes.statestore import info_of, store_of
from viiwork.errors import SaveFileError


def one(data: bytes) -> None:
    def pread(offset: int, size: int) -> bytes:
        assert min(offset, size) >= 0 and offset + size <= len(data)
        return data[offset : offset + size]

    try:
        info = parse(pread, len(data))
    except SaveFileError:
        return
    target = layout_of(info, slot=0, max_tokens=info.n_tokens)
    again = info_of(store_of(data).render(target))
    assert (again.n_tokens, again.shape) == (info.n_tokens, info.shape)


def main() -> None:
    with tempfile.TemporaryDirectory() as seeds:
        for at, state in enumerate(FORMS.values()):
            (Path(seeds) / str(at)).write_bytes(make(state.at(n=min(state.n, 4), checkpoints=(), n_layer=1)))
            (Path(seeds) / f"{at}-whole").write_bytes(make(state))
        atheris.Setup([*sys.argv, seeds], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
