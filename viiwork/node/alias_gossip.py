"""How alias tables of all nodes become the same: each write is told at once, and tables that differ are sent.

Every capacity report carries the digest of its node's table. A member whose digest stays different for more
than one report gets our table in pieces; it does the same, so both end up with all of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from viiwork.core.aliases import Entries, Entry
from viiwork.errors import AliasNotSaved, BadAliases
from viiwork.limits import (
    ALIAS_INBOX_MAX,
    ALIAS_OUTBOX_MAX,
    ALIAS_PIECE_PAUSE_S,
    ALIAS_PURGE_S,
    ALIAS_REPAIR_MAX_S,
    ALIAS_REPAIR_S,
)
from viiwork.mesh.notices import Repeats, one_line
from viiwork.node.aliases import Aliases
from viiwork.wire.aliases import decode_message, encode_pieces, encode_write

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Differs:
    """A member whose table is not ours."""

    theirs: str
    ours: str
    reports: int = 0  # that said so in a row
    due_at: float = 0.0
    pause_s: float = ALIAS_REPAIR_S
    sent: tuple[str, str] | None = None  # the digests at the last sending


class AliasGossip:
    """Hears messages and digests of members, tells them of writes, and repairs what got lost."""

    def __init__(
        self,
        aliases: Aliases,
        *,
        members: Callable[[], Iterable[str]],
        send: Callable[[str, bytes], Awaitable[None]],
        now: Callable[[], float] = time.monotonic,
        piece_pause_s: float = ALIAS_PIECE_PAUSE_S,
    ) -> None:
        """`members` are the names of the other live ones; `send` is best effort and never raises."""
        self._aliases = aliases
        self._members = members
        self._send = send
        self._now = now
        self._piece_pause_s = piece_pause_s
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._outbox: deque[bytes] = deque(maxlen=ALIAS_OUTBOX_MAX)
        self._differs: dict[str, _Differs] = {}
        self._heard = asyncio.Event()
        self._to_tell = asyncio.Event()
        self._repeats = Repeats()

    # -- what the node tells ---------------------------------------------------------------------------
    def written(self, name: str, entry: Entry) -> None:
        """A write was taken here."""
        self._outbox.append(encode_write(name, entry))
        self._to_tell.set()

    def message(self, member: str, data: bytes) -> None:
        """A member sent something of ours."""
        if len(self._inbox) < ALIAS_INBOX_MAX:
            self._inbox.append((member, data))
            self._heard.set()

    def reported(self, member: str, digest: str) -> None:
        """A member's capacity report came with this digest, "" when it says nothing."""
        ours = self._aliases.digest
        if digest in ("", ours):
            self._differs.pop(member, None)
            return
        differs = self._differs.setdefault(member, _Differs(digest, ours))
        differs.reports += 1
        differs.theirs, differs.ours = digest, ours
        if self._is_due(differs):
            self._to_tell.set()

    def gone(self, member: str) -> None:
        self._differs.pop(member, None)

    # -- work ------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run for the node's life."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear(), name="aliases-hear")
            tasks.create_task(self._tell(), name="aliases-tell")
            tasks.create_task(self._purge(), name="aliases-purge")

    async def _hear(self) -> None:
        while True:
            await self._heard.wait()
            self._heard.clear()
            news: list[Entries] = []
            while self._inbox:
                member, data = self._inbox.popleft()
                try:
                    news.append(decode_message(data))
                except BadAliases as error:
                    self._complain(member, f"aliases.refused from={member}: {one_line(str(error))}")
            with contextlib.suppress(AliasNotSaved):  # said in the log; the table is sent again
                await self._aliases.merge(news)

    async def _tell(self) -> None:
        while True:
            await self._to_tell.wait()
            self._to_tell.clear()
            await self._tell_writes()
            for member, differs in list(self._differs.items()):
                if self._differs.get(member) is differs and self._is_due(differs):
                    await self._repair(member, differs)

    async def _repair(self, member: str, differs: _Differs) -> None:
        digests = (differs.ours, differs.theirs)
        again = differs.sent == digests
        differs.pause_s = min(differs.pause_s * 2, ALIAS_REPAIR_MAX_S) if again else ALIAS_REPAIR_S
        differs.sent, differs.due_at = digests, self._now() + differs.pause_s
        if again:
            self._complain(member, f"aliases.differ from={member}: its table stays another one than ours")
        for piece in encode_pieces(self._aliases.table):
            await self._send(member, piece)
            await asyncio.sleep(self._piece_pause_s)
            await self._tell_writes()

    async def _tell_writes(self) -> None:
        while self._outbox:
            data = self._outbox.popleft()
            for member in list(self._members()):
                await self._send(member, data)

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(ALIAS_PURGE_S)
            with contextlib.suppress(AliasNotSaved):
                await self._aliases.purge()

    def _is_due(self, differs: _Differs) -> bool:
        return differs.reports > 1 and self._now() >= differs.due_at

    def _complain(self, member: str, line: str) -> None:
        if self._repeats.is_due(member, self._now()):
            log.warning("%s", line)
