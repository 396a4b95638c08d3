"""Logging of the `viiwork` commands: one line an event on stderr."""

from __future__ import annotations

import logging
import sys


class _OneLine(logging.Formatter):
    """Remote text never breaks a line or reaches the terminal as a control character."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message)
        line = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')} {record.levelname:<7} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up_logging(*, debug: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
