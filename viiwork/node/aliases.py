"""What the mesh's aliases mean on this node now, and the writes to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from viiwork.core import aliases as core
from viiwork.core.aliases import Asks, Entries, Entry, Resolution
from viiwork.errors import AliasUnserved
from viiwork.mesh.notices import Repeats
from viiwork.node.alias_store import AliasStore
from viiwork.node.clock import wall_ms
from viiwork.wire.aliases import encode_table, rfc3339, written

log = logging.getLogger(__name__)


class Aliases:
    """Implements `api.ports.AliasTable`.

    `known` says whether a name is a model of the mesh, `served` whether somebody runs it now. `on_write`
    hears of writes taken here, `on_event` of what is logged.
    """

    def __init__(
        self,
        me: str,
        store: AliasStore,
        *,
        known: Asks,
        served: Asks,
        on_write: Callable[[str, Entry], None] = lambda name, entry: None,
        on_event: Callable[[str], None] = lambda line: None,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._me = me
        self._store = store
        self._known = known
        self._served = served
        self._on_write = on_write
        self._on_event = on_event
        self._now_ms = now_ms
        self._repeats = Repeats()  # a member can write as often as it likes

    # -- api.ports.Facts -----------------------------------------------------------------------------
    def model_for(self, name: str) -> str | None:
        """See `api.ports.Facts.model_for`."""
        meaning = self.meaning(name)
        if meaning is None:
            return None
        if meaning.state == "unavailable":
            current = self._store.table[name].current
            models = " or ".join(repr(model) for model in (current.target, *current.fallbacks))
            raise AliasUnserved(f"the alias {name!r} stands for {models}, which no node serves now")
        return meaning.model

    def meaning(self, name: str) -> Resolution | None:
        """What an alias stands for now, None when `name` is none."""
        entry = self._store.table.get(name)
        if entry is None or entry.deleted:
            return None
        return core.resolve(entry, name, known=self._known, served=self._served)

    # -- api.ports.AliasTable ------------------------------------------------------------------------
    def listing(self) -> list[dict[str, Any]]:
        """See `api.ports.AliasTable.listing`."""
        found = []
        for name, entry in core.live(self._store.table):
            current = entry.current
            meaning = core.resolve(entry, name, known=self._known, served=self._served)
            found.append(
                {
                    "name": name,
                    "target": current.target,
                    "fallbacks": list(current.fallbacks),
                    "updated_at": rfc3339(current.ts_ms),
                    "updated_by": current.by,
                    "resolved": meaning.model,
                    "state": meaning.state,
                }
            )
        return found

    def table_json(self) -> bytes:
        return encode_table(self._store.table)

    async def put(self, name: str, target: str, fallbacks: list[str], force: bool) -> dict[str, Any]:
        """See `api.ports.AliasTable.put`."""

        def decide(table: Entries) -> Entries:
            return core.with_set(
                table,
                name,
                target,
                fallbacks,
                known=self._known,
                force=force,
                now_ms=self._now_ms(),
                by=self._me,
            )

        return await self._write(name, "set", decide)

    async def delete(self, name: str) -> dict[str, Any]:
        return await self._write(
            name, "removed", lambda table: core.with_removed(table, name, now_ms=self._now_ms(), by=self._me)
        )

    async def revert(self, name: str) -> dict[str, Any]:
        return await self._write(
            name,
            "reverted",
            lambda table: core.with_reverted(table, name, now_ms=self._now_ms(), by=self._me),
        )

    # -- the rest of the node ------------------------------------------------------------------------
    @property
    def digest(self) -> str:
        """Of the table: nodes with the same one agree."""
        return self._store.digest

    @property
    def table(self) -> Entries:
        return self._store.table

    async def merge(self, news: Sequence[Entries]) -> None:
        """Take over what members told. Raises `AliasNotSaved`."""
        said: list[tuple[str, int, str]] = []

        def decide(table: Entries) -> Entries:
            before, now_ms = table, self._now_ms()
            for theirs in news:
                believed = core.believable(theirs, table, now_ms)
                for name, winner, loser in core.conflicts(table, believed):
                    line = f"alias.conflict name={name} ver={winner.ver} by={winner.by} lost={loser.by}"
                    said.append((name, logging.WARNING, f"{line} target={winner.target}"))
                table = core.merged(table, believed)
            for name, entry in table.items():
                known, current = before.get(name), entry.current
                if known is None or known.current != current:
                    line = f"alias.heard name={name} target={current.target} ver={current.ver}"
                    said.append((name, logging.INFO, f"{line} by={current.by}"))
            return table

        await self._store.change(decide)
        for name, level, line in said:
            if self._repeats.is_due(f"{level} {name}", self._now_ms() / 1000):
                log.log(level, "%s", line)
                self._on_event(line)

    async def purge(self) -> None:
        """Forget removals that every node has heard of. Raises `AliasNotSaved`."""
        await self._store.change(lambda table: core.purged(table, self._now_ms()))

    async def _write(self, name: str, verb: str, decide: Callable[[Entries], Entries]) -> dict[str, Any]:
        entry = (await self._store.change(decide))[name]
        line = f"alias.{verb} name={name} target={entry.current.target} ver={entry.current.ver}"
        log.info("%s", line)
        self._on_event(line)
        self._on_write(name, entry)
        return written(name, entry)
