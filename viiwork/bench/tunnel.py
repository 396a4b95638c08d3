"""A real userspace tunnel between the lab's hosts: wireguard-go on both, set up through its own socket."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from viiwork.bench.net import Host, LabNet, run
from viiwork.errors import BenchError

OVERLAY_NAME = "wireguard-go"
_NETWORK = "10.214.9"
_MTU = "1280"  # Tailscale's
_PORT = 51820
_STARTS_WITHIN_S = 10.0
_LOOK_S = 0.02
_SOCKETS = Path("/var/run/wireguard")


class Tunnel:
    """Up while the context lasts. Raises `BenchError` where wireguard-go is missing or does not start."""

    def __init__(self, net: LabNet, device: str) -> None:
        self._net, self._device = net, device
        self._ending = ExitStack()
        self.far_address = f"{_NETWORK}.{net.far.number}"

    def __enter__(self) -> Tunnel:
        check_overlay()
        try:
            keys = {host: X25519PrivateKey.generate() for host in (self._net.near, self._net.far)}
            for host, other in ((self._net.near, self._net.far), (self._net.far, self._net.near)):
                self._start(host, other, keys)
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    def _start(self, host: Host, other: Host, keys: dict[Host, X25519PrivateKey]) -> None:
        # Sockets of the interfaces stand in one folder for all namespaces, so their names differ.
        name = f"vwt{os.getpid() % 1_000_000}x{host.number}"
        control = _SOCKETS / f"{name}.sock"
        command = host.command(OVERLAY_NAME, "--foreground", name)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._ending.callback(_end, process, control)
        settings = [
            f"private_key={keys[host].private_bytes_raw().hex()}",
            f"listen_port={_PORT}",
            f"public_key={keys[other].public_key().public_bytes_raw().hex()}",
            f"endpoint={other.address(self._device)}:{_PORT}",
            f"allowed_ip={_NETWORK}.0/24",
        ]
        with _connected(control, process) as uapi:
            uapi.sendall(("set=1\n" + "\n".join(settings) + "\n\n").encode())
            if b"errno=0" not in uapi.recv(4096):
                raise BenchError(f"{OVERLAY_NAME} does not take its settings")
        where = ("ip", "-n", host.namespace)
        run(*where, "addr", "add", f"{_NETWORK}.{host.number}/24", "dev", name)
        run(*where, "link", "set", name, "mtu", _MTU, "up")


def _connected(control: Path, process: subprocess.Popen[bytes]) -> socket.socket:
    """The interface's socket, which is there a moment before it listens."""
    until = time.monotonic() + _STARTS_WITHIN_S
    while True:
        uapi = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            uapi.connect(str(control))
            return uapi
        except OSError:
            uapi.close()
        if process.poll() is not None or time.monotonic() > until:
            raise BenchError(f"{OVERLAY_NAME} does not start; is there a /dev/net/tun?")
        time.sleep(_LOOK_S)


def check_overlay() -> None:
    """Raises `BenchError` where there is no wireguard-go."""
    if shutil.which(OVERLAY_NAME) is None:
        raise BenchError(f"--overlay {OVERLAY_NAME} needs the command {OVERLAY_NAME}, which is not on PATH")


def _end(process: subprocess.Popen[bytes], control: Path) -> None:
    process.terminate()
    process.wait()
    control.unlink(missing_ok=True)
