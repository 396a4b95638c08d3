from __future__ import annotations

import socket
from pathlib import Path

import pytest

from viiwork.cli import demo_nodes
from viiwork.cli.demo_chat import long_text
from viiwork.config.load import parse_config
from viiwork.errors import UsageError


def test_both_config_files_of_the_demo_are_valid_and_b_serves_one_model_more(tmp_path: Path):
    model = tmp_path / "model.gguf"
    nodes = demo_nodes.plan_nodes(tmp_path, model)
    a, b = (parse_config(node.config.read_bytes(), node.name, {}).config for node in nodes)
    assert [m.name for m in a.models] == ["smollm2"]
    assert [m.name for m in b.models] == ["smollm2", "smollm2-b"]
    assert a.mesh.seeds == ("127.0.0.2:7946",) and b.mesh.seeds == ("127.0.0.1:7946",)
    assert (a.api.port, a.mesh.bind_port, a.kv_share.enabled) == (8086, 7946, True)


def test_a_port_in_use_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nodes = demo_nodes.plan_nodes(tmp_path, tmp_path / "model.gguf")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setattr(demo_nodes, "API_PORT", holder.getsockname()[1])
        with pytest.raises(UsageError, match=r"127\.0\.0\.1:\d+ is in use: stop what listens there"):
            demo_nodes.check_addresses(nodes)


def test_an_address_this_machine_lacks_is_named_with_the_command_that_adds_it(tmp_path: Path):
    nodes = demo_nodes.plan_nodes(tmp_path, tmp_path / "model.gguf")
    nodes[1].host = "192.0.2.1"
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        demo_nodes.check_addresses((nodes[1], nodes[1]))


def test_texts_of_two_seeds_share_no_opening_and_one_seed_gives_one_text():
    assert long_text(1, 20) == long_text(1, 20)
    first, second = long_text(1, 20), long_text(2, 20)
    assert first.splitlines()[0] != second.splitlines()[0]
    assert len(first.splitlines()) == 20
