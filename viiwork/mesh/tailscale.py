"""The local tailscaled: is it up, and what is our tailnet address."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

import aiohttp
import msgspec

from viiwork.core.addresses import is_tailnet
from viiwork.errors import NoOwnAddress
from viiwork.limits import TAILSCALE_BODY_MAX_BYTES

DEFAULT_SOCKET = "/var/run/tailscale/tailscaled.sock"
_MAC_SOCKET = "/var/run/tailscaled.socket"
_STATUS_URL = "http://local-tailscaled.sock/localapi/v0/status"
_TIMEOUT_S = 3.0


class _Device(msgspec.Struct, frozen=True):
    TailscaleIPs: list[str] | None = None


class _Status(msgspec.Struct, frozen=True):
    BackendState: str = ""
    Self: _Device | None = None
    MagicDNSSuffix: str = ""


@dataclass(frozen=True, slots=True)
class TailnetSelf:
    """This machine in its tailnet."""

    ip: str


async def tailnet_self(socket_path: str = DEFAULT_SOCKET) -> TailnetSelf:
    """Ask tailscaled once; raises NoOwnAddress saying what to do."""
    paths = [socket_path]
    if sys.platform == "darwin" and socket_path == DEFAULT_SOCKET:
        paths.append(_MAC_SOCKET)  # a socket that was configured is never second-guessed
    unreachable: Exception | None = None
    for path in paths:
        try:
            return parse_status(await _status(path))
        except (OSError, aiohttp.ClientConnectionError) as error:
            unreachable = error
        except (TimeoutError, aiohttp.ClientError) as error:
            raise NoOwnAddress(f"tailscaled at {path} does not answer: {error or 'timed out'}") from error
    raise NoOwnAddress(
        f"cannot reach tailscaled at {' or '.join(paths)}; start Tailscale, mount its socket, "
        "or set mesh.network: lan"
    ) from unreachable


async def tailnet_suffix(socket_path: str = DEFAULT_SOCKET) -> str | None:
    """The names in this tailnet end with it; None while tailscaled cannot say."""
    try:
        status = msgspec.json.decode(await _status(socket_path), type=_Status)
    except (OSError, TimeoutError, aiohttp.ClientError, NoOwnAddress, msgspec.DecodeError, RecursionError):
        return None
    return status.MagicDNSSuffix.strip(".") or None


def parse_status(body: bytes) -> TailnetSelf:
    """The local API's status; raises NoOwnAddress when it has no address for us. Pure."""
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NoOwnAddress(f"tailscaled's status cannot be read: {error}") from error
    if status.BackendState != "Running":
        raise NoOwnAddress(f"Tailscale is {status.BackendState or 'not ready'!r}; run `tailscale up`")
    for ip in (status.Self.TailscaleIPs if status.Self else None) or ():
        if is_tailnet(ip):
            return TailnetSelf(ip)
    raise NoOwnAddress("Tailscale has no IPv4 address for this machine; is it approved in the tailnet?")


async def _status(path: str) -> bytes:
    connector = aiohttp.UnixConnector(path=path)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        async with session.get(_STATUS_URL, allow_redirects=False) as answer:
            if answer.status != 200:
                raise NoOwnAddress(f"tailscaled at {path} answers {answer.status}; may this user ask it?")
            body = bytearray()
            while chunk := await answer.content.readany():
                body += chunk
                if len(body) > TAILSCALE_BODY_MAX_BYTES:
                    answer.close()
                    raise NoOwnAddress(f"tailscaled's status is over {TAILSCALE_BODY_MAX_BYTES} bytes")
                await asyncio.sleep(0)
            return bytes(body)
