"""What sockets say of an address: whether it is ours, whether its port is taken, whether somebody listens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

from viiwork.limits import PEER_CONNECT_S
from viiwork.mesh.values import split_host_port


def is_own(addr: str) -> bool:
    """True if this machine has the address now."""
    return bind_errno(addr, 0, socket.SOCK_DGRAM) is None


def taken_protocols(addr: str, port: int) -> list[str]:
    """Which of tcp and udp somebody else holds."""
    kinds = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
    return [name for name, kind in kinds.items() if bind_errno(addr, port, kind) == errno.EADDRINUSE]


def bind_errno(addr: str, port: int, kind: socket.SocketKind) -> int | None:
    """Why an address and port cannot be had now, None if they can."""
    with socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET, kind) as probe:
        try:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is not taken
            probe.bind((addr, port))
            if kind == socket.SOCK_STREAM:
                probe.listen(1)
        except OSError as error:
            return error.errno
    return None


async def listens(address: str) -> bool:
    """True if something accepts a TCP connection there."""
    try:
        host, port = split_host_port(address)
        async with asyncio.timeout(PEER_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
