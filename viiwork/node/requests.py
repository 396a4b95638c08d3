"""Hands what the API tells of its requests to everyone who counts, shows or logs it."""

from __future__ import annotations

from viiwork.api.ports import Requests
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.errors import ViiworkError


class RequestListeners:
    """Implements `api.ports.Requests`."""

    def __init__(self, *listeners: Requests) -> None:
        self._listeners = listeners

    def granted(self, grant: Grant) -> None:
        for listener in self._listeners:
            listener.granted(grant)

    def ended(self, grant: Grant, outcome: Outcome, since: float) -> None:
        for listener in self._listeners:
            listener.ended(grant, outcome, since)

    def unserved(self, ask: Ask, error: ViiworkError, since: float) -> None:
        for listener in self._listeners:
            listener.unserved(ask, error, since)

    def left(self, ask: Ask, since: float) -> None:
        for listener in self._listeners:
            listener.left(ask, since)
