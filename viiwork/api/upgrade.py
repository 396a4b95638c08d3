"""`POST /v1/kv/channel`: one HTTP request, then the socket itself goes to the KV worker."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import cast

from aiohttp import web

from viiwork.api.ports import Channels
from viiwork.api.server import Sent
from viiwork.api.small_body import read_small
from viiwork.errors import RequestError
from viiwork.limits import CHANNEL_OFFER_MAX_BYTES, CHANNEL_OFFER_S
from viiwork.wire.channel import PROTOCOL


class Upgrade:
    """Hands connections over to kv_share."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def handle(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Check the offer, answer 101, and give the raw socket away.

        The client sends nothing after its offer before it has read the 101.
        """
        if request.headers.get("Upgrade", "").lower() != PROTOCOL:
            raise RequestError(f"this path speaks only `Upgrade: {PROTOCOL}`")
        body = await read_small(request, CHANNEL_OFFER_MAX_BYTES, CHANNEL_OFFER_S)
        admitted = self._channels.check("POST", request.raw_path, request.headers, body, request.remote or "")
        head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n"
        for name, value in self._channels.answer_headers(admitted).items():
            head += f"{name}: {value}\r\n"
        transport = cast(asyncio.Transport, request.transport)
        transport.pause_reading()  # what follows belongs to the worker
        transport.write(head.encode() + b"\r\n")
        while transport.get_write_buffer_size():
            if transport.is_closing():
                raise ConnectionResetError("the peer left")
            await asyncio.sleep(0)
        sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        try:
            self._channels.take(admitted, sock)
        except BaseException:
            sock.close()
            raise
        finally:
            transport.abort()  # closes only our descriptor; the duplicate keeps the connection
        return Sent(keep_alive=False)
