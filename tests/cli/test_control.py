"""How commands talk to a node: address, secret, signature, and one line for each failure."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
from pathlib import Path

import pytest

from tests.fakes.engine import Conn, FakeEngine, Seen
from tests.fakes.node import FakeDispatcher, serving
from viiwork.api.routes import ControlRoute
from viiwork.api.server import json_answer
from viiwork.cli import control
from viiwork.cli.control import ControlClient, add_control_arguments
from viiwork.cli.main import main
from viiwork.errors import ConfigError, NodeRefused, NodeUnreachable, UsageError
from viiwork.limits import CONTROL_ANSWER_MAX_BYTES
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient

KEY, OTHER = b"k" * 32, b"o" * 32
SECRET, OTHER_SECRET = (base64.b64encode(key).decode() for key in (KEY, OTHER))


@pytest.fixture(autouse=True)
def no_config_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "default_config_path", lambda: tmp_path / "default.yaml")


def client(*argv: str, env: dict[str, str] | None = None) -> ControlClient:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_control_arguments(parser)
    return ControlClient.from_args(parser.parse_args(argv), env or {})


def config(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# -- where and with what -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", "127.0.0.1:8086"),
        ("api: {port: 9000}", "127.0.0.1:9000"),
        ('api: {host: "::", port: 9000}', "[::1]:9000"),
        ("api: {host: 192.168.1.5}", "192.168.1.5:8086"),
        ('api: {host: "fd00::5"}', "[fd00::5]:8086"),
    ],
)
def test_the_node_is_where_its_config_says(tmp_path: Path, text, address):
    path = config(tmp_path / "x.yaml", f"mesh: {{open: true}}\n{text}\n")
    assert client("--config", path).address == address
    config(tmp_path / "default.yaml", f"mesh: {{open: true}}\n{text}\n")
    assert client().address == address, "the default config is read where there is one"


def test_without_any_config_the_node_is_on_this_machine():
    assert client().address == "127.0.0.1:8086"


@pytest.mark.parametrize("node", ["192.168.1.5:8086", "box.lan:1", "[fd00::5]:65535", "a_b:80"])
def test_a_named_node_wins(tmp_path: Path, node):
    path = config(tmp_path / "x.yaml", "api: {port: 9000}")
    assert client("--config", path, "--node", node).address == node


@pytest.mark.parametrize(
    "node",
    [
        "",
        "box",
        "box:",
        ":8086",
        "box:0",
        "box:65536",
        "box:x",
        "http://box:1",
        "fd00::5",
        "[fd00::5]",
        "a b:1",
        "[x]:1",
        "[fe80::1%eth0]:1",
        "box:1\n",
        "-x:1",
        "ü:1",
        "a/b:1",
        "u@h:1",
        "box:0x10",
        "box:１",
    ],
)
def test_an_address_that_is_none_is_a_usage_error(node):
    with pytest.raises(argparse.ArgumentError, match="expected host:port"):
        client(f"--node={node}")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e99", "x", ""])
def test_a_timeout_that_is_none_is_a_usage_error(seconds):
    with pytest.raises(argparse.ArgumentError, match="expected seconds"):
        client(f"--timeout={seconds}")


def test_a_named_config_that_is_wrong_or_missing_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        client("--config", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="sedes"):
        client("--config", config(tmp_path / "x.yaml", "mesh: {sedes: []}"))


def test_a_config_without_its_secret_at_hand_still_says_where_the_node_is(tmp_path: Path):
    assert client("--config", config(tmp_path / "x.yaml", "api: {port: 9000}")).address == "127.0.0.1:9000"


def test_a_named_secret_that_is_not_there_is_a_usage_error():
    with pytest.raises(UsageError, match="MINE is not set"):
        client("--secret-env", "MINE", env={"VIIWORK_MESH_SECRET": SECRET})


# -- talking to a node -------------------------------------------------------------------------------
class Node:
    """A real API with the real proofs, and what its control route was given."""

    def __init__(self, *keys: bytes) -> None:
        self.origins = MeshOrigins("b", keys, PeerClient("b", keys), {}.get)
        self.seen: list[tuple[str, str, bytes]] = []

    async def handle(self, request, path, body):
        self.seen.append((request.headers.get("X-Viiwork-Node", ""), path, body))
        return json_answer(200, {"path": path})

    def serving(self):
        route = ControlRoute("/v1/things/*", ("PUT", "POST"), self.handle)
        return serving(FakeDispatcher([]), origins=self.origins, routes=[route])


async def send(port: int, *argv: str, env: dict[str, str] | None = None, body=None):
    asked = client("--node", f"127.0.0.1:{port}", *argv, env=env)
    return await asyncio.to_thread(asked.send, "PUT", "/v1/things/a%2Fb?x=1", body)


async def test_a_read_needs_no_secret_not_even_a_good_one():
    async with Node(KEY).serving() as api:
        asked = client("--node", f"127.0.0.1:{api.port}", env={"VIIWORK_MESH_SECRET": "junk"})
        assert (await asyncio.to_thread(asked.get, "/v1/status")) == {"node": "a"}


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ((), {"VIIWORK_MESH_SECRET": f" {SECRET}\n"}),
        (("--secret-env", "MINE"), {"MINE": SECRET, "VIIWORK_MESH_SECRET": OTHER_SECRET}),
        (("--config", "@"), {"FROM_CONFIG": SECRET, "VIIWORK_MESH_SECRET": OTHER_SECRET}),
    ],
)
@pytest.mark.parametrize("body", [None, {"target": "m\ud83d", "n": [1, None]}])
async def test_a_change_is_signed_with_the_secret_that_was_named(tmp_path: Path, argv, env, body):
    path = config(tmp_path / "x.yaml", "mesh: {secret_env: FROM_CONFIG}")
    node = Node(KEY)
    async with node.serving() as api:
        argv = [path if arg == "@" else arg for arg in argv]
        assert await send(api.port, *argv, env=env, body=body) == {"path": "/v1/things/a%2Fb"}
    ((signer, _, raw),) = node.seen
    assert signer.startswith("viiwork-cli@") and (json.loads(raw) if raw else None) == body


async def test_the_signer_is_always_fit_for_a_header(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control.socket, "gethostname", lambda: "bü x\r\nY: 1" + "z" * 400)
    node = Node(KEY)
    async with node.serving() as api:
        await send(api.port, env={"VIIWORK_MESH_SECRET": SECRET})
    assert node.seen[0][0].startswith("viiwork-cli@b--x--Y--1z") and len(node.seen[0][0]) < 300


async def test_an_open_node_on_this_machine_takes_a_change_without_a_secret():
    node = Node()
    async with node.serving() as api:
        await send(api.port)
        await send(api.port, env={"VIIWORK_MESH_SECRET": SECRET})
    assert len(node.seen) == 2


async def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with Node().serving() as api:
        await send(api.port)


async def failure(port: int, kind=NodeRefused, *argv: str, env=None) -> str:
    with pytest.raises(kind) as raised:
        await send(port, *argv, env=env)
    text = str(raised.value)
    assert text.isprintable() and len(text) < 600
    assert SECRET not in text and OTHER_SECRET not in text
    return text


async def test_a_refusal_says_what_helps():
    async with Node(KEY).serving() as api:
        text = await failure(api.port)
        assert "401" in text and "VIIWORK_MESH_SECRET" in text and "--secret-env" in text
        text = await failure(api.port, NodeRefused, "--secret-env", "MINE", env={"MINE": OTHER_SECRET})
        assert "secret differs" in text and "MINE" in text
        text = await failure(api.port, UsageError, env={"VIIWORK_MESH_SECRET": "c2hvcnQ="})
        assert "VIIWORK_MESH_SECRET" in text and "c2hvcnQ" not in text


async def test_an_open_node_asked_by_another_name_says_how_it_is_asked():
    async with Node().serving() as api:
        asked = client("--node", f"localhost:{api.port}")
        assert await asyncio.to_thread(asked.send, "PUT", "/v1/things/x")
        node = Node()
    async with serving(
        FakeDispatcher([]), origins=node.origins, routes=[ControlRoute("/v1/things/*", ("PUT",), node.handle)]
    ) as api:
        api.server._controls._origins = _From("192.168.1.5", node.origins)
        text = await failure(api.port)
    assert "403" in text and f"127.0.0.1:{api.port}" in text and not node.seen


class _From:
    """Requests as if they came from another machine."""

    def __init__(self, ip: str, origins: MeshOrigins) -> None:
        self._ip, self._origins = ip, origins

    def control(self, method, path_qs, headers, body, remote_ip):
        return self._origins.control(method, path_qs, headers, body, self._ip)


async def test_where_nobody_listens_the_address_and_the_way_out_are_named():
    text = await failure(1, NodeUnreachable)
    assert "127.0.0.1:1" in text and "refused" in text and "--node" in text
    with pytest.raises(NodeUnreachable, match="no-such-host"):
        client("--node", "no-such-host.invalid:1").get("/")


def answering(data: bytes, *, close: bool = True):
    async def script(conn: Conn, seen: Seen) -> None:
        conn.send(data)
        if close:
            conn.fin()
        else:
            await conn.closed.wait()

    return FakeEngine(script)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello\r\n\r\n",
        b"HTTP/1.1 999999 x\r\n\r\n",
        HEAD,
        HEAD + b"Content-Length: 9\r\n\r\n{}",
        HEAD + b"Content-Length: 3\r\n\r\n<p>",
        HEAD + b"Content-Length: 3\r\n\r\n\xff\xfe{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
        HEAD + b"X: 1\r\n" * 200 + b"\r\n",
        HEAD + b"\r\n" + b"[" * 100_000,
        HEAD + b"\r\n" + b"9" * 100_000,
        HEAD + b"\r\n " + b" " * CONTROL_ANSWER_MAX_BYTES,
    ],
)
async def test_what_answers_but_is_no_node_is_one_line(data):
    async with answering(data) as engine:
        assert f"127.0.0.1:{engine.port}" in await failure(engine.port, NodeUnreachable)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"error":"x"}',
        b'{"error":{"message":5}}',
        b'{"error":{"message":"\\u001b[2J\\nred\\ud83d"}}',
        b'{"error":{"message":"' + b"x" * 10_000 + b'"}}',
    ],
)
@pytest.mark.parametrize("status", [302, 400, 404, 409, 500, 503])
async def test_a_refusal_of_any_shape_is_one_printable_line(status, body):
    data = b"HTTP/1.1 %d X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )
    async with answering(data) as engine:
        assert str(status) in await failure(engine.port)
        assert len(engine.requests) == 1, "a redirect is not followed"


@pytest.mark.parametrize("data", [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\n{"])
async def test_a_silent_node_is_given_up(data):
    async with answering(data, close=False) as engine:
        assert "within 0.2 s" in await failure(engine.port, NodeUnreachable, "--timeout", "0.2")


async def test_a_node_that_trickles_is_given_up_too():
    async def trickle(conn: Conn, seen: Seen) -> None:
        conn.send(b"HTTP/1.1 200 OK\r\n")
        while not conn.closed.is_set():
            conn.send(b"X: 1\r\n" if len(engine.requests) == 1 else b" ")
            await asyncio.sleep(0.02)

    async with FakeEngine(trickle) as engine:
        assert "within 0.5 s" in await failure(engine.port, NodeUnreachable, "--timeout", "0.5")


# -- down and up -------------------------------------------------------------------------------------
def parked(*rows: tuple[str, bool, bool], node: str = "b"):
    models = [{"name": name, "parked": parked, "changed": changed} for name, parked, changed in rows]
    return json.dumps({"node": node, "models": models}).encode()


def answer_with(body: bytes):
    async def script(conn: Conn, seen: Seen) -> None:
        conn.answer(200, body)

    return FakeEngine(script)


@pytest.mark.parametrize(
    ("argv", "asked"),
    [(("down",), {}), (("up",), {}), (("down", "a", "org/b"), {"models": ["a", "org/b"]})],
)
async def test_models_are_parked_and_taken_back_by_name_or_all(argv, asked, capsys):
    word = argv[0]
    body = parked(("a", word == "down", True), ("org/b", word == "down", False))
    async with answer_with(body) as engine:
        argv = [word, "--node", f"127.0.0.1:{engine.port}", *argv[1:]]
        assert await asyncio.to_thread(main, argv) == 0
    (seen,) = engine.requests
    assert (seen.method, seen.target, seen.json) == ("POST", f"/v1/models/{word}", asked)
    first, second = capsys.readouterr().out.splitlines()
    texts = ("parked", "was parked already") if word == "down" else ("in service", "was in service already")
    assert first == f"b  a      {texts[0]}" and second == f"b  org/b  {texts[1]}"


async def test_names_of_a_remote_node_do_not_reach_the_terminal_raw(capsys):
    async with answer_with(parked(("a\x1b[2J\nx", True, True), node="b\x07")) as engine:
        assert await asyncio.to_thread(main, ["down", "--node", f"127.0.0.1:{engine.port}"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b"[]",
        b"{}",
        b'{"node":1,"models":[]}',
        b'{"node":"b","models":5}',
        b'{"node":"b","models":[1]}',
        b'{"node":"b","models":[{"name":"a","changed":[]}]}',
        b'{"node":["b"],"models":[]}',
    ],
)
async def test_an_answer_of_another_shape_is_one_line_and_exit_1(body, capsys):
    async with answer_with(body) as engine:
        assert await asyncio.to_thread(main, ["up", "--node", f"127.0.0.1:{engine.port}"]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("viiwork: ") and err.count("\n") == 1


def test_down_without_a_node_is_one_line_and_exit_1(capsys):
    assert main(["down", "--node", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
