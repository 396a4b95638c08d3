"""Talking to peers: one HTTP session for all of them, and the headers that prove who we are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from viiwork.errors import BadReport
from viiwork.limits import PEER_CONNECT_S, PEER_KEEPALIVE_S
from viiwork.mesh.channel import RawChannel, open_raw_channel
from viiwork.mesh.values import Member
from viiwork.wire.channel import CHANNEL_PATH
from viiwork.wire.signature import FORWARDED, NONCE_BYTES, SIGNER, sign

_NO_DEADLINE = aiohttp.ClientTimeout(total=None, sock_connect=PEER_CONNECT_S)


class PeerClient:
    """Client side of every conversation with a peer; without keys the mesh is open.

    Of two secrets the last one, the previous, signs until membership knows that all can read the other.
    """

    def __init__(
        self, name: str, keys: tuple[bytes, ...] = (), *, unix_now: Callable[[], float] = time.time
    ) -> None:
        self._name = name
        self.key = keys[-1] if keys else None  # what signs
        self._unix_now = unix_now
        self._session: aiohttp.ClientSession | None = None
        self.own_ip = ""  # the address members know this node by, once it is known

    async def start(self) -> None:
        # No limit: a hung peer that holds many connections must not use up those of the others.
        connector = aiohttp.TCPConnector(
            limit=0, limit_per_host=0, keepalive_timeout=PEER_KEEPALIVE_S, use_dns_cache=False
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=_NO_DEADLINE,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )

    async def stop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """No total deadline, connect bounded, bodies as they come. Do not close it."""
        if self._session is None:
            raise RuntimeError("the peer client is not started")
        return self._session

    @property
    def source_ip(self) -> str:
        """Where connections to peers come from, "" = anywhere; an open mesh knows a node by its address."""
        return "" if self.key is not None else self.own_ip

    def request(self, method: str, url: str, **kwargs: Any) -> aiohttp.client._RequestContextManager:
        """A request to a peer; a redirect is its answer and is not followed."""
        return self.session.request(method, url, allow_redirects=False, **kwargs)

    def sign(self, method: str, path_qs: str, body: bytes = b"") -> dict[str, str]:
        """Headers that say who asks, and prove it when the mesh has a secret."""
        if self.key is None:
            return {SIGNER: self._name}
        return sign(
            self.key,
            self._name,
            method,
            path_qs,
            body,
            now_unix_s=self._unix_now(),
            nonce=os.urandom(NONCE_BYTES),
        )

    def forward_headers(self, method: str, path_qs: str, body: bytes) -> dict[str, str]:
        """The same for a forward: the peer runs it on a free slot at once or refuses, and hops no further."""
        return {FORWARDED: self._name, **self.sign(method, path_qs, body)}

    async def open_channel(
        self,
        member: Member,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        path: str = CHANNEL_PATH,
        addr: str = "",
        source: str = "",
    ) -> RawChannel:
        """Upgrade a fresh connection to `member` to a raw one; the caller owns the socket.

        `addr` is another address of the member's, `source` where the connection then comes from. Raises
        ChannelRefused.
        """
        signed = {**headers, **self.sign("POST", path, body)}
        source = source if addr else self.source_ip
        addr = addr or member.addr
        return await open_raw_channel(addr, member.api_port, path, signed, body, source_ip=source)


async def body_of(answer: aiohttp.ClientResponse, what: str, most_bytes: int) -> bytes:
    """The whole body of a peer's report; `what` names it in the error. Raises `BadReport`."""
    if answer.status != 200:
        raise BadReport(f"{what} answers {answer.status}")
    body = bytearray()
    while chunk := await answer.content.readany():
        body += chunk
        if len(body) > most_bytes:
            answer.close()
            raise BadReport(f"{what} is over {most_bytes} bytes")
    return bytes(body)
