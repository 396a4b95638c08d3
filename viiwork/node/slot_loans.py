"""Slots lent to kv_share for a save or a restore of its own, and the turns that wait for one to come back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from viiwork.core.slots import SlotRef, SlotTable


@dataclass(slots=True)
class _Loan:
    ref: SlotRef
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    n_waiting: int = 0  # turns of the session in it that wait


class SlotLoans:
    """The owner of kv_share's own leases, by lease number."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._loans: dict[int, _Loan] = {}

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, ref: SlotRef) -> int | None:
        """A lease on a slot that nobody holds, also of a backend that drains."""
        if not self._slots.is_idle(ref):
            return None
        lease = self._slots.lease(ref)
        self._loans[lease] = _Loan(ref)
        return lease

    def end(self, lease: int) -> None:
        self._loans.pop(lease).ended.set()

    def is_lent(self, ref: SlotRef) -> bool:
        return self._of(ref) is not None

    def is_awaited(self, ref: SlotRef) -> bool:
        """Does a turn wait for this slot to come back?"""
        return any(loan.ref == ref and loan.n_waiting > 0 for loan in self._loans.values())

    async def until_back(self, ref: SlotRef) -> bool:
        """Wait for a slot that is lent; False at once for one that is not."""
        loan = self._of(ref)
        if loan is None:
            return False
        loan.n_waiting += 1
        try:
            await loan.ended.wait()
        finally:
            loan.n_waiting -= 1
        return True

    def _of(self, ref: SlotRef) -> _Loan | None:
        return next((loan for loan in self._loans.values() if loan.ref == ref), None)
