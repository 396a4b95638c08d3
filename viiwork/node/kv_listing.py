"""What `/v1/kv` lists: the sessions and replicas this node holds, and its links."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from viiwork.core.replicas import ReplicaTable
from viiwork.core.sessions import SessionTable
from viiwork.limits import KV_LISTED_MAX
from viiwork.node.kv_stats import SHORT_CHARS


class KvListing:
    """Implements `api.ports.KvFacts`; reads others' tables."""

    def __init__(
        self,
        me: str,
        sessions: SessionTable,
        replicas: ReplicaTable,
        links: Callable[[], list[dict[str, Any]]],
        *,
        wall_ms: Callable[[], int],
        limit: int = KV_LISTED_MAX,
    ) -> None:
        self._me = me
        self._sessions = sessions
        self._replicas = replicas
        self._links = links
        self._wall_ms = wall_ms
        self._limit = limit

    def listing(self) -> dict[str, Any]:
        """See `api.ports.KvFacts.listing`."""
        now_ms = self._wall_ms()
        lists = {
            "sessions": self._held(now_ms),
            "replicas": self._kept(now_ms),
            "links": self._links(),
        }
        more = {name: max(len(found) - self._limit, 0) for name, found in lists.items()}
        return {
            "node": self._me,
            "sessions": _newest(lists["sessions"], self._limit),
            "replicas": _newest(lists["replicas"], self._limit),
            "links": lists["links"][: self._limit],
            "more": more,
        }

    def _held(self, now_ms: int) -> list[dict[str, Any]]:
        found = []
        for (session, model), binding in self._sessions:
            if not binding.is_here:
                continue
            slot = {"slot": binding.ref.slot} if binding.ref is not None else {}
            found.append(
                {
                    "session": session[:SHORT_CHARS],
                    "model": model,
                    "where": "slot" if binding.ref is not None else "ram",
                    "backend": binding.backend,
                    **slot,
                    "tokens": binding.n_tokens,
                    "age_s": _age_s(binding.generation, now_ms),
                }
            )
        return found

    def _kept(self, now_ms: int) -> list[dict[str, Any]]:
        return [
            {
                "session": replica.key[0][:SHORT_CHARS],
                "model": replica.key[1],
                "source": replica.source,
                "tokens": replica.n_tokens,
                "bytes": replica.n_bytes,
                "age_s": _age_s(replica.generation, now_ms),
            }
            for replica in self._replicas
        ]


def _newest(entries: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    return heapq.nsmallest(limit, entries, key=lambda entry: entry["age_s"])


def _age_s(generation: int, now_ms: int) -> float:
    """Of a state: its generation is the mesh's clock in milliseconds when its turn ended."""
    return max(now_ms - generation, 0) / 1000
