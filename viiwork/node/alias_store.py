"""The alias table on disk and in memory: one owner, and no state of the one that the other has not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from viiwork.core.aliases import NOTHING, Entries, purged
from viiwork.errors import AliasNotSaved, BadAliases, StateDirError
from viiwork.limits import ALIAS_FILE_MAX_BYTES
from viiwork.mesh.notices import one_line
from viiwork.node.durable import replace_file
from viiwork.wire.aliases import decode_table, digest, encode_table

log = logging.getLogger(__name__)

FILE_NAME = "aliases.json"


class AliasStore:
    """Owner of the table; every change is on disk before anybody sees it."""

    def __init__(self, path: Path, table: Entries = NOTHING) -> None:
        self._path = path
        self._table = table
        self._digest = digest(table)
        self._changing = asyncio.Lock()

    @classmethod
    def open(cls, folder: Path, now_ms: int) -> AliasStore:
        """The table of a state folder; empty when it has none. Raises `StateDirError` for one it cannot read.

        A table that was lost silently would come back from the mesh without what only this node knew.
        """
        path = folder / FILE_NAME
        try:
            with path.open("rb") as file:
                data = file.read(ALIAS_FILE_MAX_BYTES + 1)
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            raise StateDirError(f"{path} cannot be read: {error.strerror}") from error
        try:
            if len(data) > ALIAS_FILE_MAX_BYTES:
                raise BadAliases(f"it is larger than {ALIAS_FILE_MAX_BYTES} bytes")
            table = decode_table(data)
        except BadAliases as error:
            raise StateDirError(
                f"{path} cannot be used: {one_line(str(error))}; "
                "move it away to start with the aliases the other nodes have"
            ) from error
        return cls(path, purged(table, now_ms))

    @property
    def table(self) -> Entries:
        return self._table

    @property
    def digest(self) -> str:
        return self._digest

    async def change(self, decide: Callable[[Entries], Entries]) -> Entries:
        """Replace the table by what `decide` makes of it; the new one.

        What `decide` raises changes nothing. Raises `AliasNotSaved` when the disk does not take it, which
        changes nothing either. Goes on to its end when the caller is cancelled.
        """
        task = asyncio.create_task(self._change(decide), name="alias-change")
        task.add_done_callback(_looked_at)
        return await asyncio.shield(task)

    async def _change(self, decide: Callable[[Entries], Entries]) -> Entries:
        async with self._changing:
            table = decide(self._table)
            if table is self._table:
                return table
            try:
                await asyncio.to_thread(replace_file, self._path, encode_table(table))
            except OSError as error:
                log.error("aliases.unsaved path=%s error=%s", self._path, error)
                raise AliasNotSaved(
                    f"the alias table cannot be saved, nothing was changed: {error.strerror}"
                ) from error
            self._table, self._digest = table, digest(table)
            return table


def _looked_at(task: asyncio.Task[Entries]) -> None:
    if not task.cancelled():
        task.exception()  # its caller may have left, and has been told otherwise
