"""One inference request: read it, find it a place, relay the answer, give the place back."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn, cast

from aiohttp import web
from msgspec.structs import replace
from yarl import URL

from viiwork.api.body import Bodies
from viiwork.api.connection import Address, Connection
from viiwork.api.headers import header, request_head, safe_value
from viiwork.api.outgoing import ClientAnswer, Silences, has_stream
from viiwork.api.ports import Dispatcher, External, Origins, Prompts, Requests
from viiwork.api.relay import Passed, relay
from viiwork.api.server import ClientConnection, Sent
from viiwork.api.upstream import Upstreams
from viiwork.core.logline import line
from viiwork.core.turn import Ask, Grant, Outcome, Result
from viiwork.errors import (
    AllRoutesRefused,
    NotFound,
    NotServedHere,
    RequestError,
    UpstreamError,
    UpstreamStalled,
    UpstreamUnreachable,
    ViiworkError,
)
from viiwork.limits import REFUSAL_DRAIN_BYTES, REFUSAL_DRAIN_S, ROUTE_ATTEMPTS_MAX
from viiwork.wire.conversation import HOME_HEADER, SESSION_HEADER, forwarded_home, forwarded_session
from viiwork.wire.openai import ENGINE_CHOOSES, Peek, name_model, peek, pin
from viiwork.wire.placement import (
    ANYWHERE,
    PREFER_HEADER,
    QUEUED_HEADER,
    WAIT_HEADER,
    placement,
    wait_ms,
)

log = logging.getLogger("viiwork.api")

_ID = re.compile("[0-9a-f]{16}")
REQUEST_HEADER = "X-Viiwork-Request"
_QUEUED = QUEUED_HEADER.lower().encode()
_REFUSALS = frozenset((429, 503))
# Said by a peer itself, not by the engine behind it, these mean that the route failed, not the request.
_PEER_FAULTS = frozenset((401, 403, 500, 502, 504))
_ENDS = frozenset(("done", "broken", "client_gone"))


class _RouteFailed(Exception):
    """Nothing of an answer went to the client; another route may take the request."""

    def __init__(self, result: Result, status: int = 0, detail: str = "") -> None:
        super().__init__(detail)
        self.result: Result = result
        self.status = status
        self.detail = detail


class Inference:
    """Handler of every inference path."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        origins: Origins,
        node: str,
        upstreams: Upstreams,
        bodies: Bodies,
        silences: Silences,
        requests: Requests,
        model_for: Callable[[str], str | None],
        *,
        external: Callable[[str], External | None] = lambda backend: None,
        prompts: Prompts | None = None,
    ) -> None:
        self._prompts = prompts
        self._dispatcher = dispatcher
        self._origins = origins
        self._node = node
        self._upstreams = upstreams
        self._bodies = bodies
        self._silences = silences
        self._requests = requests
        self._model_for = model_for
        self._external = external
        self._ids = random.Random()  # names, not secrets
        self._running: dict[str, _Run] = {}

    def abandon(self, request_id: str, why: str) -> bool:
        """Give up the place where a request runs now: its upstream is taken for dead.

        Before the first byte the request is tried elsewhere, after it the client's stream breaks.
        False when no such request runs.
        """
        run = self._running.get(request_id)
        if run is not None:
            run.stop(why)
        return run is not None

    async def handle(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer one request for `path`, which is how the engine knows the endpoint."""
        connection = cast(ClientConnection, request.protocol)
        connection.request_id = f"{self._ids.getrandbits(64):016x}"
        body = b""
        began = time.monotonic()
        try:
            try:
                body = await self._bodies.read(request)
                if connection.half_closed:
                    raise ClientClosedEarly("the client closed its side before it was answered")
                connection.needed = True
                run, path_qs, wanted, body = self._read(request, path, body)
            except ViiworkError as error:
                self._requests.unserved(Ask(connection.request_id, model=""), error, began)
                raise
            return await self._answer(request, path_qs, body, wanted, run)
        finally:
            connection.needed = False
            self._bodies.free(body)

    def _read(self, request: web.BaseRequest, path: str, body: bytes) -> tuple[_Run, str, Peek, bytes]:
        """What is asked for; the body with the model's own name in it."""
        path_qs = path + query_of(request)
        headers = request.headers
        entry = self._origins.forwarded_by(
            request.method, request.raw_path, headers, body, request.remote or ""
        )
        connection = cast(ClientConnection, request.protocol)
        if entry is not None and _ID.fullmatch(told := headers.get(REQUEST_HEADER, "")):
            connection.request_id = told  # so that both nodes' logs tell of one request
        wanted = peek(path, headers, body)
        alias: str | None = None
        # Once, where the client came in: a peer gets the model's own name.
        if entry is None and (model := self._model_for(wanted.model)) is not None:
            alias, body, wanted = wanted.model, name_model(body, model), replace(wanted, model=model)
        # A forward has been placed by its entry node, which tells how long it may wait here.
        place = ANYWHERE if entry else placement(path_qs[len(path) + 1 :], headers.getall(PREFER_HEADER, ()))
        ask = Ask(
            request_id=connection.request_id,
            model=wanted.model,
            session=forwarded_session(headers) if entry is not None else None,
            home=forwarded_home(headers) if entry is not None else "",
            session_key=wanted.session_key,
            chain=wanted.chain,
            pin=place.pin,
            prefer=place.prefer,
            kv_share=wanted.kv_share,
            needs_slot=wanted.needs_slot,
            pinnable=wanted.pinnable,
            body_bytes=len(body),
            alias=alias,
            forwarded_by=entry,
            wait_ms=wait_ms(headers.get(WAIT_HEADER, "")) if entry else 0,
        )
        return _Run(ClientAnswer(request, path), ask), path_qs, wanted, body

    async def _answer(
        self, request: web.BaseRequest, path_qs: str, body: bytes, wanted: Peek, run: _Run
    ) -> web.StreamResponse:
        ask = run.ask
        self._running[ask.request_id] = run
        if self._prompts is not None and ask.needs_slot:
            self._prompts.put(ask.request_id, run.client.path, body)
        if wanted.stream and has_stream(run.client.path):
            self._silences.enter(run.client)
        try:
            return await self._route(request, path_qs, body, wanted, run)
        except ViiworkError as error:
            self._requests.unserved(ask, error, run.since)
            if not run.client.head_sent:
                raise
            if ask.forwarded_by is not None:
                run.client.cut()  # its entry node has sent nothing but comments either, and tries elsewhere
            else:
                run.client.fail(error)
            return Sent(keep_alive=False)
        except asyncio.CancelledError:
            if not run.granted:
                self._requests.left(ask, run.since)
            raise
        except Exception:
            if not run.client.head_sent:
                raise
            # Half an answer is out: a second head inside of it would be taken for content.
            log.exception("relay.failed request=%s", ask.request_id)
            run.client.cut(reset=True)
            return Sent(keep_alive=False)
        finally:
            self._silences.leave(run.client)
            if self._running.get(ask.request_id) is run:  # a peer may name two requests alike
                del self._running[ask.request_id]
                if self._prompts is not None:
                    self._prompts.forget(ask.request_id)

    async def _route(
        self, request: web.BaseRequest, path_qs: str, body: bytes, wanted: Peek, run: _Run
    ) -> web.StreamResponse:
        """Try one place after the other until one gave the answer."""
        exclude: list[str] = []
        failure: _RouteFailed | None = None
        for _ in range(ROUTE_ATTEMPTS_MAX):
            try:
                grant = await self._dispatcher.acquire(run.ask, exclude)
            except (AllRoutesRefused, NotFound, NotServedHere) as error:
                raise _told(error, failure) from None
            run.granted = True
            try:
                return await self._run(request, path_qs, body, wanted, grant, run)
            except _RouteFailed as failed:
                text = line("route.failed", request=run.ask.request_id, node=grant.node, detail=failed.detail)
                log.info("%s", text)
                failure = failed
                exclude.append(grant.node)
                run.granted = False
        raise _told(AllRoutesRefused("every route refused the request"), failure)

    async def _run(
        self, request: web.BaseRequest, path_qs: str, body: bytes, wanted: Peek, grant: Grant, run: _Run
    ) -> web.StreamResponse:
        """Run the request where it was granted; the grant is given back on every way out."""
        started = time.monotonic()
        passed = Passed()
        answer: Connection | None = None
        status = 0
        self._requests.granted(grant)
        try:
            patience = self._silences.patience(forward=grant.is_forward, wait_s=grant.wait_ms / 1000)
            run.client.granted(self._said(grant), patience)
            async with asyncio.timeout(None) as run.before_answer:
                answer = await self._send(request, path_qs, body, wanted, grant)
            status = answer.head.status
            if status in _REFUSALS or (grant.is_forward and _is_peer_fault(answer)):
                await self._refused(answer)
            run.answer = answer
            if grant.is_forward:
                grant.queued_s += wait_ms(header(answer.head.headers, _QUEUED).decode("latin-1")) / 1000
                run.client.say(self._said(grant))
            await relay(request, run.client, answer, grant, passed)
            if passed.result == "unreachable":
                raise _RouteFailed("unreachable", status, passed.detail)
            return Sent(passed.keep_alive)
        except _RouteFailed as failed:
            passed.result, passed.detail = failed.result, failed.detail
            raise
        except UpstreamError as error:
            passed.result, passed.detail = "unreachable", str(error)
            raise _RouteFailed("unreachable", detail=str(error)) from error
        except TimeoutError:
            passed.result, passed.detail = "stalled", run.why
            raise _RouteFailed("stalled", detail=run.why) from None
        except ConnectionError:
            passed.client_left()
            return Sent(keep_alive=False)
        except asyncio.CancelledError:
            if cast(ClientConnection, request.protocol).lost:
                passed.client_left()
            else:
                passed.result, passed.detail = "broken", "the node stopped"
            raise
        finally:
            run.answer = run.before_answer = None
            if answer is not None:
                self._upstreams.give_back(answer)
            first = passed.first_content_at
            outcome = Outcome(
                result=passed.result,
                status=status,
                ttft_s=None if first is None else first - started,
                streamed=passed.streamed,
                duration_s=time.monotonic() - started,
                usage=passed.usage,
                detail=passed.detail,
            )
            self._dispatcher.finish(grant, outcome)
            if passed.result in _ENDS:
                self._requests.ended(grant, outcome, run.since)

    async def _send(
        self, request: web.BaseRequest, path_qs: str, body: bytes, wanted: Peek, grant: Grant
    ) -> Connection:
        address, host, prefix = _place(grant.url)
        raw = request.raw_headers
        proof: dict[str, str] = {}
        if grant.is_forward:
            address = address._replace(source_ip=self._origins.source_ip)
            proof = self._origins.forward_headers("POST", path_qs, body)
            proof[REQUEST_HEADER] = grant.ask.request_id
            if grant.ask.session is not None:
                proof[SESSION_HEADER] = grant.ask.session
            if grant.ask.home:
                proof[HOME_HEADER] = grant.ask.home
            if grant.wait_ms:
                proof[WAIT_HEADER] = str(grant.wait_ms)
        elif (external := self._external(grant.backend)) is not None:
            path_qs = prefix + path_qs
            if external.model:
                body = name_model(body, external.model)
            if external.api_key:
                raw = tuple(pair for pair in raw if pair[0].lower() != b"authorization")
                proof = {"Authorization": f"Bearer {external.api_key}"}
        elif wanted.pinnable and grant.slot is not None:
            body = pin(body, grant.slot)
        elif wanted.names_slot and wanted.needs_slot:
            body = pin(body, ENGINE_CHOOSES)  # a client must not reach into another session's slot
        head = request_head(
            raw,
            method="POST",
            path_qs=path_qs,
            host=host,
            body_bytes=len(body),
            extra=proof,
            peer=grant.is_forward,
        )
        return await self._upstreams.exchange(address, head, body)

    async def _refused(self, answer: Connection) -> NoReturn:
        """Read a refusal away, so that its connection can be used again, and try the next route."""
        n_bytes = 0
        try:
            async with asyncio.timeout(REFUSAL_DRAIN_S):
                while not answer.at_end and n_bytes < REFUSAL_DRAIN_BYTES:
                    n_bytes += len(await answer.read())
        except OSError:
            log.debug("a refusal's body was cut short")
        result: Result = "refused" if answer.head.status in _REFUSALS else "unreachable"
        raise _RouteFailed(result, answer.head.status, f"answered {answer.head.status}")

    def _said(self, grant: Grant) -> bytes:
        """Our own header lines of an answer."""
        ask = grant.ask
        lines = [
            f"X-Viiwork-Node: {safe_value(grant.node)}\r\n"
            f"X-Viiwork-Model: {safe_value(ask.model)}\r\n"
            f"{REQUEST_HEADER}: {ask.request_id}\r\n"
        ]
        if ask.alias is not None:
            lines.append(f"X-Viiwork-Alias: {safe_value(ask.alias)}\r\n")
        if grant.backend:
            lines.append(f"X-Gpu-Backend: {safe_value(grant.backend)}\r\n")
        entry = self._node if grant.is_forward else ask.forwarded_by
        if entry:
            lines.append(f"X-Viiwork-Origin: {safe_value(entry)}\r\n")
        if grant.queued_s > 0:
            lines.append(f"{QUEUED_HEADER}: {math.ceil(grant.queued_s * 1000)}\r\n")
        return "".join(lines).encode()


class _Run:
    """A request from its first route to its end, so far as giving up its place needs to know."""

    __slots__ = ("answer", "ask", "before_answer", "client", "granted", "since", "why")

    def __init__(self, client: ClientAnswer, ask: Ask) -> None:
        self.client = client
        self.ask = ask
        self.since = time.monotonic()
        self.granted = False  # a place has it, which tells of its end
        self.before_answer: asyncio.Timeout | None = None  # while its upstream is silent
        self.answer: Connection | None = None
        self.why = ""

    def stop(self, why: str) -> None:
        self.why = why
        if self.answer is not None:
            self.answer.abort()
            self.answer.fail(ConnectionAbortedError(why))
        elif self.before_answer is not None and not self.before_answer.expired():
            self.before_answer.reschedule(0.0)


class ClientClosedEarly(RequestError):
    """Nobody is there to be answered."""

    code = "client_closed"


def query_of(request: web.BaseRequest) -> str:
    """The query as it was sent, with its question mark; "" without one."""
    _, mark, query = request.raw_path.partition("#")[0].partition("?")
    return mark + query if query else ""


def _is_peer_fault(answer: Connection) -> bool:
    return answer.head.status in _PEER_FAULTS and not header(answer.head.headers, b"x-viiwork-node")


def _told(error: ViiworkError, failure: _RouteFailed | None) -> ViiworkError:
    """What the client hears when no route is left: how the last one failed, unless it merely refused."""
    if failure is None or failure.result == "refused":
        return error
    if failure.result == "stalled":
        return UpstreamStalled(f"the upstream stayed silent: {failure.detail}")
    return UpstreamUnreachable(f"the upstream failed: {failure.detail}")


@lru_cache(maxsize=512)
def _place(url: str) -> tuple[Address, str, str]:
    """Socket address, `Host` and path of a base URL."""
    parsed = URL(url)
    host, port = parsed.host, parsed.port
    if host is None or port is None:
        raise UpstreamUnreachable(f"{url} is no address")
    tls = parsed.scheme == "https"
    return Address(host, port, tls=tls), parsed.authority, parsed.raw_path.rstrip("/")
