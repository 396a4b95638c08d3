"""What the HTTP layer asks of the node; the node implements these, the handlers know nothing else."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.errors import ViiworkError


class Dispatcher(Protocol):
    """Owner of slots, queues and peers."""

    async def acquire(self, ask: Ask, exclude: Collection[str] = ()) -> Grant:
        """A place to run `ask`; nodes named in `exclude` refused it already.

        May wait in the model's queue. Raises `NotFound` or a `Refused`; cancelling gives up the place.
        """
        ...

    def finish(self, grant: Grant, outcome: Outcome) -> None:
        """Give the grant back; a second call does nothing."""
        ...


class Requests(Protocol):
    """Hears of every request: `granted` for each place that is tried, then one of the others, once.

    `since` is when its body was read, in monotonic seconds.
    """

    def granted(self, grant: Grant) -> None: ...

    def ended(self, grant: Grant, outcome: Outcome, since: float) -> None:
        """An answer came: it is done, broke off, or its client left."""
        ...

    def unserved(self, ask: Ask, error: ViiworkError, since: float) -> None:
        """The node itself answered, with an error."""
        ...

    def left(self, ask: Ask, since: float) -> None:
        """The client left while its request waited for a place."""
        ...


class Prompts(Protocol):
    """Sees the bodies of requests while these look for a place or have one."""

    def put(self, request_id: str, path: str, body: bytes) -> None:
        """Borrow a body until `forget`; it must not be kept beyond that."""
        ...

    def forget(self, request_id: str) -> None: ...


class Origins(Protocol):
    """Proof of who sent a request."""

    def forwarded_by(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str | None:
        """Entry node of a proven forward, None for an ordinary client.

        Raises `Unauthorized` when the mesh is secured and a forward's proof is wrong.
        """
        ...

    def control(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str:
        """Who makes a control write, for the log. Raises `Unauthorized` or `Forbidden`."""
        ...

    @property
    def source_ip(self) -> str:
        """Where connections to peers must come from, "" = anywhere."""
        ...

    def forward_headers(self, method: str, path_qs: str, body: bytes) -> dict[str, str]:
        """Headers that prove to a peer that this node forwards the request."""
        ...


class Facts(Protocol):
    """The node's own view of itself, as JSON-ready values."""

    name: str

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of `/health`."""
        ...

    def models(self) -> list[dict[str, Any]]: ...

    def model_info(self) -> list[dict[str, Any]]: ...

    def capacity(self, holdings_known: int | None) -> bytes:
        """Body of `/v1/capacity`; without the list of holdings when its revision is the known one."""
        ...

    def fleet_capacity(self, model: str | None) -> dict[str, Any]:
        """Body of `/v1/fleet/capacity`."""
        ...

    def model_for(self, name: str) -> str | None:
        """The model an alias stands for now, None when `name` is no alias or a model bears it too.

        Raises `AliasUnserved` when nobody serves any model it may stand for.
        """
        ...

    def status(self) -> dict[str, Any]: ...


class Parking(Protocol):
    """Which models of this node are parked."""

    def park(self, names: Sequence[str] | None, parked: bool) -> dict[str, Any]:
        """Park models, None = all, or start them again; the answer is JSON-ready.

        Raises `RequestError` for a name that is not configured here, and then changes nothing.
        """
        ...


class BenchEnds(Protocol):
    """Makes this machine the other end of a measurement."""

    async def begin(self) -> int:
        """The port at which one host is awaited now. Raises `BenchError`."""
        ...


class External(Protocol):
    """What a request to a server that somebody else runs needs beside its address."""

    @property
    def model(self) -> str:
        """What the server calls the model, "" = as the client does."""
        ...

    @property
    def api_key(self) -> str:
        """Goes to that server and nowhere else; "" = none."""
        ...


class Channels(Protocol):
    """Receiving end of kv_share."""

    def check(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> Any:
        """Admit an upgrade before the 101 is sent; the value goes to `take`. Raises `ViiworkError`."""
        ...

    def answer_headers(self, admitted: Any) -> dict[str, str]:
        """Extra headers of the 101."""
        ...

    def take(self, admitted: Any, sock: socket.socket) -> None:
        """Own the raw socket from now on."""
        ...


class Links(Protocol):
    """This node's addresses, as peers ask for them. Both raise `ViiworkError` for who is no peer."""

    def told(self, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str) -> bytes:
        """Take a peer's table of addresses; the answer is this node's."""
        ...

    def probed(
        self, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str, local_ip: str
    ) -> bytes:
        """Prove which node was reached at `local_ip`."""
        ...


class Pulls(Protocol):
    """Sends sessions' states to peers that ask for them."""

    async def pulled(self, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str) -> bytes:
        """The answer when the state has arrived there; raises Unauthorized, Forbidden, RequestError."""
        ...


class KvFacts(Protocol):
    """The states this node holds."""

    def listing(self) -> dict[str, Any]:
        """Body of `/v1/kv`: bounded lists of sessions, replicas and links, and how many `more` there are."""
        ...


class Viewer(Protocol):
    """A client of the mesh stream."""

    def put(self, frame: bytes) -> None:
        """Queue one event; a viewer that is too far behind is cut off instead."""
        ...

    def close(self) -> None:
        """Let the stream end."""
        ...


class Hub(Protocol):
    """The mesh as those see it who watch it through this node."""

    async def cluster(self) -> bytes:
        """Body of `/v1/cluster`."""
        ...

    @property
    def n_viewers(self) -> int: ...

    def enter(self, viewer: Viewer) -> None:
        """Give a new viewer the whole picture, then every change, until it leaves."""
        ...

    def leave(self, viewer: Viewer) -> None: ...


class AliasTable(Protocol):
    """The mesh's names for models. Names are not checked before they come here."""

    def listing(self) -> list[dict[str, Any]]:
        """The aliases and what each stands for now, by name."""
        ...

    def table_json(self) -> bytes:
        """The whole table with histories and removals."""
        ...

    async def put(self, name: str, target: str, fallbacks: list[str], force: bool) -> dict[str, Any]:
        """Make or change an alias; answers with the write as members hear of it.

        Raises `AliasConflict`, `AliasNotSaved`.
        """
        ...

    async def delete(self, name: str) -> dict[str, Any]:
        """Remove an alias. Raises `UnknownAlias`, `AliasNotSaved`."""
        ...

    async def revert(self, name: str) -> dict[str, Any]:
        """Set an alias to what it was before. Raises `UnknownAlias`, `AliasConflict`, `AliasNotSaved`."""
        ...
