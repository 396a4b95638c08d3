"""Keeps the table of replicas and the worker's store in step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from viiwork.core.replicas import Replica, ReplicaTable
from viiwork.errors import KvError
from viiwork.kv.client import KvWorker


async def take_in(replica: Replica, dropped: Iterable[str], replicas: ReplicaTable, worker: KvWorker) -> None:
    """The worker holds this replica from now on; those named in `dropped` made room for it."""
    for name in dropped:
        replicas.evicted(name)
    for old in replicas.put(replica):
        await drop(old.name, worker)


async def drop(name: str, worker: KvWorker) -> None:
    """Remove a replica that is in the table no more."""
    with suppress(KvError):  # a worker that is gone has dropped it
        await worker.drop(name)
