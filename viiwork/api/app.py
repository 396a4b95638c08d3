"""The node's HTTP face: which path goes where, and the guard around every handler."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import cast

from aiohttp import web

from viiwork.api.admin import Admin
from viiwork.api.body import Bodies
from viiwork.api.guard import ORIGIN, ControlGuard, PageGuard
from viiwork.api.inference import REQUEST_HEADER, Inference
from viiwork.api.outgoing import Silences
from viiwork.api.ports import Channels, Dispatcher, External, Facts, Origins, Prompts, Requests
from viiwork.api.routes import POST, AnyRoute, ControlRoute, Route, RouteTable
from viiwork.api.server import ClientConnection, ClientServer, error_answer
from viiwork.api.upgrade import Upgrade
from viiwork.api.upstream import Upstreams
from viiwork.errors import MethodNotAllowed, ViiworkError
from viiwork.limits import (
    BODIES_MAX_BYTES,
    BODY_MAX_BYTES,
    BODY_SILENCE_S,
    COMMENT_EVERY_S,
    HEADER_READ_S,
    IDLE_S,
)
from viiwork.wire.channel import CHANNEL_PATH
from viiwork.wire.openai import INFERENCE_PATHS

log = logging.getLogger("viiwork.api")

_AT_ONCE_S = 0.001  # aiohttp takes 0 for "without limit"


class ApiServer:
    """Listens, routes, and answers every request with something a client can read."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        origins: Origins,
        facts: Facts,
        channels: Channels | None = None,
        routes: Iterable[AnyRoute] = (),
        *,
        requests: Requests,
        external: Callable[[str], External | None] = lambda backend: None,
        prompts: Prompts | None = None,
        allows_origin: Callable[[str], bool] = lambda origin: False,
        upstreams: Upstreams | None = None,
        body_max_bytes: int = BODY_MAX_BYTES,
        bodies_max_bytes: int = BODIES_MAX_BYTES,
        body_silence_s: float = BODY_SILENCE_S,
        comment_every_s: float = COMMENT_EVERY_S,
        header_read_s: float = HEADER_READ_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._upstreams = upstreams or Upstreams()
        self._silences = Silences(comment_every_s)
        bodies = Bodies(
            body_max_bytes=body_max_bytes, bodies_max_bytes=bodies_max_bytes, body_silence_s=body_silence_s
        )
        self.inference = Inference(
            dispatcher,
            origins,
            facts.name,
            self._upstreams,
            bodies,
            self._silences,
            requests,
            facts.model_for,
            external=external,
            prompts=prompts,
        )
        self._admin = Admin(facts)
        self._pages = PageGuard(allows_origin)
        self._controls = ControlGuard(origins)
        self._routes = RouteTable([*self._own_routes(channels), *routes])
        self._timeouts = {"header_read_s": header_read_s, "idle_s": idle_s}
        self._server: ClientServer | None = None
        self._listeners: list[asyncio.Server] = []
        self._n_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def listen(self, host: str, port: int, *, sock: socket.socket | None = None) -> tuple[str, int]:
        """Accept connections at an address, or at a bound socket; answers with the address taken."""
        loop = asyncio.get_running_loop()
        if self._server is None:
            self._server = ClientServer(self._handle, **self._timeouts)
        if sock is not None:
            listener = await loop.create_server(self._server, sock=sock, backlog=1024)
        else:
            listener = await loop.create_server(self._server, host, port, backlog=1024)
        self._listeners.append(listener)
        name = listener.sockets[0].getsockname()
        return name[0], name[1]

    def stop_accepting(self) -> None:
        """Close the listening sockets, and each connection once its request is answered."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._server is not None:
            self._server.retire()

    async def stop(self, grace_s: float) -> None:
        """Let running requests end within `grace_s`, then cut them."""
        self.stop_accepting()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        if self._server is not None:
            await self._server.shutdown(_AT_ONCE_S)
            await self._idle.wait()  # cancelled handlers still give back what they hold
        self._silences.stop()
        self._upstreams.close()

    def _own_routes(self, channels: Channels | None) -> Iterator[AnyRoute]:
        yield from self._admin.routes()
        for path in INFERENCE_PATHS:
            yield Route(path, POST, self.inference.handle)
        if channels is not None:
            yield Route(CHANNEL_PATH, POST, Upgrade(channels).handle)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Route, and turn every error into an answer; nothing of ours reaches the client but its kind."""
        self._n_running += 1
        self._idle.clear()
        connection = cast(ClientConnection, request.protocol)
        connection.request_id = ""
        try:
            if ORIGIN in request.headers and (answer := self._pages.judge(request)) is not None:
                return answer
            path, route = self._routes.find(request.method, request.raw_path)
            if isinstance(route, ControlRoute):
                return await route.handler(request, path, await self._controls.admit(request))
            return await route.handler(request, path)
        except MethodNotAllowed as error:
            answer = error_answer(error, headers={"Allow": ", ".join(error.allow)})
        except ViiworkError as error:
            answer = error_answer(error)
        except ConnectionError:
            raise  # the client left; there is nobody to answer
        except Exception:
            log.exception(
                "api.failed request=%s %s %s",
                connection.request_id or "-",
                request.method,
                request.raw_path[:200],
            )
            answer = error_answer(ViiworkError("internal error"))
        finally:
            self._n_running -= 1
            if not self._n_running:
                self._idle.set()
        if connection.request_id:
            answer.headers[REQUEST_HEADER] = connection.request_id
        if not request.content.is_eof() or connection.broken:
            answer.force_close()  # the rest of the body is not worth reading
        return answer
