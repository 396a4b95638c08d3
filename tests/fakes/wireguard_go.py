"""What `wireguard-go --foreground NAME` is to its caller: a TUN device, and a socket that takes settings.

Packets travel in plain UDP between the two endpoints. It ends with the peer's settings unless keys fit.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def main() -> None:
    name = sys.argv[2]
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    path = Path("/var/run/wireguard") / f"{name}.sock"
    path.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(path))
        control.listen()
        client, _ = control.accept()
        with client:
            said = client.recv(4096).decode()
            settings = dict(line.split("=", 1) for line in said.split("\n") if line)
            fits = all(len(bytes.fromhex(settings[key])) == 32 for key in ("private_key", "public_key"))
            client.sendall(f"errno={0 if fits and said.startswith('set=1') else 22}\n\n".encode())
    host, port = settings["endpoint"].split(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("", int(settings["listen_port"])))
        while True:
            for ready in select.select([tun, udp], [], [])[0]:
                if ready is udp:
                    os.write(tun, udp.recv(65536))
                else:
                    udp.sendto(os.read(tun, 65536), (host, int(port)))


main()
