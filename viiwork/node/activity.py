"""The node's activity as its operator follows it: backends, members, and every request."""

from __future__ import annotations

import time
from collections.abc import Callable

from viiwork.core.activity import ActivityLog, Event, Kind, end_text, request_text
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.engine.supervisor import BackendView
from viiwork.errors import ViiworkError
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import MemberEvent
from viiwork.node.clock import wall_ms


class NodeActivity:
    """Turns what happens into events; one listener of `api.ports.Requests`."""

    def __init__(self, n_events: int, *, wall_ms: Callable[[], int] = wall_ms) -> None:
        self.log = ActivityLog(n_events)
        self._wall_ms = wall_ms
        self._places: dict[str, tuple[str, str]] = {}  # running request -> its last message and backend
        self._backends: dict[str, str] = {}  # backend -> what was told of it last

    def note(self, kind: Kind, message: str, *, backend: str = "") -> None:
        self.log.emit(Event(self._wall_ms(), kind, one_line(message), backend))

    # -- api.ports.Requests --------------------------------------------------------------------------
    def granted(self, grant: Grant) -> None:
        model, backend = grant.ask.model, grant.backend
        dest = backend or f"peer {grant.node}"
        message = request_text(model if model.isprintable() and len(model) < 256 else one_line(model), dest)
        rid = grant.ask.request_id
        self._places[rid] = message, backend
        self.log.emit(Event(self._wall_ms(), "request", message, backend, rid))

    def ended(self, grant: Grant, outcome: Outcome, since: float) -> None:
        aborted = {"done": None, "client_gone": "client"}.get(outcome.result, "")
        self._end(grant.ask.request_id, aborted, since)

    def unserved(self, ask: Ask, error: ViiworkError, since: float) -> None:
        self._end(ask.request_id, None, since)

    def left(self, ask: Ask, since: float) -> None:
        self._end(ask.request_id, "client", since)

    def _end(self, rid: str, aborted: str | None, since: float) -> None:
        place = self._places.pop(rid, None)
        if place is None:  # never had one, so nobody saw it begin
            return
        message = end_text(place[0], aborted=aborted, took_s=time.monotonic() - since)
        self.log.emit(Event(self._wall_ms(), "request", message, place[1], rid), is_end=True)

    # -- the rest of the node ------------------------------------------------------------------------
    def backend_changed(self, view: BackendView) -> None:
        told = " ".join(filter(None, (view.status, f"({view.phase})" if view.phase else "", view.reason)))
        if self._backends.get(view.id) != told:
            self._backends[view.id] = told
            self.note("backend", f"{view.id} {told}", backend=view.id)

    def member_changed(self, event: MemberEvent) -> None:
        self.note("system", f"{event.member.name} {event.kind} ({event.other_addr or event.member.api})")
