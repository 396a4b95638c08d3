"""What a benchmark found: the values of `--json FILE`, which reports, plots and comparisons read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from viiwork.errors import UsageError
from viiwork.limits import BENCH_FILE_MAX_BYTES

Switch = Literal["off", "on", "auto"]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One state that was moved."""

    cache: Literal["cold", "warm"]  # whether the state's file lay in the sender's page cache
    compress: Switch
    encrypt: Switch
    bytes: int  # of tokens, rows and blobs: what the peer did not hold
    wire_bytes: int
    seconds: float  # from the open connection to the acknowledged commit
    raw_bytes_per_s: float  # of the raw stream measured just before, in the same round
    encrypted: bool = False  # what `encrypt` came to
    # Seconds in each stage; those of two threads overlap. Of the sender handshake_s, wait_s, read_s, hash_s,
    # compress_s, send_s; of the receiver receive_s, verify_s, write_s; then render_s and import_s.
    stages: dict[str, float] = {}
    cpu_s: dict[str, float] = {}  # of the workers: send, receive


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One path between two hosts, or one setting of the lab."""

    name: str
    emulated: list[str] = []  # what of it is not real, each in a few words
    link_mbps: int | None = None  # what the interfaces say, or what the lab shaped; None = not known
    path: str = ""  # where it led: addresses, interface
    failed: str = ""  # why there are no figures, or no more of them; "" = all is there
    raw_bytes_per_s: list[float] = []  # single TCP streams, one a round
    runs: list[Run] = []
    workload: dict[str, Any] | None = None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run of `viiwork bench kvshare`."""

    viiwork: str  # version
    kind: Literal["link", "lab", "workload"]
    started_unix_s: float
    host: dict[str, Any]  # name, system, cpus, memory_bytes, ...
    settings: dict[str, Any]  # what the command line said
    phases: list[Phase] = []


def encode_results(results: Results) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n"


def read_results(path: Path) -> Results:
    """Raises `UsageError` for a file that is not there or holds something else."""
    try:
        if path.stat().st_size > BENCH_FILE_MAX_BYTES:
            raise UsageError(f"{path}: larger than {BENCH_FILE_MAX_BYTES} bytes, not a benchmark's results")
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: expected the results of a benchmark, {error}") from None
