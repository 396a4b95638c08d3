"""Two machines on a cable that loses what it is told to: a TUN device each, and a thread between them."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import uuid
from collections.abc import Callable
from types import TracebackType

from .netns import ip

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_UDP = 17

Loses = Callable[[int, bytes], bool]  # (sending machine, IPv4 packet) -> whether it is lost


def is_udp(packet: bytes) -> bool:
    return packet[9] == _UDP


class Cable:
    """Machines 0 and 1 at PREFIX.1 and PREFIX.2. Needs root and /dev/net/tun."""

    def __init__(self, prefix: str, loses: Loses) -> None:
        tag = uuid.uuid4().hex[:6]
        self.names = [f"vw{tag}{i}" for i in range(2)]
        self.addresses = [f"{prefix}.1", f"{prefix}.2"]
        self.largest_udp_bytes = 0
        self._loses = loses
        self._fds: list[int] = []
        self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Cable:
        try:
            for name, address in zip(self.names, self.addresses, strict=True):
                ip("netns", "add", name)
                fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                self._fds.append(fd)
                fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
                ip("link", "set", name, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
            for i, name in enumerate(self.names):
                ip("-n", name, "route", "add", "default", "via", self.addresses[1 - i])
        except BaseException:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._stop[1], b"x")
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for fd in (*self._fds, *self._stop):
            os.close(fd)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _carry(self) -> None:
        while True:
            ready, _, _ = select.select([*self._fds, self._stop[0]], [], [])
            if self._stop[0] in ready:
                return
            for fd in ready:
                sender = self._fds.index(fd)
                packet = os.read(fd, 65536)
                if packet[0] >> 4 != 4:
                    continue  # router solicitations
                if is_udp(packet):
                    self.largest_udp_bytes = max(self.largest_udp_bytes, len(packet))
                if not self._loses(sender, packet):
                    os.write(self._fds[1 - sender], packet)
