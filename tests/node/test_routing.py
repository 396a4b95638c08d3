"""Real nodes that choose among themselves: wishes, receipts, measured speed, waiting for a warm node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from viiwork.cli.main import main
from viiwork.config.load import load_config
from viiwork.core.score import Baseline, Speeds
from viiwork.node.perf import PerfFile

from .nodes import NodeProcess
from .test_fleet import fake_model, question

TEXT = "word " * 8000  # 40,000 bytes, told to be 10,000 tokens
TOLD = {"cache_n": 0, "prompt_n": 10_000, "predicted_n": 3}


async def know_speed(node: NodeProcess, baseline: Baseline) -> None:
    """Let a node that is not started yet find what an earlier run measured."""
    folder = node.folder / node.name
    folder.mkdir()
    models = load_config(node.write_config(), node.env).config.models
    speeds = Speeds()
    perf = PerfFile(folder, speeds, wall_s=time.time)
    await perf.configured(models)
    for model in models:
        speeds.restore(model.name, baseline)
    await perf.save(now=True)


@pytest.fixture
async def mesh(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    """Nodes a and b with one slot of m each, known to read 1,000 tokens in 1.5 s; a keeps a trace."""
    model = fake_model(tmp_path, "m", 1)
    nodes: list[NodeProcess] = []
    for number, name in enumerate("ab", 1):
        trace = f"trace: {tmp_path / 'trace'}" if name == "a" else ""
        extra = f"routing: {{{trace}}}\nkv_share: {{enabled: false}}"
        seeds = (nodes[0].seed,) if nodes else ()
        nodes.append(NodeProcess(name, f"127.0.14.{number}", tmp_path, model, seeds, extra))
    try:
        for node in nodes:
            await know_speed(node, Baseline(100.0, 1500.0))
            node.start()
        for node in nodes:
            await node.until_healthy(http)
        for node in nodes:
            await node.until_sees(http, "m", 2)
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.end()


async def post(
    http: aiohttp.ClientSession, node: NodeProcess, body: dict[str, Any], session: str = "", query: str = ""
) -> aiohttp.ClientResponse:
    headers = {"X-Session-Id": session} if session else {}
    response = await http.post(f"{node.api}/v1/chat/completions{query}", json=body, headers=headers)
    await response.read()
    return response


async def why(
    http: aiohttp.ClientSession, node: NodeProcess, response: aiohttp.ClientResponse
) -> dict[str, Any]:
    body: dict[str, Any] = await node.get(http, f"/v1/why/{response.headers['X-Viiwork-Request']}")
    return body


async def hosts_free(http: aiohttp.ClientSession, node: NodeProcess, **free: int) -> None:
    """Wait until the node sees so many free slots on each host."""
    async with asyncio.timeout(60):
        while True:
            fleet = await node.get(http, "/v1/fleet/capacity?model=m")
            if {host["node"]: host.get("free") for host in fleet["models"][0]["hosts"]} == free:
                return
            await asyncio.sleep(0.05)


async def at_home_on_b(
    http: aiohttp.ClientSession, mesh: tuple[NodeProcess, NodeProcess]
) -> list[dict[str, Any]]:
    """A session's first turn, which leaves 10,000 tokens on b; its messages so far."""
    a, _ = mesh
    first = question(TEXT, stream=True, told=TOLD)
    response = await post(http, a, first, "s", "?host=b")
    assert response.headers["X-Viiwork-Node"] == "b"
    return [*first["messages"], {"role": "assistant", "content": "tok tok tok "}]


def next_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """It is told to have found its prompt where it ran."""
    told = {"cache_n": 10_000, "prompt_n": 20, "predicted_n": 3}
    return {
        "model": "m",
        "stream": True,
        "told": told,
        "messages": [*messages, {"role": "user", "content": "and now?"}],
    }


async def test_wishes_are_granted_and_receipts_tell_why(mesh, http: aiohttp.ClientSession):
    a, b = mesh
    pinned = await post(http, a, question("x"), query="?host=b")
    assert pinned.headers["X-Viiwork-Node"] == "b"
    told = await why(http, a, pinned)
    assert (
        told["state"] == "ended"
        and told["decisions"][-1] | {"took": "b", "rule": "pinned", "status": 200} == (told["decisions"][-1])
    )
    assert {c["node"]: c["why"] for c in told["decisions"][0]["candidates"]} == {
        "a": "another host is pinned",
        "b": "taken",
    }
    assert (await why(http, b, pinned))["forwarded_by"] == "a"
    preferred = await post(http, a, question("x"), query="?prefer=nobody,b")
    assert (await why(http, a, preferred))["decisions"][0]["rule"] == "preferred"
    nobody = await post(http, a, question("x"), query="?host=nobody")
    error = (await nobody.json())["error"]
    assert nobody.status == 404 and "'nobody'" in error["message"] and "'m'" in error["message"]
    assert (await post(http, a, question("x"), query="?host=a/b")).status == 400


async def test_what_was_measured_before_a_restart_is_published_and_priced(mesh, http: aiohttp.ClientSession):
    a, b = mesh
    for node in mesh:
        (model,) = (await node.status(http))["models"]
        assert model["perf"] == {"overhead_ms": 100.0, "prefill_ms_per_1k": 1500.0, "samples": 0}
    assert (await b.get(http, "/v1/capacity"))["models"][0]["prefill_ms_per_1k"] == 1500.0
    answer = await post(http, a, question(TEXT))
    decision = (await why(http, a, answer))["decisions"][0]
    assert decision["prompt_tokens_estimated"] == pytest.approx(10_000, rel=0.01)
    assert decision["predicted_ttft_ms"] == pytest.approx(15_100, rel=0.02)


async def test_a_turn_waits_in_the_queue_of_the_peer_that_holds_its_prompt(mesh, http: aiohttp.ClientSession):
    a, b = mesh
    messages = await at_home_on_b(http, mesh)
    holder = asyncio.create_task(post(http, b, question("holds b", hold_s=4), query="?host=b"))
    await hosts_free(http, a, a=1, b=0)
    answer = await post(http, a, next_turn(messages), "s")
    assert answer.headers["X-Viiwork-Node"] == "b" and int(answer.headers["X-Viiwork-Queued-Ms"]) > 0
    (decision,) = (await why(http, a, answer))["decisions"]
    assert decision["rule"] == "hold" and decision["held_out_for"] == decision["took"] == "b"
    assert (
        10_000 < decision["hold_ms"] <= 20_000
    )  # what reading it anew would cost, within the queue's budget
    assert decision["queued_ms"] >= int(answer.headers["X-Viiwork-Queued-Ms"]) - 1
    assert decision["cache_expected_tokens"] >= 9_000 and decision["cache_got_tokens"] == 10_000
    assert (await why(http, b, answer))["decisions"][-1]["queued_ms"] > 0
    assert (await holder).status == 200
    for node in mesh:
        await node.until_idle(http)


async def test_a_client_that_leaves_while_its_turn_waits_at_a_peer_is_gone_there_too(
    mesh, http: aiohttp.ClientSession
):
    a, b = mesh
    messages = await at_home_on_b(http, mesh)
    holder = asyncio.create_task(post(http, b, question("holds b", hold_s=60), query="?host=b"))
    await hosts_free(http, a, a=1, b=0)
    turn = asyncio.create_task(post(http, a, next_turn(messages), "s"))
    await b.until(http, "letting it wait", lambda s: s["models"][0]["queued"] == 1)
    assert (await a.status(http))["models"][0]["queued"] == 0  # it counts at one node
    turn.cancel()
    await asyncio.wait((turn,))
    await b.until(http, "rid of it", lambda s: s["models"][0]["queued"] == 0)
    holder.cancel()
    await asyncio.wait((holder,))
    for node in mesh:
        await node.until_idle(http)


async def test_a_turn_that_waited_in_vain_at_its_home_runs_on_the_colder_node(
    tmp_path: Path, mesh, http: aiohttp.ClientSession
):
    a, b = mesh
    messages = await at_home_on_b(http, mesh)
    holder = asyncio.create_task(post(http, b, question("holds b", hold_s=60), query="?host=b"))
    await hosts_free(http, a, a=1, b=0)
    short = next_turn([{"role": "user", "content": "short"}])  # another conversation: nothing to wait for
    assert (await post(http, a, short)).headers["X-Viiwork-Node"] == "a"
    turn = asyncio.create_task(post(http, a, next_turn(messages), "s"))
    await b.until(http, "letting it wait", lambda s: s["models"][0]["queued"] == 1)
    answer = await asyncio.wait_for(turn, 60)
    assert answer.status == 200 and answer.headers["X-Viiwork-Node"] == "a"
    told = (await why(http, a, answer))["decisions"]
    assert told[0]["rule"] == "hold" and told[0]["status"] == 429 and told[-1]["took"] == "a"
    holder.cancel()
    await asyncio.wait((holder,))


async def test_a_trace_of_real_decisions_is_replayed_to_the_same_choices(
    tmp_path: Path, mesh, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
):
    a, _ = mesh
    messages = await at_home_on_b(http, mesh)
    await post(http, a, next_turn(messages), "s")
    for n in range(5):
        await post(http, a, question(f"question {n}", stream=True, told=TOLD), f"session {n}")
    for node in mesh:
        await node.until_idle(http)
    assert a.end() == 0  # writes what is on record
    trace = tmp_path / "trace"
    assert main(["replay", str(trace), "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["decisions"] == 7 and same["elsewhere"] == 0 and same["old"] == same["new"]
    assert main(["replay", str(trace), "--set", "performance=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["elsewhere"] >= 1  # the warm turn would stay at a


async def test_requests_at_a_node_that_stands_still_run_elsewhere_and_others_do_not_notice(
    mesh, http: aiohttp.ClientSession
):
    a, b = mesh
    b.kill(signal.SIGSTOP)
    try:
        stuck = asyncio.create_task(post(http, a, question("x"), query="?prefer=b"))
        others = [await post(http, a, question(f"{n}")) for n in range(10)]
        assert {o.headers["X-Viiwork-Node"] for o in others} == {"a"}
        answer = await asyncio.wait_for(stuck, 90)
        assert answer.status == 200 and answer.headers["X-Viiwork-Node"] == "a"
    finally:
        with contextlib.suppress(ProcessLookupError):
            b.kill(signal.SIGCONT)
