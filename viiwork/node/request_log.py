"""One log line for each ended request, as many as an operator can read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from viiwork.core.logline import line
from viiwork.core.turn import Ask, Grant, Outcome
from viiwork.errors import ViiworkError
from viiwork.limits import REQUEST_LINES_PER_S

log = logging.getLogger("viiwork.requests")


class RequestLog:
    """A listener of `api.ports.Requests`. Under a load test the lines beyond the limit are counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._n_lines = 0

    def granted(self, grant: Grant) -> None:
        log.debug("request.granted request=%s node=%s", grant.ask.request_id, grant.node)

    def ended(self, grant: Grant, outcome: Outcome, since: float) -> None:
        if not self._is_due():
            return
        usage = outcome.usage
        text = line(
            f"request.{outcome.result}",
            request=grant.ask.request_id,
            model=grant.ask.model,
            node=grant.node,
            backend=grant.backend or None,
            entry=grant.ask.forwarded_by,
            status=outcome.status or None,
            ttft_ms=None if outcome.ttft_s is None else round(outcome.ttft_s * 1000),
            cached=usage.cached if usage is not None else None,
            prefilled=usage.prefilled if usage is not None else None,
            generated=usage.generated if usage is not None else None,
            queued_ms=round(grant.queued_s * 1000) or None,
            took_ms=round((self._clock() - since) * 1000),
            detail=outcome.detail or None,
        )
        log.info("%s", text)

    def unserved(self, ask: Ask, error: ViiworkError, since: float) -> None:
        if self._is_due():
            text = line(
                "request.refused",
                request=ask.request_id,
                model=ask.model or None,  # "" when the body was not understood
                entry=ask.forwarded_by,
                status=error.http_status,
                code=error.code,
                took_ms=round((self._clock() - since) * 1000),
                detail=str(error),
            )
            log.info("%s", text)

    def left(self, ask: Ask, since: float) -> None:
        if self._is_due():
            took_ms = round((self._clock() - since) * 1000)
            log.info("%s", line("request.left", request=ask.request_id, model=ask.model, took_ms=took_ms))

    def _is_due(self) -> bool:
        second = int(self._clock())
        if second != self._second:
            if self._n_lines > REQUEST_LINES_PER_S:
                log.info("requests.unlogged n=%d", self._n_lines - REQUEST_LINES_PER_S)
            self._second, self._n_lines = second, 0
        self._n_lines += 1
        return self._n_lines <= REQUEST_LINES_PER_S
