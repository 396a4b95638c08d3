"""`viiwork check` as an operator runs it, and the reading of the file itself."""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from viiwork.cli import check
from viiwork.config.load import default_config_path, load_config, parse_config
from viiwork.config.preflight import startup_problems
from viiwork.errors import ConfigError

Check = Callable[[Path], int]
SECRET = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="


@pytest.fixture
def run() -> Check:
    def run(path: Path) -> int:
        parser = argparse.ArgumentParser()
        check.add_parser(parser.add_subparsers())
        args = parser.parse_args(["check", "--config", str(path)])
        return int(args.run(args))

    return run


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIIWORK_MESH_SECRET", raising=False)
    monkeypatch.delenv("VIIWORK_MESH_SECRET_PREV", raising=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_valid_file_is_printed_as_the_config_in_effect(run: Check, tmp_path: Path, capsys):
    path = write(
        tmp_path / "c.yaml", f"mesh: {{open: true}}\nnode: {{name: a, state_dir: {tmp_path}/state}}\n"
    )
    assert run(path) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# mesh: open\nnode:\n  name: a\n")
    assert parse_config(out.encode(), "out", {}).config == load_config(path, {}).config
    assert err == "warning: api.host 0.0.0.0 listens on every network of this machine; " + (
        "requests are not authenticated\n"
    )


def test_a_secured_mesh_is_said_to_be_one_without_its_secret(run: Check, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("VIIWORK_MESH_SECRET", SECRET)
    monkeypatch.setenv("VIIWORK_MESH_SECRET_PREV", SECRET.replace("A", "B", 1))
    assert run(write(tmp_path / "c.yaml", "mesh: {network: lan}\n")) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "# mesh: secured by the secret from VIIWORK_MESH_SECRET, "
        "the previous one from VIIWORK_MESH_SECRET_PREV\n"
    )
    assert "AAAA" not in out + err


def test_a_wrong_file_is_one_line_and_exit_2(run: Check, tmp_path: Path, capsys):
    path = write(tmp_path / "c.yaml", "mesh: {open: true}\napi:\n  port: 010\n")
    assert run(path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (f"{path}:3: api.port: expected a whole number in plain digits, got 010 (leading zero)\n")


def test_a_missing_file_is_one_line_and_exit_2(run: Check, tmp_path: Path, capsys):
    assert run(tmp_path / "none.yaml") == 2
    expected = f"{tmp_path}/none.yaml: cannot read the config: No such file or directory\n"
    assert capsys.readouterr() == ("", expected)


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    n_open = len(os.listdir("/dev/fd"))
    for path in (
        tmp_path,
        tmp_path / "pipe",
        Path("/dev/zero"),
        Path(f"{tmp_path}/a\0b"),
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, {})
        assert str(caught.value).isprintable()
    assert len(os.listdir("/dev/fd")) == n_open


def test_a_directory_is_called_one(tmp_path: Path):
    with pytest.raises(ConfigError, match="expected a config file, got a directory"):
        load_config(tmp_path, {})


def test_the_config_is_printed_as_utf_8_whatever_the_terminal_speaks(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "mesh: {open: true}\nnode: {state_dir: /ünï-北京}\n")
    code = (
        "import sys, argparse, pathlib, viiwork.cli.check as c; "
        "sys.exit(c.run(argparse.Namespace(config=pathlib.Path(sys.argv[1]))))"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", code, path], env=env, capture_output=True, check=True)
    assert parse_config(done.stdout, "out", {}).config.node.state_dir == "/ünï-北京"


def test_a_file_name_cannot_break_the_line(tmp_path: Path):
    path = write(tmp_path / "a\nb\x1b.yaml", "x: 1\n")
    with pytest.raises(ConfigError, match=r"a\\nb\\x1b.yaml:1: x: expected a known key"):
        load_config(path, {})


def test_a_file_over_the_limit_is_not_read_to_its_end(tmp_path: Path):
    path = tmp_path / "c.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ConfigError, match="expected at most 1048576 bytes, got a larger file"):
        load_config(path, {})


def test_the_default_path_is_the_platforms():
    assert default_config_path("linux") == Path("/etc/viiwork/viiwork.yaml")
    assert default_config_path("darwin") == Path.home() / ".config/viiwork/viiwork.yaml"


def problems(tmp_path: Path, model: Path, binary: str = "embedded", state: Path | None = None) -> list[str]:
    text = (
        f"mesh: {{open: true}}\nnode: {{state_dir: '{state or tmp_path}'}}\nmodels:\n"
        f"  - {{name: m, engine: llamacpp, path: '{model}', context: 1, llamacpp: {{binary: '{binary}'}}}}\n"
    )
    return startup_problems(parse_config(text.encode(), "f.yaml", {}).config)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf", "GGUF")


def program(path: Path) -> Path:
    write(path, "#!/bin/sh\n").chmod(0o755)
    return path


def test_a_config_that_can_start_has_no_problems(tmp_path: Path, gguf: Path):
    assert problems(tmp_path, gguf, str(program(tmp_path / "llama-server"))) == []


def test_a_model_file_that_cannot_be_served_is_a_warning(tmp_path: Path, gguf: Path):
    engine = str(program(tmp_path / "llama-server"))
    missing, folder, socket = tmp_path / "none.gguf", tmp_path / "folder", Path("/dev/null")
    folder.mkdir()
    assert problems(tmp_path, missing, engine) == [f"models[0].path: {missing}: No such file or directory"]
    assert problems(tmp_path, folder, engine) == [
        f"models[0].path: {folder} is a directory; name the model file in it"
    ]
    junk = write(tmp_path / "junk.gguf", "#!/bin/sh")
    assert problems(tmp_path, junk, engine) == [f"models[0].path: {junk} is not a GGUF file"]
    assert problems(tmp_path, socket, engine) == ["models[0].path: /dev/null is not a file"]
    assert problems(tmp_path, gguf / "below", engine) == [f"models[0].path: {gguf}/below: Not a directory"]


def test_a_state_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, gguf: Path):
    engine = str(program(tmp_path / "llama-server"))
    assert problems(tmp_path, gguf, engine, state=gguf / "state") == [
        f"node.state_dir: {gguf} is not a folder"
    ]
    assert problems(tmp_path, gguf, engine, state=tmp_path / "new/below") == []


def test_what_this_user_may_not_touch_is_a_warning(tmp_path: Path, gguf: Path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root, who may run the tests, may touch all
    assert problems(tmp_path, gguf, state=tmp_path / "new")[:2] == [
        f"node.state_dir: {tmp_path}/new cannot be written, as {tmp_path} stands",
        f"models[0].path: {gguf} cannot be read",
    ]


def test_an_engine_that_is_not_there_is_a_warning(tmp_path: Path, gguf: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    nowhere = str(tmp_path / "none")
    assert problems(tmp_path, gguf, nowhere) == [
        f"models[0].llamacpp.binary: {nowhere} is not a program that can be run"
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems(tmp_path, gguf, "embedded") == [
        "models[0].llamacpp.binary: embedded needs the package xllamacpp: pip install 'viiwork[embedded]'"
    ]
    assert problems(tmp_path, gguf, "") == [
        "models[0].llamacpp.binary: no llama-server on PATH, and xllamacpp is not installed"
    ]
    program(tmp_path / "llama-server")
    assert problems(tmp_path, gguf, "") == []


def test_check_changes_nothing(run: Check, tmp_path: Path, capsys):
    path = write(tmp_path / "c.yaml", f"mesh: {{open: true}}\nnode: {{state_dir: {tmp_path}/state}}\n")
    path.chmod(stat.S_IRUSR)
    assert run(path) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]


def test_loading_a_config_imports_no_event_loop_and_no_engine():
    code = (
        "import sys, viiwork.cli.check; "
        "sys.exit(any(m in sys.modules for m in ('asyncio', 'aiohttp', 'xllamacpp', 'uvloop')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
