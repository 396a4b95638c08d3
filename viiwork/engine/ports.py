"""What the operating system knows: free ports, who listens on one, what an engine's processes use."""

from __future__ import annotations

import socket
from collections import deque

import psutil

_RECENT = 64  # ports given out lately are not given again: their engine may not have bound them yet


class PortPicker:
    """Finds ports for engines."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def pick(self) -> int:
        """A port of 127.0.0.1 that was free a moment ago; somebody may still be faster than the engine."""
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in self._recent:
                self._recent.append(port)
                return port


def foreign_listener(port: int, leader: int) -> str:
    """Who but the engine `leader` (or its family) listens on `port`; "" when it is the engine or unknowable.

    Blocks for some milliseconds: it reads the machine's socket table.
    """
    own = family(leader)
    if not own or any(_listens(pid, port) for pid in own):
        return ""
    return _owner(port)


def family(leader: int) -> set[int]:
    """A process and its descendants; nobody when it is gone. Blocks for some milliseconds."""
    try:
        return {leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))}
    except psutil.Error:
        return set()


def _listens(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.AccessDenied:
        return True  # cannot be told (a binary with capabilities); it must not be taken for a stranger
    except psutil.Error:
        return False
    return any(
        one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port for one in connections
    )


def _owner(port: int) -> str:
    try:
        everything = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS without root
        return "another process" if _accepts(port) else ""
    for one in everything:
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
            if one.pid is None:
                return "a process of another user"
            try:
                return f"process {one.pid} ({psutil.Process(one.pid).name()})"
            except psutil.Error:
                return f"process {one.pid}"
    return ""  # whoever answered is gone, as an engine is that failed to load


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def cpu_seconds(pid: int | None) -> float | None:
    """CPU time a process has used so far, None when there is no such process."""
    if pid is None:
        return None
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return used.user + used.system


def tree_rss(leader: int) -> int | None:
    """Resident bytes of a process and its descendants; None when it is gone. Blocks for some milliseconds."""
    try:
        root = psutil.Process(leader)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
