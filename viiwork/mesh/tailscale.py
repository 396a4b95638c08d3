"""The local tailscaled: our tailnet address, the peers that are online, and the tailnet's DNS suffix."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from viiwork.core.addresses import is_tailnet
from viiwork.errors import NoOwnAddress
from viiwork.limits import TAILSCALE_BODY_MAX_BYTES, TAILSCALE_TIMEOUT_S
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import host_port

DEFAULT_SOCKET = "/var/run/tailscale/tailscaled.sock"
_MAC_SOCKET = "/var/run/tailscaled.socket"
_MAC_BINARY = "/Applications/Tailscale.app/Contents/MacOS/Tailscale"
_STATUS_URL = "http://local-tailscaled.sock/localapi/v0/status"
_SUFFIX_MAX_CHARS = 253  # of a DNS name


class _Device(msgspec.Struct, frozen=True):
    TailscaleIPs: list[str] | None = None
    Online: bool = False


class _CurrentTailnet(msgspec.Struct, frozen=True):
    MagicDNSSuffix: str = ""


class _Status(msgspec.Struct, frozen=True):
    BackendState: str = ""
    Self: _Device | None = None
    Peer: dict[str, _Device] | None = None
    MagicDNSSuffix: str = ""
    CurrentTailnet: _CurrentTailnet | None = None


@dataclass(frozen=True, slots=True)
class Tailnet:
    """The tailnet as this machine sees it; of each peer the addresses, IPv4 first."""

    own: tuple[str, ...]  # never empty
    online: tuple[tuple[str, ...], ...]
    suffix: str  # such as tail1234.ts.net, "" when there is none

    def peers(self, towards: str, port: int) -> list[str]:
        """`ip:port` of each online peer, in the family of `towards`: gossip has one socket, of one family."""
        is_v6 = ":" in towards
        firsts = (next((ip for ip in ips if (":" in ip) == is_v6), None) for ips in self.online)
        return [host_port(ip, port) for ip in firsts if ip is not None]


class _Absent(Exception):
    """Nobody is there to be asked; another way may lead to the daemon."""


async def tailnet(socket_path: str = DEFAULT_SOCKET) -> Tailnet:
    """Ask tailscaled once; raises NoOwnAddress saying what to do."""
    return parse_status(await _status(socket_path))


async def tailnet_suffix(socket_path: str = DEFAULT_SOCKET) -> str | None:
    """The tailnet's MagicDNS suffix in lower case, None when it cannot be had within 3 s."""
    with contextlib.suppress(NoOwnAddress, TimeoutError):
        async with asyncio.timeout(TAILSCALE_TIMEOUT_S):
            return (await tailnet(socket_path)).suffix or None
    return None


def parse_status(body: bytes) -> Tailnet:
    """The local API's status; raises NoOwnAddress when it has no address for us. Pure."""
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NoOwnAddress(f"tailscaled's status cannot be read: {one_line(str(error))}") from error
    if status.BackendState != "Running":
        state = one_line(status.BackendState) or "not ready"
        raise NoOwnAddress(f"Tailscale is {state!r}; run `tailscale up`, or set mesh.network: lan")
    own = _addresses(status.Self)
    if not own:
        raise NoOwnAddress("Tailscale has no address for this machine; is it approved in the tailnet?")
    online = (_addresses(device) for device in (status.Peer or {}).values() if device.Online)
    suffix = status.CurrentTailnet.MagicDNSSuffix if status.CurrentTailnet else status.MagicDNSSuffix
    return Tailnet(own, tuple(ips for ips in online if ips), _suffix(suffix))


def _addresses(device: _Device | None) -> tuple[str, ...]:
    found = [ip for ip in (device.TailscaleIPs if device else None) or () if is_tailnet(ip)]
    return tuple(sorted(found, key=lambda ip: ":" in ip))


def _suffix(text: str) -> str:
    name = text.strip(".").lower()
    fits = (
        len(name) <= _SUFFIX_MAX_CHARS and name.isascii() and name.replace(".", "").replace("-", "").isalnum()
    )
    return name if fits else ""


async def _status(path: str) -> bytes:
    """The status from the configured socket; only the default one has other ways beside it.

    A daemon that answered is believed, also when it refused: another one would be another tailnet.
    """
    ways: list[tuple[str, Callable[[str], object]]] = [(path, _ask_socket)]
    if path == DEFAULT_SOCKET:
        if sys.platform == "darwin":
            ways.append((_MAC_SOCKET, _ask_socket))
        if binary := shutil.which("tailscale"):
            ways.append((binary, _ask_binary))
        if sys.platform == "darwin" and Path(_MAC_BINARY).exists():
            ways.append((_MAC_BINARY, _ask_binary))
    for where, ask in ways:
        with contextlib.suppress(_Absent):
            return await ask(where)  # type: ignore[misc,no-any-return]
    raise NoOwnAddress(
        f"cannot reach tailscaled at {' or '.join(where for where, _ in ways)}; start Tailscale, "
        "mount its socket, or set mesh.network: lan"
    )


async def _ask_socket(path: str) -> bytes:
    connector = aiohttp.UnixConnector(path=path)
    timeout = aiohttp.ClientTimeout(total=TAILSCALE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as session:
            async with session.get(_STATUS_URL, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise NoOwnAddress(f"tailscaled at {path} answers {answer.status}; may this user ask it?")
                return await _bounded(answer.content)
    except TimeoutError as error:
        raise NoOwnAddress(f"tailscaled at {path} does not answer: timed out") from error
    except aiohttp.ClientConnectorError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise NoOwnAddress(f"this user may not ask tailscaled at {path}") from error
        raise _Absent from error
    except (OSError, aiohttp.ClientError) as error:
        raise NoOwnAddress(f"tailscaled at {path} does not answer: {one_line(str(error))}") from error


async def _ask_binary(path: str) -> bytes:
    # Without TERM the App Store's binary takes itself for double-clicked and opens its window.
    env = {"TERM": "dumb", **os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            "status",
            "--json",
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise _Absent from error
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TAILSCALE_TIMEOUT_S):
            body = await _bounded(process.stdout)
            code = await process.wait()
    except TimeoutError as error:
        raise NoOwnAddress(f"`{path} status --json` does not answer: timed out") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if code != 0 or not body:
        raise _Absent(f"`{path} status --json` ended with {code}")
    return body


async def _bounded(stream: aiohttp.StreamReader | asyncio.StreamReader) -> bytes:
    body = bytearray()
    while chunk := await stream.read(64 * 1024):
        body += chunk
        if len(body) > TAILSCALE_BODY_MAX_BYTES:
            raise NoOwnAddress(f"tailscaled's status is over {TAILSCALE_BODY_MAX_BYTES} bytes")
        await asyncio.sleep(0)
    return bytes(body)
