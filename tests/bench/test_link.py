from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.fakes.bench_ends import ENDS_WITHIN_S, OTHER_SECRET, SECRET, Far, command, env, near
from tests.fakes.savefiles import State, make
from viiwork.bench.link import ALL_WAYS
from viiwork.bench.results import read_results
from viiwork.bench.states import HELD_TOKENS, TOKEN_BYTES
from viiwork.limits import MIB
from viiwork.version import VERSION

SMALL = ("--size", "2MiB", "--runs", "1")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "near"
    folder.mkdir()
    return folder


def to(far: Far, work: Path, *more: str) -> tuple[str, ...]:
    return ("--to", f"127.0.0.1:{far.port}", "--dir", str(work), *SMALL, *more)


def assert_clean(*folders: Path) -> None:
    assert [found for folder in folders for found in folder.iterdir()] == []


@pytest.mark.parametrize("secret", ["", SECRET])
def test_every_way_to_send_is_measured_and_nothing_is_left_on_either_host(tmp_path, work, secret):
    found = tmp_path / "found.json"
    with Far(tmp_path / "far", secret=secret) as far:
        done = near(*to(far, work, "--json", str(found), "--runs", "2"), secret=secret, TMPDIR=str(work))
        far.until_says("done with")
        assert_clean(work, far.folder)
    assert done.code == 0, done.err
    results = read_results(found)
    assert (results.kind, results.viiwork) == ("link", VERSION)
    phase = results.phases[0]
    assert len(phase.raw_bytes_per_s) == 2
    assert not phase.failed
    ways = [(run.cache, run.compress, run.encrypt) for run in phase.runs]
    assert set(ways) <= {tuple(way) for way in ALL_WAYS}
    assert all(ways.count(way) == 2 for way in ways)
    assert {way for way in ways if way[0] == "warm"} == {tuple(way) for way in ALL_WAYS if way[0] == "warm"}


def test_a_run_tells_bytes_time_and_stages_of_both_ends(tmp_path, work):
    found = tmp_path / "found.json"
    with Far(tmp_path / "far") as far:
        assert near(*to(far, work, "--json", str(found))).code == 0
    runs = {(run.cache, run.compress, run.encrypt): run for run in read_results(found).phases[0].runs}
    plain, packed, secret = (runs["warm", *way] for way in (("off", "off"), ("on", "off"), ("off", "on")))
    tokens = 2 * MIB // TOKEN_BYTES
    assert plain.bytes == tokens * (TOKEN_BYTES + 4)  # the peer held the rest already
    assert plain.wire_bytes > plain.bytes > packed.wire_bytes
    assert (plain.encrypted, secret.encrypted) == (False, True)
    assert runs["warm", "auto", "auto"].encrypted is False  # loopback is private already
    for stage in ("read_s", "hash_s", "send_s", "receive_s", "verify_s", "write_s", "render_s"):
        assert plain.stages[stage] > 0, stage
    assert packed.stages["compress_s"] > 0
    assert all(run.seconds > 0 and run.raw_bytes_per_s > 0 for run in runs.values())


def test_a_save_file_of_an_engine_is_sent_whole(tmp_path, work):
    save, found = tmp_path / "save", tmp_path / "found.json"
    save.write_bytes(make(State(n=300)))
    with Far(tmp_path / "far") as far:
        done = near(*to(far, work, "--file", str(save), "--json", str(found)))
        assert done.code == 0, done.err
        far.until_says("done with")
        assert_clean(far.folder)
    assert save.exists()
    assert read_results(found).phases[0].runs[0].bytes > 4 * 300


def test_a_file_that_is_no_save_file_is_told_in_one_line(tmp_path, work):
    save = tmp_path / "save"
    save.write_bytes(b"no" * 100)
    with Far(tmp_path / "far") as far:
        done = near(*to(far, work, "--file", str(save)))
    assert done.code == 1
    assert f"{save} is no slot save-file" in done.line


# -- what goes wrong -------------------------------------------------------------------------------
def test_a_host_where_nobody_listens_is_told_with_what_to_start_there(work):
    done = near("--to", "127.0.0.1:9", "--dir", str(work), *SMALL)
    assert done.code == 1
    assert "127.0.0.1:9 cannot be reached" in done.line
    assert "viiwork bench kvshare --listen" in done.line
    assert_clean(work)


def test_a_name_that_is_no_host_is_told(work):
    done = near("--to", "no-such-host.invalid", "--dir", str(work), *SMALL)
    assert (done.code, "'no-such-host.invalid' is no host that is known here" in done.line) == (1, True)
    assert_clean(work)


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, OTHER_SECRET), ("", SECRET), (SECRET, "")])
def test_another_secret_is_told_by_both_ends(tmp_path, work, ours, theirs):
    with Far(tmp_path / "far", secret=theirs) as far:
        done = near(*to(far, work), secret=ours)
        assert "the mesh secret differs" in far.until_says("refused 127.0.0.1")
        assert_clean(work, far.folder)
    assert done.code == 1
    assert "does not hold the same mesh secret" in done.line


def answering(line: bytes) -> tuple[socket.socket, int]:
    """A server that answers each connection's first line with this one, until it is closed."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            with sock:
                sock.recv(256)
                sock.sendall(line)

    threading.Thread(target=serve, daemon=True).start()
    return server, server.getsockname()[1]


def test_a_host_with_another_version_is_told_both_versions(work):
    server, port = answering(b"viiwork-bench 1 9.9.9 ok\n")
    with server:
        done = near("--to", f"127.0.0.1:{port}", "--dir", str(work), *SMALL)
        server.shutdown(socket.SHUT_RDWR)
    assert done.code == 1
    assert f"runs viiwork 9.9.9, this is {VERSION}" in done.line
    assert_clean(work)


def test_something_else_at_the_port_is_told_as_such(work):
    server, port = answering(b"SSH-2.0-OpenSSH_9.2\r\n")
    with server:
        done = near("--to", f"127.0.0.1:{port}", "--dir", str(work), *SMALL)
        server.shutdown(socket.SHUT_RDWR)
    assert (done.code, "is no `viiwork bench kvshare --listen`" in done.line) == (1, True)


def test_a_taken_port_is_told_with_who_holds_it(tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        done = near("--listen", "--port", str(port))
    assert done.code == 1
    assert f"port {port}/tcp cannot be used: Address already in use" in done.line
    assert "attempting" not in done.line
    assert f"(pid {os.getpid()})" in done.line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "a b"), "expected host[:port]"),
        (("--to", "[::1"), "expected host[:port]"),
        (("--to", "host:99999"), "expected a port from 1 to 65535"),
        (("--to", "h", "--size", "12"), "expected a size from 1MiB to 64GiB, got '12'"),
        (("--to", "h", "--size", "much"), "got 'much'"),
        (("--to", "h", "--runs", "0"), "expected 1 to 1000 runs"),
        (("--to", "h", "--file", "/nowhere"), "--file: there is no file /nowhere"),
        (("--to", "h", "--dir", "/nowhere"), "--dir: there is no folder /nowhere"),
        (("--to", "h", "--json", "/nowhere/x"), "--json: /nowhere/x cannot be written"),
        (("--lab", "--model", "x"), "--model goes with --to, or with --workload"),
        (("--to", "h", "--model", "/nowhere"), "--model: there is no file /nowhere"),
        (("--lab", "--json", "/"), "--json: / cannot be written"),
        (("--to", "h", "--plot", "x.gif"), "--plot: expected a name that ends in"),
        (("--listen", "--workload"), "--workload goes with --lab, or with --to"),
        (("--to", "h", "--secret-env", "NOT_SET"), "NOT_SET is not set"),
        ((), "one of the arguments --listen --to --lab is required"),
        (("--listen", "--lab"), "not allowed with"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(words, said):
    done = near(*words)
    assert (done.code, said in done.line) == (2, True), done.err


def test_a_second_host_is_told_that_the_first_one_is_measuring(tmp_path, work):
    with Far(tmp_path / "far") as far:
        first = subprocess.Popen(
            command(*to(far, work, "--runs", "1000")), env=env(), stderr=subprocess.DEVNULL
        )
        try:
            far.until_says("measuring with")
            second = near(*to(far, work))
        finally:
            first.send_signal(signal.SIGINT)
            first.wait(ENDS_WITHIN_S)
        far.until_says("done with")
    assert (second.code, "is measuring with another host" in second.line) == (1, True)
    assert_clean(work, far.folder)


def test_only_who_opens_properly_gets_an_answer(tmp_path):
    with Far(tmp_path / "far") as far:
        for said, answered in (
            (b"GET / HTTP/1.1\r\n\r\n", b""),
            (b"viiwork-bench 1 raw " + VERSION.encode() + b" guessed 100\n", b"denied"),
            (b"viiwork-bench 1 raw " + VERSION.encode() + b" x 99999999999999999\n", b""),
            (b"x" * 4096, b""),
        ):
            with socket.create_connection(("127.0.0.1", far.port)) as sock:
                sock.sendall(said)
                got = b""
                try:
                    while piece := sock.recv(256):
                        got += piece
                except ConnectionResetError:
                    got += b""  # it closed with our bytes unread
                assert got.endswith(answered + b"\n" if answered else b""), said
                assert bool(got) == bool(answered), said


# -- whatever ends it ------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_asking_end_that_is_stopped_leaves_nothing_on_either_host(tmp_path, work, how):
    with Far(tmp_path / "far") as far:
        words = command(*to(far, work, "--runs", "1000"))
        asking = subprocess.Popen(words, env=env(TMPDIR=str(work)), stderr=subprocess.PIPE)
        far.until_says("measuring with")
        asking.send_signal(how)
        asking.communicate(timeout=ENDS_WITHIN_S)  # its janitor holds the pipe for as long as it works
        assert asking.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(how, -how)
        far.until_says("127.0.0.1")
        eventually_clean(work, far.folder)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_listening_end_that_is_stopped_leaves_nothing_and_is_missed_in_one_line(tmp_path, work, how):
    with Far(tmp_path / "far") as far:
        words = command(*to(far, work, "--runs", "1000"))
        asking = subprocess.Popen(words, env=env(), stderr=subprocess.PIPE, text=True)
        far.until_says("measuring with")
        far.process.send_signal(how)
        _, err = asking.communicate(timeout=ENDS_WITHIN_S)
        far.process.wait(ENDS_WITHIN_S)
        eventually_clean(work, far.folder)
    assert asking.returncode == 1
    assert len([line for line in err.splitlines() if line.startswith("viiwork: ")]) == 1, err
    assert "Traceback" not in err


@pytest.mark.parametrize("end", ["the host", "standard input"])
def test_a_listening_end_for_one_host_ends_with_it_or_with_who_started_it(tmp_path, work, end):
    with Far(tmp_path / "far", more=("--once",)) as far:
        if end == "the host":
            assert near(*to(far, work)).code == 0
        else:
            far.process.stdin.close()
            far.process.stdin = None
        assert far.process.wait(ENDS_WITHIN_S) == 0
        assert_clean(far.folder)


def eventually_clean(*folders: Path) -> None:
    for _ in range(600):
        if not [found for folder in folders for found in folder.iterdir()]:
            return
        threading.Event().wait(0.1)
    assert_clean(*folders)


def test_the_state_that_is_made_parses_as_a_save_file_of_the_size_asked_for(tmp_path):
    from viiwork.bench.states import make_state
    from viiwork.wire.savefile import parse

    state = make_state(tmp_path, 4 * MIB)
    data, base = state.path.read_bytes(), state.base.read_bytes()
    info = parse(lambda at, size: data[at : at + size], len(data))
    assert info.n_tokens == HELD_TOKENS + 4 * MIB // TOKEN_BYTES
    assert info.shape.token_bytes == TOKEN_BYTES
    before = parse(lambda at, size: base[at : at + size], len(base))
    assert before.n_tokens == HELD_TOKENS
    row = info.caches[0].data[0]
    assert data[row : row + 2048 * HELD_TOKENS] == base[before.caches[0].data[0] :][: 2048 * HELD_TOKENS]
