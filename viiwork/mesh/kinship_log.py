"""kinship's own log lines, routed into ours and kept from flooding it."""

from __future__ import annotations

import logging
import re
import time

import kinship

from viiwork.mesh.notices import Repeats

_DIGITS = re.compile(r"[0-9]+")
_SAID_BY_US = ("running without encryption",)


class _Quiet(logging.Filter):
    """Lets a line through once a minute; lines that differ only in numbers are the same line."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith(_SAID_BY_US):
            return False
        return self._repeats.is_due(_DIGITS.sub("#", text), time.monotonic())


def route_kinship_log() -> None:
    """Send kinship's log to the `kinship` logger; calling it again does nothing.

    Must not run on an event loop's thread: from there kinship would tie its log to that loop.
    """
    logger = logging.getLogger("kinship")
    if not any(isinstance(f, _Quiet) for f in logger.filters):
        logger.addFilter(_Quiet())
    kinship.log_to_python(logging.WARNING)
