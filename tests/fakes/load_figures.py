"""What a run under load comes to: pure arithmetic over what clients and engines saw."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.fakes.load import Planned, Ran, Sent

Window = tuple[float, float]

SAME_MOMENT_S = 0.25  # requests sent, or begun, this close have no order: a busy machine mixes them


def used_share(ran: Iterable[Ran], slot_s: float, window: Window) -> float:
    """Which share of the slot-seconds in the window went into chats."""
    return sum(_overlap((r.started_at, r.ended_at), window) for r in ran if r.how != "clash") / slot_s


def outside(ran: Iterable[Ran], gone: Window) -> Iterator[Ran]:
    """The parts of chats before and after the time their engine was gone."""
    for one in ran:
        if one.started_at < gone[0]:
            yield replace(one, ended_at=min(one.ended_at, gone[0]))
        if one.ended_at > gone[1]:
            yield replace(one, started_at=max(one.started_at, gone[1]))


def slot_seconds(n_slots: int, window: Window, lost: Sequence[tuple[int, Window]] = ()) -> float:
    """What so many slots offer in the window; `lost` are slots that were gone for a time."""
    whole = n_slots * (window[1] - window[0])
    return whole - sum(n * _overlap(gone, window) for n, gone in lost)


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A request that still waited when one that came later to the same queue was begun."""

    tag: str
    by: str
    by_s: float  # how long before it the later one was begun


def overtaken(
    sent: Iterable[Sent], ran: Iterable[Ran], same_moment_s: float = SAME_MOMENT_S
) -> list[Overtaken]:
    """Breaches of first in, first out, for each model and entry node.

    A request that waited its whole time in vain was overtaken as well, if a later one was begun before.
    """
    begun = {r.tag: r.started_at for r in ran if r.how != "clash"}
    queues: dict[tuple[str, str], list[Sent]] = collections.defaultdict(list)
    for one in sent:
        if one.planned.tag in begun or one.code == "queue_timeout":
            queues[one.planned.entry, one.planned.model].append(one)
    found: list[Overtaken] = []
    for queue in queues.values():
        queue.sort(key=lambda one: one.sent_at)
        found += _overtaken_in(queue, begun, same_moment_s)
    return found


def _overtaken_in(queue: Sequence[Sent], begun: dict[str, float], same_moment_s: float) -> list[Overtaken]:
    sent_at = [one.sent_at for one in queue]
    first_later: list[tuple[float, str]] = [(float("inf"), "")]  # earliest begin of those from i on
    for one in reversed(queue):
        tag = one.planned.tag
        first_later.append(min(first_later[-1], (begun.get(tag, float("inf")), tag)))
    first_later.reverse()
    found = []
    for one in queue:
        granted_at = one.sent_at + one.queued_s
        out_at = begun.get(one.planned.tag, one.ended_at)
        if one.planned.tag in begun and out_at > granted_at + same_moment_s:
            continue  # it was stuck at a node that hung, and out of the queue meanwhile
        later = bisect.bisect_right(sent_at, one.sent_at + same_moment_s)
        begun_at, tag = first_later[later]
        if begun_at < out_at - same_moment_s:
            found.append(Overtaken(one.planned.tag, tag, out_at - begun_at))
    return found


def begun_for_nobody(
    sent: Iterable[Sent], ran: Iterable[Ran], same_moment_s: float = SAME_MOMENT_S
) -> list[str]:
    """Requests an engine began though their clients had left before."""
    left_at = {one.planned.tag: one.ended_at for one in sent if one.end == "left"}
    return [r.tag for r in ran if r.started_at > left_at.get(r.tag, float("inf")) + same_moment_s]


def expected_depth(
    requests: Iterable[Planned], duration_s: float, queue_max: int, queue_timeout_s: float
) -> dict[tuple[str, str], float]:
    """Mean length of each entry node's queues when far more comes than is served.

    Whoever comes then waits for nearly the whole time allowed, unless the client leaves before.
    """
    waiting_s: dict[tuple[str, str], float] = collections.defaultdict(float)
    for one in requests:
        patience_s = queue_timeout_s if one.leaves_after_s is None else one.leaves_after_s
        waiting_s[one.entry, one.model] += min(patience_s, queue_timeout_s)
    return {queue: min(total / duration_s, queue_max) for queue, total in waiting_s.items()}


def _overlap(one: Window, other: Window) -> float:
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0.0)
