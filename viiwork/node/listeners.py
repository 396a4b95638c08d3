"""Where the API listens beside `api.host`: at an IPv6 address of the mesh, at the ends of direct links."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from viiwork.core.paths import LinkAddress
from viiwork.limits import LINK_LISTENERS_MAX
from viiwork.mesh.values import host_port

log = logging.getLogger(__name__)


class Listeners:
    """Makes the API listen where peers look for it."""

    def __init__(self, listen: Callable[[str, int], Awaitable[Any]], host: str, port: int) -> None:
        self._listen = listen
        self._host = host
        self._port = port
        self._listening: set[str] = set()
        self._deaf: set[str] = set()  # where that could not be done

    async def at_mesh(self, ip: str) -> None:
        """Peers look for the API at the mesh's address; a wildcard of IPv4 does not listen on IPv6."""
        if self._host == "0.0.0.0" and ":" in ip:
            await self._also(ip)

    async def hears(self, address: LinkAddress, *, is_named: bool) -> bool:
        """Is the API there for a peer that comes to this address?

        It is made to listen there, unless the config keeps it to another address and does not name this one.
        """
        host, where = self._host, address.addr
        if host == "::" or (host == "0.0.0.0" and ":" not in where) or where == host:
            return True
        if host != "0.0.0.0" and not is_named:
            return False
        try:
            if where.startswith("fe80:"):
                # The number: an interface that was plugged in anew has its old name and another number.
                where += f"%{socket.if_nametoindex(address.interface)}"
            await self._also(where)
        except OSError as error:
            if where not in self._deaf and len(self._deaf) < LINK_LISTENERS_MAX:
                self._deaf.add(where)
                log.warning("api.deaf addr=%s: %s", where, error)
            return False
        return True

    async def _also(self, ip: str) -> None:
        if ip in self._listening:
            return
        if len(self._listening) >= LINK_LISTENERS_MAX:
            raise OSError(f"the API listens at {LINK_LISTENERS_MAX} addresses already")
        self._listening.add(ip)
        try:
            await self._listen(ip, self._port)
        except OSError:
            self._listening.remove(ip)
            raise
        log.info("api.listening url=http://%s", host_port(ip, self._port))
