"""The libraries' own log lines, routed into ours and kept from flooding it."""

from __future__ import annotations

import logging
import re
import time

import kinship

from viiwork.mesh.notices import Repeats, one_line

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
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]}"
        # A packet's contents may stand in it, and a traceback of a library helps nobody who runs a node.
        record.msg, record.args, record.exc_info = one_line(text), (), None
        return self._repeats.is_due(_DIGITS.sub("#", text), time.monotonic())


def quieten(name: str) -> None:
    """Keep the logger of a library from flooding ours; calling it again does nothing."""
    logger = logging.getLogger(name)
    if not any(isinstance(f, _Quiet) for f in logger.filters):
        logger.addFilter(_Quiet())


def route_kinship_log() -> None:
    """Send kinship's log to the `kinship` logger; calling it again does nothing.

    Must not run on an event loop's thread: from there kinship would tie its log to that loop.
    """
    quieten("kinship")
    kinship.log_to_python(logging.WARNING)
