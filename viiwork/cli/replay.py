"""`viiwork replay`: ask the questions of a recorded arrival trace again, under another policy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from viiwork.core.replay import Replay, Totals
from viiwork.errors import TraceError, UsageError
from viiwork.limits import TRACE_LINE_MAX_BYTES
from viiwork.wire.trace import Head, decode_line


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="compare a recorded arrival trace with another routing policy",
        description="Ask the questions of a trace (routing.trace) again, and print what would differ.",
    )
    parser.add_argument("file", metavar="FILE", help="a trace, as routing.trace writes it")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="changes",
        help=f"change the recorded policy: {', '.join(_KEYS)} (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    changes = _changes(args.changes)
    replay = _replay(args.file, changes)
    body = _as_json(replay)
    print(json.dumps(body) if args.json else _as_text(body))
    return 0


def _replay(path: str, changes: dict[str, Any]) -> Replay:
    replay: Replay | None = None
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(TRACE_LINE_MAX_BYTES + 2), b""), 1):
                if not line.endswith(b"\n") and len(line) <= TRACE_LINE_MAX_BYTES:
                    break  # the node is still writing it
                try:
                    value = decode_line(line.rstrip(b"\n"))
                    if isinstance(value, Head):
                        policy = msgspec.structs.replace(value.policy, **changes)
                        if replay is None:
                            replay = Replay(policy)
                        replay.policy = policy
                    elif replay is None:
                        raise TraceError("a trace begins with the line that holds its policy")
                    else:
                        replay.add(value.question, value.choice)
                except TraceError as error:
                    raise TraceError(f"{path}:{number}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if replay is None:
        raise TraceError(f"{path}: holds no trace")
    return replay


def _as_json(replay: Replay) -> dict[str, Any]:
    return {
        "policy": msgspec.to_builtins(replay.policy),
        "decisions": replay.n_decisions,
        "elsewhere": replay.n_elsewhere,
        "old": _totals(replay.old),
        "new": _totals(replay.new),
    }


def _totals(totals: Totals) -> dict[str, Any]:
    p50, p90 = totals.predicted(0.5), totals.predicted(0.9)
    return {
        "predicted_ttft_p50_ms": None if p50 is None else round(p50, 1),
        "predicted_ttft_p90_ms": None if p90 is None else round(p90, 1),
        "moves": totals.moves,
        "holds": totals.holds,
        "hold_ms": round(totals.hold_ms, 1),
        "waits": totals.waits,
    }


def _as_text(body: dict[str, Any]) -> str:
    policy = " ".join(f"{key}={json.dumps(value)}" for key, value in body["policy"].items())
    share = 100 * body["elsewhere"] / body["decisions"] if body["decisions"] else 0.0
    lines = [
        f"policy: {policy}",
        f"decisions: {body['decisions']}, placed elsewhere: {body['elsewhere']} ({share:.1f} %)",
        f"{'':24}{'recorded':>12}{'replayed':>12}",
    ]
    for key, label in (
        ("predicted_ttft_p50_ms", "predicted TTFT p50, ms"),
        ("predicted_ttft_p90_ms", "predicted TTFT p90, ms"),
        ("moves", "moves of sessions"),
        ("holds", "waits for a warm node"),
        ("hold_ms", "  of at most, ms"),
        ("waits", "waits for any node"),
    ):
        old, new = (body[side][key] for side in ("old", "new"))
        lines.append(f"{label:24}{_shown(old):>12}{_shown(new):>12}")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, int) else f"{value:.1f}"


def _is_true(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def _number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        expected = f"a number from {least:g} to {most:g}"
        try:
            value = float(text)
        except ValueError:
            raise ValueError(expected) from None
        if not least <= value <= most:
            raise ValueError(expected)
        return value

    return read


_KEYS: dict[str, Callable[[str], Any]] = {
    "performance": _is_true,
    "band": _number(1, 100),
    "explore": _number(0, 1),
    "hold": _is_true,
}


def _changes(given: Sequence[str]) -> dict[str, Any]:
    changes = {}
    for one in given:
        key, mark, value = one.partition("=")
        if not mark or key not in _KEYS:
            raise UsageError(f"--set: expected KEY=VALUE with one of {', '.join(_KEYS)}, got {one[:80]!r}")
        try:
            changes[key] = _KEYS[key](value)
        except ValueError as error:
            raise UsageError(f"--set {key}: expected {error}, got {value[:80]!r}") from None
    return changes
