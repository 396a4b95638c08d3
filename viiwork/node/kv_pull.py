"""The asking side of a pull: the turn is here, and a newer state of its session at a peer or on its way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from viiwork.core.capacity import KvIdentity
from viiwork.core.holdings import Holding, still_right
from viiwork.core.replicas import ReplicaTable
from viiwork.core.sessions import SessionKey
from viiwork.core.turn import Ask
from viiwork.core.ways import ImportCosts, Way
from viiwork.errors import MeshError, RequestError
from viiwork.limits import KV_PULL_GUESS_S, KV_PULL_MAX_S, KV_SAVE_GUESS_S_PER_GB
from viiwork.mesh.direct import DirectClient
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import Member
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_arrivals import Arrivals
from viiwork.node.kv_layouts import EngineLayout
from viiwork.node.kv_paths import KvPaths
from viiwork.wire.kvpull import PULL_PATH, PullAsk, decode_done, encode

log = logging.getLogger(__name__)


class _Source(NamedTuple):
    """A peer that holds a state, and how much of the prompt that is."""

    n_tokens: int
    is_replica: bool  # of equals the better one: no engine is stopped for it
    member: Member
    holding: Holding


class Fetcher:
    """Knows what could come from where, what that takes, and fetches it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        replicas: ReplicaTable,
        arrivals: Arrivals,
        paths: KvPaths,
        client: DirectClient,
        member: Callable[[str], Member | None],
    ) -> None:
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._arrivals = arrivals
        self._paths = paths
        self._client = client
        self._member = member
        self._done = 0
        self._failed: Counter[str] = Counter()

    def has_any(self, key: SessionKey) -> bool:
        """Does a peer hold a state of the session, or is one on its way?"""
        return self._arrivals.newest(key) is not None or bool(self._dispatcher.book.at_peers(key))

    def ways(
        self, ask: Ask, key: SessionKey, newer_than: int, layout: EngineLayout, costs: ImportCosts
    ) -> list[Way]:
        """To wait for a transfer that runs, and to ask for one: what each would bring, and take."""
        found = []
        token_bytes = layout.shape.token_bytes
        replica = self._replicas.get(key)
        kept = replica.n_tokens if replica is not None else 0
        incoming = self._arrivals.newest(key)
        if incoming is not None and incoming.generation > newer_than:
            n_tokens = still_right(ask, key[0], incoming.tip, incoming.n_tokens)
            member = self._member(incoming.source)
            all_s = self._wire_s(member, (incoming.n_tokens - kept) * token_bytes)
            left_s = max(all_s - (time.monotonic() - incoming.began_s), KV_PULL_GUESS_S)
            import_s = costs.seconds(key[1], incoming.n_tokens * token_bytes)
            found.append(Way("tail", n_tokens, left_s + import_s))
        source = self._best_source(ask, key, newer_than, layout.identity())
        if source is not None and (incoming is None or source.holding.generation > incoming.generation):
            n_bytes = source.holding.n_tokens * token_bytes
            pull_s = KV_PULL_GUESS_S + n_bytes / 1e9 * KV_SAVE_GUESS_S_PER_GB
            pull_s += self._wire_s(source.member, (source.holding.n_tokens - kept) * token_bytes)
            found.append(Way("pull", source.n_tokens, pull_s + costs.seconds(key[1], n_bytes)))
        return found

    async def fetch(
        self, way: Way, ask: Ask, key: SessionKey, newer_than: int, layout: EngineLayout, limit_s: float
    ) -> str:
        """Have a replica newer than that here within the time; why not in one word, "" = it is here."""
        limit_s = min(limit_s, KV_PULL_MAX_S)
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                why = await self._fetch(way, ask, key, newer_than, layout)
        except TimeoutError:
            why = "too_slow"
        except (MeshError, RequestError) as error:
            why = "refused"
            log.info("kv_share.not_pulled session=%s model=%s: %s", key[0][:8], key[1], one_line(str(error)))
        log.info(
            "kv_share.fetched how=%s session=%s model=%s seconds=%.3f%s",
            way.kind,
            key[0][:8],
            key[1],
            time.monotonic() - began,
            f" failed={why}" if why else "",
        )
        if why:
            self._failed[why] += 1
            return "replica_behind"
        self._done += 1
        return ""

    def as_json(self) -> dict[str, Any]:
        """A part of `kv_share.pulls` of `/v1/status`."""
        return {"done": self._done, "failed": dict(self._failed)}

    async def _fetch(self, way: Way, ask: Ask, key: SessionKey, newer_than: int, layout: EngineLayout) -> str:
        if way.kind == "pull":
            source = self._best_source(ask, key, newer_than, layout.identity())
            if source is None:
                return "gone"
            question = PullAsk(session=key[0], model=key[1], newer_than=max(newer_than, 0))
            answer = await self._client.ask(source.member, PULL_PATH, encode(question), KV_PULL_MAX_S)
            decode_done(answer)
        there = await self._arrivals.until(key, newer_than, announced=way.kind == "pull")
        return "" if there else "broken_off"

    def _best_source(self, ask: Ask, key: SessionKey, newer_than: int, own: KvIdentity) -> _Source | None:
        """Who holds most of the prompt in a state that an engine here takes."""
        reports = self._dispatcher.peers.reports()
        found = []
        for node, holding in self._dispatcher.book.at_peers(key).items():
            heard, member = reports.get(node), self._member(node)
            if heard is None or member is None or holding.generation <= newer_than or holding.where == "ram":
                continue
            entry = heard.report.model(key[1])
            if (
                entry is None
                or entry.kv is None
                or not own.matches(entry.kv)
                or not own.fits(holding.n_tokens)
            ):
                continue
            n_tokens = still_right(ask, key[0], holding.tip, holding.n_tokens)
            found.append(_Source(n_tokens, holding.where == "replica", member, holding))
        return max(found, key=lambda source: source[:2], default=None)

    def _wire_s(self, member: Member | None, n_bytes: int) -> float:
        return max(n_bytes, 0) / self._paths.bytes_per_s(member)
