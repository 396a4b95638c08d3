from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from viiwork.cli.main import main
from viiwork.version import VERSION


def viiwork(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VIIWORK_MESH")}
    command = [sys.executable, "-m", "viiwork", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean | env)


def config(folder: Path, text: str = "") -> str:
    path = folder / "viiwork.yaml"
    path.write_text(f"node: {{state_dir: {folder / 'state'}}}\n" + text)
    return str(path)


def test_python_dash_m_and_version():
    done = viiwork("--version")
    assert (done.returncode, done.stdout) == (0, f"viiwork {VERSION}\n")


@pytest.mark.parametrize("args", [[], ["fly"], ["serve", "--nope"], ["serve", "stray"], ["demo", "--json"]])
def test_a_wrong_command_line_is_one_line_and_exit_2(args: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("viiwork: ") and error.count("\n") == 1 and "--help" in error


@pytest.mark.parametrize("command", [[], ["serve"], ["check"], ["down"], ["up"], ["demo"]])
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 150


def test_serve_without_its_config_names_the_file_and_exits_2(tmp_path: Path):
    done = viiwork("serve", "--config", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "none.yaml" in done.stderr and done.stderr.count("\n") == 1


def test_serve_with_neither_secret_nor_open_mesh_exits_2_and_names_the_variable(tmp_path: Path):
    done = viiwork("serve", "--config", config(tmp_path))
    assert done.returncode == 2
    assert "VIIWORK_MESH_SECRET" in done.stderr and "mesh.open" in done.stderr


def test_a_taken_api_port_is_named_before_anything_is_started(tmp_path: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.14.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        text = (
            f"api: {{host: 127.0.14.1, port: {port}}}\n"
            "mesh: {network: lan, advertise: 127.0.14.1, open: true}\n"
        )
        done = viiwork("serve", "--config", config(tmp_path, text))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"127.0.14.1:{port}/tcp" in last and "in use" in last and "Traceback" not in done.stderr
    assert str(os.getpid()) in last, "the owner is named"


def test_a_taken_gossip_port_ends_the_node_with_its_name(tmp_path: Path):
    with socket.socket() as holder, socket.socket() as free:
        holder.bind(("127.0.14.2", 0))
        holder.listen()
        free.bind(("127.0.14.2", 0))
        api_port = free.getsockname()[1]
        free.close()
        port = holder.getsockname()[1]
        text = (
            f"api: {{host: 127.0.14.2, port: {api_port}}}\n"
            f"mesh: {{network: lan, advertise: 127.0.14.2, bind_port: {port}, open: true}}\n"
        )
        done = viiwork("serve", "--config", config(tmp_path, text))
    assert done.returncode == 1
    assert f"{port}/tcp" in done.stderr and "taken" in done.stderr and "Traceback" not in done.stderr


def test_a_state_dir_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "state").write_text("a file")
    text = "mesh: {network: lan, advertise: 127.0.14.3, open: true}\n"
    done = viiwork("serve", "--config", config(tmp_path, text))
    assert done.returncode == 1
    assert "node.state_dir" in done.stderr and "Traceback" not in done.stderr
