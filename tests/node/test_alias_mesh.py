"""Aliases in a mesh of real nodes, with the real engine where a request runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from .nodes import NodeProcess, free_port

PATIENCE_S = 60.0


async def put(
    http: aiohttp.ClientSession, node: NodeProcess, name: str, target: str, *fallbacks: str, force=False
):
    body = {"target": target, "fallbacks": fallbacks, "force": force}
    async with http.put(f"{node.api}/v1/aliases/{name}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def until(true) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await true():
            await asyncio.sleep(0.05)


async def targets(http: aiohttp.ClientSession, node: NodeProcess) -> dict[str, str]:
    aliases = (await node.get(http, "/v1/aliases"))["aliases"]
    return {alias["name"]: alias["target"] for alias in aliases}


async def until_same(http: aiohttp.ClientSession, wanted: dict[str, str], *nodes: NodeProcess) -> None:
    async def same() -> bool:
        return all([await targets(http, node) == wanted for node in nodes])

    await until(same)


@pytest.mark.engine
class TestServing:
    @pytest.fixture(autouse=True)
    async def aliases(self, pair, http):
        a, b = pair
        await put(http, a, "far", "only-b", "small")
        await put(http, b, "nowhere", "never-served", force=True)
        await until_same(http, {"far": "only-b", "nowhere": "never-served"}, a, b)

    async def test_a_request_by_an_alias_runs_where_its_model_is(self, pair, http):
        a, b = pair
        # Equal keys, escapes and bytes of other alphabets: what counts is what the engine would take.
        body = (
            '{"model":"small", "messages" : [{"role":"user","content":"\\"model\\":\\"far\\" é€ \\u00e9"}],\n'
            '"max_tokens":4,"temperature":0,"m\\u006fdel" :\t"f\\u0061r"}'
        ).encode()
        for entry in (a, b):
            async with http.post(f"{entry.api}/v1/chat/completions", data=body) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers["X-Viiwork-Alias"] == "far"
                assert answer.headers["X-Viiwork-Model"] == "only-b"
                assert answer.headers["X-Viiwork-Node"] == "b"
                assert (await answer.json())["choices"][0]["message"]["content"]

    async def test_the_surfaces_agree(self, pair, http):
        for node in pair:
            models = {m["id"]: m for m in (await node.get(http, "/v1/models"))["data"]}
            assert list(models) == sorted(models) == ["far", "nowhere", "only-b", "small"]
            assert (models["far"]["owned_by"], models["far"]["target"]) == ("alias", "only-b")
            assert models["far"]["max_model_len"] == models["only-b"]["max_model_len"] == 512
            assert "max_model_len" not in models["nowhere"]
            info = {
                m["model_name"]: m["model_info"] for m in (await node.get(http, "/v1/model/info"))["data"]
            }
            assert list(info) == list(models)
            assert info["far"] == info["only-b"]
            listed = {a["name"]: a for a in (await node.get(http, "/v1/aliases"))["aliases"]}
            assert (listed["far"]["resolved"], listed["far"]["state"]) == ("only-b", "ok")
            assert (listed["nowhere"]["resolved"], listed["nowhere"]["state"]) == (None, "unavailable")
            fleet = await node.get(http, "/v1/fleet/capacity?model=far")
            plain = await node.get(http, "/v1/fleet/capacity?model=only-b")
            assert fleet["resolved_from"] == "far" and "resolved_from" not in plain
            [model], [same] = fleet["models"], plain["models"]
            assert (model["name"], model["slots"], model["ctx"]) == ("only-b", same["slots"], same["ctx"])
            nobody = await node.get(http, "/v1/fleet/capacity?model=nowhere")
            assert nobody["models"] == [] and "resolved_from" not in nobody
            one = await node.get(http, "/v1/models/far")
            assert one == models["far"]

    async def test_an_alias_nobody_serves_is_503_with_a_time_to_come_back(self, pair, http):
        body = {"model": "nowhere", "messages": []}
        async with http.post(f"{pair[0].api}/v1/chat/completions", json=body) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert "'never-served', which no node serves now" in (await answer.json())["error"]["message"]

    async def test_a_model_cannot_be_hidden_by_an_alias(self, pair, http):
        for node, name in ((pair[0], "only-b"), (pair[1], "only-b"), (pair[0], "small")):
            async with http.put(f"{node.api}/v1/aliases/{name}", json={"target": "small"}) as answer:
                assert answer.status == 409 and (await answer.json())["error"]["code"] == "alias_conflict"


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[list[NodeProcess]]:
    """Three nodes without models, not started."""
    nodes = [NodeProcess(name, f"127.0.11.{i}", tmp_path, "") for i, name in enumerate("abc", 1)]
    for node in nodes:
        node.seeds = tuple(other.seed for other in nodes if other is not node)
    yield nodes
    for node in nodes:
        node.end()


async def test_late_comers_and_restarted_nodes_have_the_mesh_s_table(three, http):
    a, b, c = three
    for node in (a, b):
        node.start()
    await put_when_up(http, a, "one", "m1")
    await until_same(http, {"one": "m1"}, a, b)
    c.start()
    await put_when_up(http, c, "two", "m2")
    both = {"one": "m1", "two": "m2"}
    await until_same(http, both, a, b, c)
    # What is written while a node is down reaches it when it is back, and what it knew is still there.
    b.kill()
    b.end()
    await put(http, c, "one", "m9", force=True)
    async with http.delete(f"{a.api}/v1/aliases/two") as answer:
        assert answer.status == 200
    await until_same(http, {"one": "m9"}, a, c)
    b.start()
    await until_up(http, b)
    assert await targets(http, b) in (both, {"one": "m9"}), "its own table is there before it joined"
    await until_same(http, {"one": "m9"}, a, b, c)
    digests = {(await node.get(http, "/v1/capacity"))["aliases"] for node in three}
    assert len(digests) == 1
    for node in three:
        assert node.end() == 0
        assert "Traceback" not in node.log
        table = json.loads((node.folder / node.name / "aliases.json").read_text())
        assert table["aliases"]["one"]["target"] == "m9" and table["aliases"]["two"]["deleted"] is True


async def test_in_a_secured_mesh_tables_travel_encrypted_and_writes_are_signed(tmp_path, http):
    env = {"VIIWORK_MESH_SECRET": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0MTI="}
    a, b = (NodeProcess(name, f"127.0.12.{i}", tmp_path, "", env=env) for i, name in enumerate("ab", 1))
    a.seeds, b.seeds = (b.seed,), (a.seed,)
    try:
        for node in (a, b):
            node.start()
            await until_up(http, node)
        async with http.put(f"{a.api}/v1/aliases/x", json={"target": "m", "force": True}) as answer:
            assert answer.status == 401
        command = ["alias", "set", "--node", f"{a.host}:{a.api_port}", "x", "m", "--force", "--timeout", "60"]
        assert "x -> unavailable (ver 1): 2/2 alive members" in await viiwork(*command, env=env)
        await until_same(http, {"x": "m"}, a, b)
    finally:
        for node in (a, b):
            node.end()


async def test_a_table_that_cannot_be_read_ends_the_start_with_one_line(tmp_path):
    node = NodeProcess("a", "127.0.11.1", tmp_path, "", api_port=free_port("127.0.11.1"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "aliases.json").write_text('{"v":7,"aliases":{}}')
    node.start()
    assert node.process is not None
    try:
        assert await asyncio.to_thread(node.process.wait, PATIENCE_S) == 1
    finally:
        node.end()
    said = [line for line in node.log.splitlines() if "aliases.json" in line]
    assert len(said) == 1 and "of version 7" in said[0] and "Traceback" not in node.log


async def viiwork(*argv: str, env: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "viiwork",
        *argv,
        env=os.environ | env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()


async def until_up(http: aiohttp.ClientSession, node: NodeProcess) -> None:
    await node.until(http, "up", lambda status: status["mesh"]["state"] == "joined")


async def put_when_up(http: aiohttp.ClientSession, node: NodeProcess, name: str, target: str) -> None:
    await until_up(http, node)
    await put(http, node, name, target, force=True)
