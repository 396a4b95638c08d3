"""Two threads and a ring of buffers: one half of a transfer reads ahead of the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from viiwork.kv.buffers import new_buffer
from viiwork.limits import KV_RING_BUFFERS

T = TypeVar("T")


class PartnerStopped(Exception):
    """The other thread ended; `Pipeline.close` raises why."""


class Pipeline(Generic[T]):
    """Buffers go round: `take` an empty one, fill it, `put` it with its item; `get`, use, `give` it back.

    One thread is the caller's, the other runs `partner`. Memory is `KV_RING_BUFFERS` buffers.
    """

    def __init__(self, buffer_bytes: int, partner: Callable[[Pipeline[T]], None]) -> None:
        self._empty: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, T] | None] = queue.SimpleQueue()
        self._buffer_bytes, self._made = buffer_bytes, 0
        self._partner = partner
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kv-pipeline", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._partner(self)
        except PartnerStopped:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread by `close`
            self._error = error
        finally:
            self._stopped = True
            self._empty.put(None)
            self._full.put(None)

    def take(self) -> memoryview:
        if self._made < KV_RING_BUFFERS and self._empty.empty():
            self._made += 1
            self._empty.put(new_buffer(self._buffer_bytes))
        buffer = self._empty.get()
        if buffer is None or self._stopped:
            raise PartnerStopped
        return buffer

    def put(self, buffer: memoryview, item: T) -> None:
        self._full.put((buffer, item))

    def get(self) -> tuple[memoryview, T]:
        entry = self._full.get()
        if entry is None:
            raise PartnerStopped
        return entry

    def give(self, buffer: memoryview) -> None:
        self._empty.put(buffer)

    def finish(self) -> None:
        """Wait for the partner to end by itself; raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> BaseException | None:
        """End the partner and wait for it; its error, when it was the one that failed."""
        self._stopped = True
        self._empty.put(None)
        self._full.put(None)
        self._thread.join()
        return self._error
