"""What a workload came to: the values in a phase's `workload`, and how they add up.

Seconds and bytes are as measured. Where time or states were scaled, `speed` and `scale` turn them into those
of the modelled system: seconds x speed, bytes x scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from viiwork.bench.agents import Turn
from viiwork.core.replicas import warmth
from viiwork.errors import UsageError
from viiwork.limits import MIB

WARMTHS = ("warm", "partly", "cold")


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """What went out of both nodes within a second or so."""

    at_s: float  # its end
    seconds: float
    a_bytes: int
    b_bytes: int


class WorkloadRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one phase."""

    seed: int
    seconds: float
    turns: int
    failed: dict[str, int] = {}  # tries that were not answered, by why; they were asked again
    untold: int = 0  # turns of which the engine did not say what it reused
    compactions: int = 0
    moves: int = 0  # turns on another host than the session's turn before, compactions left out
    warm: int = 0  # of them, by how much of the prompt was reused
    partly: int = 0
    cold: int = 0
    moved_compactions: int = 0  # nothing could have been reused there
    reused_tokens: int = 0  # at moves
    moved_prompt_tokens: int = 0
    cached_tokens: int = 0  # of all turns
    prompt_tokens: int = 0
    ttft_s: list[float] = []
    moved_ttft_s: list[float] = []
    # Newest transfers of both nodes, as their status told them.
    send_s: list[float] = []
    send_bytes: list[int] = []  # rows, tokens and blobs: what the peer did not hold
    send_stages_s: dict[str, float] = {}  # summed
    import_s: list[float] = []
    sends: int = 0  # as counted by the nodes
    send_failures: dict[str, int] = {}
    imports: int = 0
    import_failures: dict[str, int] = {}
    wire_bytes: list[int]  # sent by each node
    stall_s: list[float]  # of each node's engine, by saves and restores
    not_warm_causes: dict[str, int] = {}  # as the nodes saw them
    goodput: list[Sample] = []


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`Phase.workload`."""

    setting: str  # of the link
    sessions: int
    slots: int  # of each host
    context: int
    engine: str  # "paced", or the model's file
    speed: float = 1.0  # time runs so many times faster than it is modelled
    scale: int = 1  # states are so many times smaller
    published_warm: float | None = None  # share, of the same setting
    runs: list[WorkloadRun] = []


def workload_of(raw: dict[str, Any]) -> Workload:
    """Raises `UsageError` for something else."""
    try:
        return msgspec.convert(raw, Workload)
    except msgspec.ValidationError as error:
        raise UsageError(f"expected the figures of a workload: {error}") from None


class Tallies:
    """What both nodes' status said at the beginning, since, and at the end."""

    def __init__(self, n_nodes: int) -> None:
        self._first: list[dict[str, Any]] = [{} for _ in range(n_nodes)]
        self._newest: list[dict[str, Any]] = [{} for _ in range(n_nodes)]
        self._seen: set[bytes] = set()
        self.transfers: list[dict[str, Any]] = []
        self.goodput: list[Sample] = []
        self._sampled: tuple[float, list[int]] | None = None

    def begin(self) -> None:
        """All that was told so far is of the time before."""
        self._first = list(self._newest)
        self.transfers.clear()
        self.goodput.clear()
        self._sampled = None

    def told(self, node: int, status: dict[str, Any]) -> None:
        """A node's whole status came; transfers before the first one do not count."""
        shared = _dict(status.get("kv_share"))
        is_first = not self._newest[node]
        if is_first:
            self._first[node] = shared
        self._newest[node] = shared
        for transfer in shared.get("last") or []:
            name = bytes([node]) + msgspec.json.encode(transfer, order="sorted")
            if name not in self._seen:
                self._seen.add(name)
                if not is_first:
                    self.transfers.append(_dict(transfer))

    def sample(self, at_s: float) -> None:
        sent = [self._since(node, "sent", "wire_bytes") for node in range(len(self._newest))]
        if self._sampled is not None:
            before_s, before = self._sampled
            a, b = (now - then for now, then in zip(sent, before, strict=True))
            self.goodput.append(Sample(round(at_s, 2), round(at_s - before_s, 2), a, b))
        self._sampled = at_s, sent

    def as_fields(self) -> dict[str, Any]:
        done = [transfer for transfer in self.transfers if transfer.get("result", "done") == "done"]
        sends = [t for t in done if t.get("what") == "send"]
        nodes = range(len(self._newest))
        stages: Counter[str] = Counter()
        for node in nodes:
            for what in ("sent", "received"):
                stages.update(self._differences(node, what, "stages_s"))
        return {
            "send_s": [float(t["took_s"]) for t in sends if "took_s" in t],
            "send_bytes": [int(t["raw_bytes"]) for t in sends if "raw_bytes" in t],
            "send_stages_s": {name: round(seconds, 4) for name, seconds in stages.items()},
            "import_s": [float(t["took_s"]) for t in done if t.get("what") == "import" and "took_s" in t],
            "sends": sum(self._since(node, "sent", "done") for node in nodes),
            "imports": sum(self._since(node, "imports", "done") for node in nodes),
            "send_failures": self._counted("sent", "failed"),
            "import_failures": self._counted("imports", "failed"),
            "wire_bytes": [self._since(node, "sent", "wire_bytes") for node in nodes],
            "stall_s": [round(sum(self._differences(node, "stall_s").values()), 4) for node in nodes],
            "not_warm_causes": self._counted("not_warm_causes"),
            "goodput": self.goodput,
        }

    def _since(self, node: int, *path: str) -> int:
        now, then = (_at(there[node], path) for there in (self._newest, self._first))
        return int(_number(now) - _number(then))

    def _differences(self, node: int, *path: str) -> dict[str, float]:
        now, then = (_dict(_at(there[node], path)) for there in (self._newest, self._first))
        found = {str(name): _number(value) - _number(then.get(name)) for name, value in now.items()}
        return {name: value for name, value in found.items() if value}

    def _counted(self, *path: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for node in range(len(self._newest)):
            found.update({name: int(n) for name, n in self._differences(node, *path).items()})
        return dict(found)


def run_of(seed: int, seconds: float, turns: Iterable[Turn], tallies: Tallies) -> WorkloadRun:
    """All figures of one run."""
    turns = [turn for turn in turns if turn.counts]
    done = [turn for turn in turns if not turn.failed]
    failed = Counter(turn.failed for turn in turns if turn.failed)
    told = [turn for turn in done if turn.cached is not None and turn.prompt is not None]
    moved = [turn for turn in told if turn.moved]
    moves = [turn for turn in moved if not turn.compacted]
    found = Counter(warmth(turn.cached, turn.prompt) for turn in moves)
    return WorkloadRun(
        seed=seed,
        seconds=round(seconds, 3),
        turns=len(done),
        failed=dict(failed),
        untold=len(done) - len(told),
        compactions=sum(turn.compacted for turn in done),
        moves=len(moves),
        warm=found["warm"],
        partly=found["partly"],
        cold=found["cold"],
        moved_compactions=len(moved) - len(moves),
        reused_tokens=sum(turn.cached or 0 for turn in moves),
        moved_prompt_tokens=sum(turn.prompt or 0 for turn in moves),
        cached_tokens=sum(turn.cached or 0 for turn in told),
        prompt_tokens=sum(turn.prompt or 0 for turn in told),
        ttft_s=[round(turn.ttft_s, 4) for turn in done],
        moved_ttft_s=[round(turn.ttft_s, 4) for turn in moves],
        **tallies.as_fields(),
    )


def _at(value: object, path: Iterable[str]) -> object:
    for name in path:
        value = _dict(value).get(name)
    return value


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


@dataclass(frozen=True, slots=True)
class Pooled:
    """All runs of a phase together, in seconds and bytes of the modelled system."""

    turns: int
    moves: int
    by_warmth: dict[str, int]
    reused_share: float | None  # of the prompts at moves
    ttft_s: list[float]
    moved_ttft_s: list[float]
    send_s: list[float]
    send_mib: list[float]
    import_s: list[float]
    mbps: tuple[float, float]  # sent by each node, mean over all the time
    stall_share: float  # of an engine's time, mean of both
    n_failed: int  # tries that were not answered


def pooled(work: Workload) -> Pooled:
    runs = work.runs
    seconds = sum(run.seconds for run in runs) * work.speed
    n_prompt = sum(run.moved_prompt_tokens for run in runs)

    def modelled_s(name: str) -> list[float]:
        return [value * work.speed for run in runs for value in getattr(run, name)]

    def mbps(node: int) -> float:
        n_bytes = sum(run.wire_bytes[node] for run in runs) * work.scale
        return n_bytes * 8 / 1e6 / seconds if seconds else 0.0

    return Pooled(
        turns=sum(run.turns for run in runs),
        moves=sum(run.moves for run in runs),
        by_warmth={name: sum(getattr(run, name) for run in runs) for name in WARMTHS},
        reused_share=sum(run.reused_tokens for run in runs) / n_prompt if n_prompt else None,
        ttft_s=modelled_s("ttft_s"),
        moved_ttft_s=modelled_s("moved_ttft_s"),
        send_s=modelled_s("send_s"),
        send_mib=[n * work.scale / MIB for run in runs for n in run.send_bytes],
        import_s=modelled_s("import_s"),
        mbps=(mbps(0), mbps(1)),
        stall_share=sum(sum(run.stall_s) for run in runs) * work.speed / 2 / seconds if seconds else 0.0,
        n_failed=sum(sum(run.failed.values()) for run in runs),
    )
