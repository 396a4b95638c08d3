from __future__ import annotations

import json
import logging

import pytest

from viiwork.cli.logs import set_up_logging
from viiwork.core.logline import line


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(capsys, log_format: str, say) -> list[str]:
    set_up_logging(debug=False, log_format=log_format)
    say(logging.getLogger("viiwork.test"))
    return capsys.readouterr().err.splitlines()


def test_text_of_strangers_stays_on_one_line_and_moves_no_cursor(capsys):
    (text,) = written(capsys, "text", lambda log: log.info("peer.said %s", "a\nb\x1b[2J\u202e\x9b1m"))
    assert text.isprintable() and "a\\nb\\x1b[2J" in text


def test_json_lines_carry_event_fields_and_request(capsys):
    said = line("request.done", request="00ff00ff00ff00ff", model='m" x=1', status=200, node=None)
    (text,) = written(capsys, "json", lambda log: log.info("%s", said))
    value = json.loads(text)
    assert (value["level"], value["logger"]) == ("info", "viiwork.test")
    assert (value["event"], value["request"]) == ("request.done", "00ff00ff00ff00ff")
    assert value["fields"] == {"request": "00ff00ff00ff00ff", "model": 'm" x=1', "status": "200"}


@pytest.mark.parametrize("text", ["", "plain words", "\ud800 half \x00 \n two", "a.b c=d\nrequest=1"])
def test_every_record_is_one_json_object_of_plain_ascii(capsys, text):
    (written_line,) = written(capsys, "json", lambda log: log.warning("%s", text))
    assert written_line.isascii() and written_line.isprintable()
    assert json.loads(written_line)["message"] == text


def test_a_traceback_stays_in_its_json_object(capsys):
    def say(log: logging.Logger) -> None:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("api.failed request=%s", "ab")

    (text,) = written(capsys, "json", say)
    value = json.loads(text)
    assert "ValueError" in value["traceback"] and value["request"] == "ab"


def test_an_unknown_format_is_a_usage_error(capsys):
    from viiwork.cli.main import main

    assert main(["serve", "--log-format", "xml"]) == 2
    assert "--log-format" in capsys.readouterr().err
