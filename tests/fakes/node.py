"""The node as the API sees it, reduced to lists: routes to hand out, outcomes that came back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from viiwork.api.app import ApiServer
from viiwork.api.ports import Origins
from viiwork.api.routes import AnyRoute
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.errors import AliasUnserved, AllRoutesRefused, Unauthorized, UnknownModel, ViiworkError


@dataclass
class FakeDispatcher:
    """Hands out `routes` in order, leaving out the excluded ones."""

    routes: list[Grant]
    models: frozenset[str] = frozenset({"m"})
    asks: list[Ask] = field(default_factory=list)
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    n_out: int = 0  # grants not given back
    n_twice: int = 0  # grants given back again
    gate: asyncio.Event | None = None  # acquire waits for it, as a queue does
    n_waiting: int = 0
    n_gave_up: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def acquire(self, ask: Ask, exclude: Collection[str] = ()) -> Grant:
        self.asks.append(ask)
        if ask.model not in self.models:
            raise UnknownModel(f"no model {ask.model!r}")
        if self.gate is not None:
            self.n_waiting += 1
            self._changed.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.n_gave_up += 1
                raise
            finally:
                self.n_waiting -= 1
                self._changed.set()
        for route in self.routes:
            if route.node not in exclude and not (ask.forwarded_by and route.is_forward):
                self.n_out += 1
                self._changed.set()
                return Grant(
                    ask,
                    route.node,
                    route.url,
                    route.backend,
                    route.slot,
                    route.queued_s,
                    route.lease,
                    route.wait_ms,
                )
        raise AllRoutesRefused("every node that serves the model refused")

    def finish(self, grant: Grant, outcome: Outcome) -> None:
        if grant.finished:
            self.n_twice += 1
            return
        grant.finished = True
        self.n_out -= 1
        self.outcomes.append((grant.node, outcome))
        self._changed.set()

    @property
    def results(self) -> list[str]:
        return [outcome.result for _, outcome in self.outcomes]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def route(node: str, url: str, backend: str = "m/0", slot: int | None = 1, queued_s: float = 0.0) -> Grant:
    return Grant(Ask("", ""), node, url, backend, slot, queued_s, lease=1)


@dataclass
class HeardRequests:
    """What the API told of its requests: a word, and the request's id."""

    heard: list[tuple[str, str]] = field(default_factory=list)

    def granted(self, grant: Grant) -> None:
        self.heard.append(("granted", grant.ask.request_id))

    def ended(self, grant: Grant, outcome: Outcome, since: float) -> None:
        self.heard.append((outcome.result, grant.ask.request_id))

    def unserved(self, ask: Ask, error: ViiworkError, since: float) -> None:
        self.heard.append((error.code, ask.request_id))

    def left(self, ask: Ask, since: float) -> None:
        self.heard.append(("left", ask.request_id))

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.heard]


@dataclass
class FakeOrigins:
    """A forward is proven by the shared word."""

    name: str
    word: str = "sesame"
    source_ip: str = ""

    def forwarded_by(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str | None:
        if "X-Viiwork-Forwarded" not in headers:
            return None
        if headers.get("X-Viiwork-Auth") != f"{self.word} {path_qs} {len(body)}":
            raise Unauthorized("the forward is not proven")
        return headers["X-Viiwork-Forwarded"]

    def control(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str:
        if headers.get("X-Viiwork-Auth") != f"{self.word} {method} {path_qs} {len(body)}":
            raise Unauthorized("the change is not proven")
        return "the operator"

    def forward_headers(self, method: str, path_qs: str, body: bytes) -> dict[str, str]:
        return {
            "X-Viiwork-Forwarded": self.name,
            "X-Viiwork-Node": f"id-of-{self.name}",
            "X-Viiwork-Ts": "1",
            "X-Viiwork-Nonce": "n",
            "X-Viiwork-Auth": f"{self.word} {path_qs} {len(body)}",
        }


@dataclass
class FakeFacts:
    name: str = "a"
    names: tuple[str, ...] = ("m",)
    fault: Exception | None = None
    aliases: dict[str, str] = field(default_factory=dict)  # to a model, or to "" when nobody serves it

    def health(self) -> tuple[int, dict[str, Any]]:
        if self.fault is not None:
            raise self.fault
        return 200, {"status": "ok"}

    def models(self) -> list[dict[str, Any]]:
        return [{"id": name, "object": "model", "owned_by": "local"} for name in sorted(self.names)]

    def model_info(self) -> list[dict[str, Any]]:
        return [{"model_name": name} for name in sorted(self.names)]

    def capacity(self, holdings_known: int | None) -> bytes:
        return b'{"node":"a"}'

    def fleet_capacity(self, model: str | None) -> dict[str, Any]:
        return {"view": self.name, "models": [], "asked": model}

    def model_for(self, name: str) -> str | None:
        if self.aliases.get(name) == "":
            raise AliasUnserved(f"no node serves {name!r}")
        return self.aliases.get(name)

    def status(self) -> dict[str, Any]:
        return {"node": self.name}


@dataclass
class FakeChannels:
    """Admits offers that say yes, and keeps the sockets."""

    taken: list[tuple[Any, socket.socket]] = field(default_factory=list)

    def check(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> Any:
        if body != b"yes":
            raise Unauthorized("the offer is not signed")
        return body

    def answer_headers(self, admitted: Any) -> dict[str, str]:
        return {"X-Viiwork-Kv-Grant": "g1"}

    def take(self, admitted: Any, sock: socket.socket) -> None:
        self.taken.append((admitted, sock))


@dataclass
class Api:
    """A listening API."""

    server: ApiServer
    port: int
    dispatcher: FakeDispatcher
    requests: HeardRequests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def serving(
    dispatcher: FakeDispatcher,
    *,
    facts: FakeFacts | None = None,
    channels: FakeChannels | None = None,
    routes: Iterable[AnyRoute] = (),
    origins: Origins | None = None,
    **limits: Any,
) -> AsyncIterator[Api]:
    """The real API server over a fake node; at the end every grant must have come back once."""
    facts = facts or FakeFacts()
    requests = HeardRequests()
    server = ApiServer(
        dispatcher,
        origins or FakeOrigins(facts.name),
        facts,
        channels,
        routes,
        requests=requests,
        **limits,
    )
    _, port = await server.listen("127.0.0.1", 0)
    try:
        yield Api(server, port, dispatcher, requests)
        await dispatcher.until(lambda: not dispatcher.n_out)
        assert dispatcher.n_twice == 0
    finally:
        await server.stop(0)
