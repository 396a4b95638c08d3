"""Secrets that change, and secrets that differ, on real nodes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest

from .lan import NO_SHARING, ask, fake_model
from .nodes import NodeProcess

CURRENT, PREVIOUS = "VIIWORK_MESH_SECRET", "VIIWORK_MESH_SECRET_PREV"


def secret() -> str:
    return base64.b64encode(os.urandom(32)).decode()


def fleet(tmp_path: Path, host: str, env: dict[str, str], models: tuple[str, ...]) -> list[NodeProcess]:
    nodes = [
        NodeProcess(f"n{i}", f"{host}.{i + 1}", tmp_path, model, extra=NO_SHARING, env=dict(env))
        for i, model in enumerate(models)
    ]
    for node in nodes:
        node.seeds = tuple(other.seed for other in nodes if other is not node)
    return nodes


async def until_one_mesh(http: aiohttp.ClientSession, nodes: list[NodeProcess]) -> None:
    for node in nodes:
        await node.until(
            http, "whole", lambda s: sum(m["state"] == "alive" for m in s["mesh"]["members"]) == len(nodes)
        )
    for node in nodes:
        await node.until_healthy(http)


class Traffic:
    """Requests to every node that is up, one after the other, until told to end; counts what came back."""

    def __init__(self, http: aiohttp.ClientSession, nodes: list[NodeProcess]) -> None:
        self.answers: Counter[tuple[int, str]] = Counter()
        self.resting: set[str] = set()  # about to be restarted: its clients go elsewhere
        self._http = http
        self._nodes = nodes
        self._ended = False

    async def run(self) -> None:
        for node, model in itertools.cycle(itertools.product(self._nodes, ("m0", "m1", "m2"))):
            if self._ended:
                return
            if node.name in self.resting or model[1:] in {name[1:] for name in self.resting}:
                await asyncio.sleep(0.01)
                continue
            self.answers[await ask(self._http, node, model)] += 1

    def end(self) -> None:
        self._ended = True


async def test_a_secret_is_rotated_under_traffic_without_a_failed_request(
    tmp_path: Path, http: aiohttp.ClientSession
):
    old, new = secret(), secret()
    models = tuple(fake_model(tmp_path, f"m{i}") for i in range(3))
    nodes = fleet(tmp_path, "127.0.21", {CURRENT: old}, models)
    traffic = Traffic(http, nodes)
    try:
        for node in nodes:
            node.start()
        await until_one_mesh(http, nodes)
        for node in nodes:
            for model in ("m0", "m1", "m2"):
                await node.until_sees(http, model, 1)
        running = asyncio.create_task(traffic.run())
        for env in ({CURRENT: new, PREVIOUS: old}, {CURRENT: new}):
            for node in nodes:
                traffic.resting.add(node.name)
                await asyncio.sleep(0.3)  # what was sent to it has come back
                node.end()
                node.env = env
                node.start()
                await until_one_mesh(http, nodes)
                for one in nodes:
                    for model in ("m0", "m1", "m2"):
                        await one.until_sees(http, model, 1)
                traffic.resting.discard(node.name)
                before = sum(traffic.answers.values())
                while sum(traffic.answers.values()) < before + 18:
                    await asyncio.sleep(0.01)
        traffic.end()
        await running
        assert {status for status, _ in traffic.answers} == {200}, traffic.answers
        assert {name for _, name in traffic.answers} == {"n0", "n1", "n2"}
        for node in nodes:
            assert "mesh.secret using=current" in node.log, (
                "the first pass ended with all of them on the new one"
            )
            assert old not in node.log and new not in node.log
        async with http.get(f"{nodes[0].api}/v1/status") as answer:
            body = await answer.text()
            assert old not in body and new not in body
    finally:
        traffic.end()
        for node in nodes:
            node.end()


async def test_a_node_that_missed_the_rotation_stays_out_and_both_sides_say_why(
    tmp_path: Path, http: aiohttp.ClientSession
):
    old, new = secret(), secret()
    nodes = fleet(
        tmp_path, "127.0.22", {CURRENT: new}, (fake_model(tmp_path, "m0"), "", fake_model(tmp_path, "m2"))
    )
    nodes[2].env = {CURRENT: old}
    try:
        for node in nodes:
            node.start()
        await until_one_mesh(http, nodes[:2])
        inside = await nodes[0].until(http, "told", lambda s: "decrypted" in " ".join(s["mesh"]["problems"]))
        outside = await nodes[2].until(http, "told", lambda s: bool(s["mesh"]["problems"]))
        assert [m["node"] for m in inside["mesh"]["members"]] == ["n0", "n1"]
        assert [m["node"] for m in outside["mesh"]["members"]] == ["n2"]
        assert "its secret differs from ours" in " ".join(outside["mesh"]["problems"])
        assert (await ask(http, nodes[1], "m2"))[0] == 404, "its models are not listed"
        for node in (nodes[0], nodes[2]):
            said = [line for line in node.log.splitlines() if "secret differs" in line]
            assert 1 <= len(said) <= 3, "said once a cause, not once a round"
            assert old not in node.log and new not in node.log
    finally:
        for node in nodes:
            node.end()


@pytest.mark.parametrize("joiner_is_open", [True, False])
async def test_an_open_and_a_secured_node_stay_apart_and_both_say_so(
    tmp_path: Path, http: aiohttp.ClientSession, joiner_is_open: bool
):
    nodes = fleet(tmp_path, f"127.0.{23 + joiner_is_open}", {}, ("", ""))
    nodes[not joiner_is_open].env = {CURRENT: secret()}
    nodes[0].seeds = ()  # only the second one tries
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            status = await node.until(http, "told", lambda s: bool(s["mesh"]["problems"]))
            assert [m["node"] for m in status["mesh"]["members"]] == [node.name]
            assert (
                "the secret differs" in status["mesh"]["problems"][0]
                or "it is" in status["mesh"]["problems"][0]
            )
    finally:
        for node in nodes:
            node.end()


async def test_two_nodes_of_one_name_end_with_one_of_them_and_its_address_in_the_message(
    tmp_path: Path, http: aiohttp.ClientSession
):
    nodes = fleet(tmp_path, "127.0.25", {}, ("", "", ""))
    twin = NodeProcess("n0", "127.0.25.9", tmp_path / "twin", "", (nodes[1].seed,), NO_SHARING)
    twin.folder.mkdir()
    try:
        for node in nodes:
            node.start()
        await until_one_mesh(http, nodes)
        twin.start()
        await asyncio.to_thread(twin.process.wait)
        assert twin.process.returncode == 1
        assert f"another node at {nodes[0].seed} bears our name 'n0'; give one another node.name" in twin.log
        for node in nodes:
            status = await node.until(http, "whole", lambda s: len(s["mesh"]["members"]) == 3)
            assert next(m for m in status["mesh"]["members"] if m["node"] == "n0")["addr"] == nodes[0].host
    finally:
        for node in (*nodes, twin):
            node.end()


def test_a_secret_is_in_no_command_line(tmp_path: Path):
    node = NodeProcess("n0", "127.0.26.1", tmp_path, "", (), NO_SHARING, {CURRENT: secret()})
    try:
        node.start()
        while "mesh.joined" not in node.log:
            assert node.process is not None and node.process.poll() is None
        lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
        assert any("viiwork serve" in line for line in lines)
        assert not [line for line in lines if node.env[CURRENT] in line]
    finally:
        node.end()
