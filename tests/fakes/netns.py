"""Machines on one LAN: network namespaces on a bridge, each with eth0. Needs root and ip(8)."""

from __future__ import annotations

import subprocess
import uuid
from types import TracebackType


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Lan:
    """`n` machines at PREFIX.2, PREFIX.3, ...; this process is at PREFIX.1 and reaches all of them.

    IPv4 with a prefix such as "10.78.9", IPv6 only with one such as "fd78:9:". Without one it is some private
    IPv4 network, so that two of them can be up at once.
    """

    def __init__(self, n: int, prefix: str = "", *, default_route: bool = True) -> None:
        self._tag = uuid.uuid4().hex[:6]
        prefix = prefix or f"10.{64 + int(self._tag[:2], 16) // 2}.{int(self._tag[2:4], 16)}"
        self._is_v6 = ":" in prefix
        self.prefix = prefix
        self._default_route = default_route
        self.bridge = f"vwbr{self._tag}"
        self.names = [f"vw{self._tag}{i}" for i in range(n)]

    def __enter__(self) -> Lan:
        try:
            ip("link", "add", self.bridge, "type", "bridge", "mcast_snooping", "0")
            ip(*self._family, "addr", "add", self._with_length(1), "dev", self.bridge, *self._at_once)
            ip("link", "set", self.bridge, "up")
            for i, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", name, "master", self.bridge, "up")
                ip("-n", name, "link", "set", "lo", "up")
                self.give(i, self.address(i))
                ip("-n", name, "link", "set", "eth0", "up")
                self.route(i)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def address(self, i: int) -> str:
        return self._address(i + 2)

    def give(self, i: int, address: str) -> None:
        """Machine `i` gets an address."""
        length = "64" if self._is_v6 else "24"
        ip("-n", self.names[i], "addr", "add", f"{address}/{length}", "dev", "eth0", *self._at_once)

    def take(self, i: int, address: str) -> None:
        """Machine `i` loses an address."""
        length = "64" if self._is_v6 else "24"
        ip("-n", self.names[i], "addr", "del", f"{address}/{length}", "dev", "eth0")

    def route(self, i: int) -> None:
        """The default route, which goes with the last address and with the link."""
        if self._default_route:
            ip(*self._family, "-n", self.names[i], "route", "replace", "default", "via", self._address(1))

    def link(self, i: int, state: str) -> None:
        """Plug the machine's cable in ("up") or out ("down")."""
        ip("link", "set", self.names[i], state)

    def split(self, *others: int) -> None:
        """Those machines hear only one another from now on."""
        ip("link", "add", f"{self.bridge}x", "type", "bridge", "mcast_snooping", "0")
        ip("link", "set", f"{self.bridge}x", "up")
        for i in others:
            ip("link", "set", self.names[i], "master", f"{self.bridge}x")

    def heal(self) -> None:
        for name in self.names:
            ip("link", "set", name, "master", self.bridge)
        ip("link", "del", f"{self.bridge}x")

    @property
    def _family(self) -> tuple[str, ...]:
        return ("-6",) if self._is_v6 else ()

    @property
    def _at_once(self) -> tuple[str, ...]:
        return ("nodad",) if self._is_v6 else ()

    def _address(self, number: int) -> str:
        return f"{self.prefix}:{number}" if self._is_v6 else f"{self.prefix}.{number}"

    def _with_length(self, number: int) -> str:
        return f"{self._address(number)}/{'64' if self._is_v6 else '24'}"
