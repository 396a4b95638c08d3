"""Every command, called in every way: exit 0, 1 or 2, a failure in one line, never a traceback."""

from __future__ import annotations

import argparse
import base64
import http.server
import json
import signal
import socket
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from viiwork.cli import bench_kvshare, bench_workload, control, demo_story, serve
from viiwork.cli.main import build_parser, main
from viiwork.errors import BenchError, EngineError, MeshError
from viiwork.node import node

from .conftest import fuzzed
from .requests import values

EXAMPLE = files("viiwork.config").joinpath("example.yaml").read_bytes()
SECRET = base64.b64encode(b"k" * 32).decode()
FILES = {
    "example": EXAMPLE,
    "open": b"mesh: {open: true}\napi: {port: 1}\n",
    "empty": b"",
    "binary": bytes(range(256)),
    "cut": EXAMPLE[:700],
    "list": b"- 1\n",
    "json": b'{"a": [1, {"b": null}], "version": 1, "entries": {"x": {"target": "m"}}}',
    "deep": b"[" * 5000,
    "table": b'{"version": 2, "aliases": []}',
}
WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "m",
        "a/b",
        "org/model:Q4",
        "0",
        "-1",
        "1e9",
        "nan",
        "1",
        "x" * 5000,
        "ünï",
        "\udcff",
    ),
    *(
        "\x1b[2J",
        "a\nb",
        "%2F",
        "..",
        "--help",
        "--version",
        "--node",
        "--config",
        "--no-such",
        "-x",
        "=",
        "@x",
    ),
)


class _Hostile(http.server.BaseHTTPRequestHandler):
    """A node that answers whatever it was told to."""

    protocol_version = "HTTP/1.1"
    status: ClassVar[int] = 200
    answer: ClassVar[bytes] = b"{}"

    def _reply(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(type(self).status)
        self.send_header("Content-Length", str(len(type(self).answer)))
        self.end_headers()
        self.wfile.write(type(self).answer)

    do_GET = do_POST = do_PUT = do_DELETE = _reply

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hostile() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Odd files, and commands that stop where they would start nodes or leave this machine."""
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(control, "default_config_path", lambda: tmp_path / "none.yaml")
    monkeypatch.setattr(serve, "set_up_logging", lambda **wanted: None)
    monkeypatch.setattr(node.Node, "run", _no_node)
    monkeypatch.setattr(demo_story, "ensure_demo_model", lambda: tmp_path / "empty")
    monkeypatch.setattr(demo_story, "start", _no_start)
    monkeypatch.setattr(socket, "create_connection", _loopback_only(socket.create_connection))
    for begins in ("bound_socket", "resolve", "run_lab"):
        monkeypatch.setattr(bench_kvshare, begins, _no_bench)
    for begins in ("shared_model", "run_lab_workload"):
        monkeypatch.setattr(bench_workload, begins, _no_bench)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # `serve` holds SIGHUP back
    on_term = signal.getsignal(signal.SIGTERM)  # `bench` has its own way to end
    yield tmp_path
    signal.signal(signal.SIGTERM, on_term)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


async def _no_node(self: node.Node) -> int:
    raise MeshError("no node is started while fuzzing")


def _no_start(started: Any) -> None:
    raise EngineError("no node is started while fuzzing")


def _no_bench(*args: Any, **kwargs: Any) -> None:
    raise BenchError("nothing is measured while fuzzing")


def _loopback_only(connect: Any) -> Any:
    def checked(address: tuple[str, int], *args: Any, **kwargs: Any) -> Any:
        assert address[0] in ("127.0.0.1", "::1", "localhost"), address
        return connect(address, *args, **kwargs)

    return checked


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every command that can be run, with its own parser."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield path, parser
    for action in below:
        for name, sub in action.choices.items():
            yield from commands(sub, (*path, name))


COMMANDS = dict(commands(build_parser()))


def arguments(parser: argparse.ArgumentParser, node: str) -> st.SearchStrategy[list[str]]:
    """Arguments of the parser's own options and positionals, with odd values."""
    word = st.one_of(
        st.sampled_from(WORDS),
        st.sampled_from(
            [*FILES, "folder", "none", "/dev/null", "/proc/self/mem", "folder/x/y", "\udcff.yaml"]
        ),
        st.text(st.characters(exclude_characters=":\x00", exclude_categories=["Cs"]), max_size=12),
    )
    parts = [word.map(lambda text: [text])]
    for action in parser._actions:
        for option in action.option_strings[-1:]:
            if option == "--node":
                where = st.sampled_from([node, node, node, "127.0.0.1:1", "[::1]:1", "", "x", ":1", "a b:1"])
                parts.append(where.map(lambda text: ["--node", text]))
            elif action.nargs == 0:
                parts.append(st.just([option]))
            else:
                parts.append(word.map(lambda text, o=option: [o, text]))
    rest = st.lists(st.one_of(parts), max_size=5).map(lambda found: [arg for part in found for arg in part])
    takes_node = any("--node" in action.option_strings for action in parser._actions)
    start = ["--node", node, "--timeout", "5"] if takes_node else []
    return st.one_of(rest, rest.map(lambda args: [*start, *args]))


def test_every_command_is_found():
    assert {("serve",), ("check",), ("down",), ("up",), ("demo",)} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_any_arguments_end_in_an_exit_code_and_at_most_one_line(
    path: tuple[str, ...],
    folder: Path,
    hostile: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    secrets = st.sampled_from([None, SECRET, "junk", "", "\udcff" * 44])

    @fuzzed(60, " ".join(path))
    @given(
        arguments(COMMANDS[path], hostile),
        values,
        st.sampled_from([200, 200, 200, 204, 401, 403, 404, 500]),
        secrets,
    )
    def called(argv: list[str], answer: Any, status: int, secret: str | None):
        _Hostile.status, _Hostile.answer = status, b"" if status == 204 else json.dumps(answer).encode()
        if secret is None:
            monkeypatch.delenv("VIIWORK_MESH_SECRET", raising=False)
        else:
            monkeypatch.setenv("VIIWORK_MESH_SECRET", secret)
        capsys.readouterr()
        try:
            code = main([*path, *argv])
        except SystemExit as ended:  # --help
            assert ended.code == 0
            code = 0
        out, err = capsys.readouterr()
        note(f"exit {code}, out {out[:300]!r}, err {err[:600]!r}")
        assert code in (0, 1, 2)
        assert "Traceback" not in out + err
        assert secret != SECRET or SECRET not in out + err
        lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
        assert len(lines) <= 1 and all(line.isprintable() for line in lines)
        assert code == 0 or lines, "a failure says why"

    called()
