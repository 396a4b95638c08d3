"""Logging of the `viiwork` commands: one line an event on stderr, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

from viiwork.core import logline

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")


class _OneLine(logging.Formatter):
    """Remote text never breaks a line or reaches the terminal as a control character."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message)
        line = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')} {record.levelname:<7} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Json(logging.Formatter):
    """One object a line, with the event and its fields taken out of `noun.verb key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        event, fields, rest = logline.parse(text)
        milliseconds = f"{record.msecs:03.0f}"
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        value: dict[str, Any] = {
            "time": f"{when}.{milliseconds}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": text,
        }
        if event:
            value["event"] = event
        if fields:
            value["fields"] = fields
        if request := fields.get("request"):
            value["request"] = request
        if event and rest:
            value["detail"] = rest
        if record.exc_info:
            value["traceback"] = self.formatException(record.exc_info)
        return json.dumps(value)  # pure ASCII: no control character, no half of a pair


def set_up_logging(*, debug: bool, log_format: LogFormat = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _OneLine())
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
