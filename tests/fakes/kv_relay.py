"""A link between two workers with a program in its middle, and how the jobs on it end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from viiwork.errors import KvError

Hook = Callable[[int, bytearray], bytearray | None]


async def relayed(kit: Any, hook: Hook) -> tuple[socket.socket, socket.socket, asyncio.Task[None]]:
    """Two ends with a program between them; `hook(offset, data)` sees what the sender sends.

    It gives the bytes to pass on, or None to cut the link.
    """
    near, near_mid = kit.tcp_pair()
    far_mid, far = kit.tcp_pair()
    for sock in (near_mid, far_mid):
        sock.setblocking(False)
    loop = asyncio.get_running_loop()

    async def pump(source: socket.socket, target: socket.socket, hook: Hook) -> None:
        offset = 0
        while data := bytearray(await loop.sock_recv(source, 1 << 16)):
            passed = hook(offset, data)
            if passed is None:
                raise ConnectionAbortedError
            offset += len(data)
            await loop.sock_sendall(target, passed)
        target.shutdown(socket.SHUT_WR)

    async def run() -> None:
        pumps = [
            asyncio.create_task(pump(near_mid, far_mid, hook)),
            asyncio.create_task(pump(far_mid, near_mid, lambda _, data: data)),
        ]
        with near_mid, far_mid:
            with contextlib.suppress(OSError):
                await asyncio.gather(*pumps)
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    return near, far, asyncio.create_task(run())


async def outcome(*jobs: Awaitable[Any]) -> list[str]:
    """Reason words of failed jobs, `done` for the others."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, KvError):
            raise result
    return [result.reason if isinstance(result, KvError) else "done" for result in results]
