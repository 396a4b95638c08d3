"""What two real nodes tell while requests run: activity, the mesh, figures and log lines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .nodes import NodeProcess
from .test_fleet import fake_model, question

PATIENCE_S = 60.0


@pytest.fixture
async def two(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    """Entry node a without models, and b that serves them."""
    b = NodeProcess("b", "127.0.14.2", tmp_path, fake_model(tmp_path, "m", 2))
    a = NodeProcess("a", "127.0.14.1", tmp_path, "", (b.seed,))
    nodes = (a, b)
    for node in nodes:
        node.start()
    try:
        for node in nodes:
            await node.until_healthy(http)
            await node.until_sees(http, "m", 1)
        yield nodes
    finally:
        for node in nodes:
            node.end()


async def ask(http: aiohttp.ClientSession, node: NodeProcess, body: dict[str, Any]) -> tuple[int, str]:
    async with http.post(f"{node.api}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status, answer.headers["X-Viiwork-Request"]


class Stream:
    """Reads the mesh stream until something was shown."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.shown: list[tuple[str, Any]] = []

    async def until(self, true) -> None:
        rest = b""
        async with asyncio.timeout(PATIENCE_S):
            while not true(self.shown):
                chunk = await self._answer.content.readany()
                assert chunk, "the stream ended"
                *blocks, rest = (rest + chunk).split(b"\n\n")
                for block in blocks:
                    if block.startswith(b"event: "):
                        name, _, data = block.partition(b"\ndata: ")
                        self.shown.append((name[7:].decode(), json.loads(data)))

    def requests(self, rid: str) -> list[tuple[str, str]]:
        return [
            (e["hostname"], e["message"]) for n, e in self.shown if n == "activity" and e.get("rid") == rid
        ]


async def figures(http: aiohttp.ClientSession, node: NodeProcess) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their sorted labels, as a real parser reads them."""
    async with http.get(f"{node.api}/metrics") as answer:
        assert answer.status == 200 and answer.content_type == "text/plain"
        text = await answer.text()
    families = list(text_string_to_metric_families(text))
    assert all(family.name.startswith("viiwork_") and family.documentation for family in families)
    assert len({family.name for family in families}) == len(families), "no family stands there twice"
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


async def test_a_forwarded_request_is_seen_counted_and_logged_on_both_nodes(
    two: tuple[NodeProcess, NodeProcess], http: aiohttp.ClientSession
):
    a, b = two
    async with http.get(f"{a.api}/v1/mesh/stream") as answer:
        stream = Stream(answer)
        await stream.until(
            lambda shown: any(
                n == "cluster" and all(m["status"] for m in c["members"]) and len(c["members"]) == 2
                for n, c in shown
            )
        )
        status, rid = await ask(http, a, question("hi", stream=True, max_tokens=2))
        assert status == 200
        await stream.until(lambda shown: len(stream.requests(rid)) == 4)
    told = sorted(stream.requests(rid))
    assert [host for host, _ in told] == ["a", "a", "b", "b"]
    assert told[0][1] == "m \N{RIGHTWARDS ARROW} peer b"
    assert re.fullmatch("m \N{RIGHTWARDS ARROW} peer b done \\(.+\\)", told[1][1])
    assert told[2][1] == "m \N{RIGHTWARDS ARROW} m/0"

    events = (await b.get(http, "/v1/activity"))["events"]
    assert any(e["type"] == "backend" and "m/0 healthy" in e["message"] for e in events)
    assert any(e["type"] == "system" and e["message"].startswith("a joined") for e in events)

    cluster = await a.get(http, "/v1/cluster")
    assert [(m["node"], m["status"]["node"]) for m in cluster["members"]] == [("a", "a"), ("b", "b")]
    assert (cluster["view"], cluster["mesh"], cluster["models"]) == ("a", "open", ["m"])

    entry, executor = await figures(http, a), await figures(http, b)
    assert entry["viiwork_requests_total", "m", "done", "forward"] == 1
    assert executor["viiwork_requests_total", "m", "done", "local"] == 1
    assert entry["viiwork_ttft_seconds_count", "m", "forward"] == 1
    assert executor["viiwork_ttft_seconds_bucket", "+Inf", "m", "local"] == 1
    assert executor["viiwork_model_slots", "m"] == 2
    assert executor["viiwork_backend_state", "m/0", "healthy"] == 1
    assert entry["viiwork_mesh_members", "alive"] == 1 and ("viiwork_peer_rtt_seconds", "b") in entry
    assert executor["viiwork_kv_share_active",] == 1
    assert executor["viiwork_kv_share_worker_up",] == 1
    assert entry["viiwork_sessions_turns_total",] == 1 and entry["viiwork_dispatch_forwards",] == 0
    for wrong in ("at_unix_s", "pid", "uptime_s_total"):
        assert not [name for name, *_ in executor if name.endswith(wrong)]

    for node, where in ((a, "node=b "), (b, "backend=m/0 ")):
        (line,) = [line for line in node.log.splitlines() if "request.done" in line]
        assert f"request={rid}" in line and where in line and "status=200" in line and "ttft_ms=" in line


async def test_a_refused_request_is_counted_by_its_code_and_its_log_line_cannot_be_forged(
    two: tuple[NodeProcess, NodeProcess], http: aiohttp.ClientSession
):
    a, _ = two
    status, rid = await ask(http, a, question("hi", model='x" status=200\nrequest.done \x1b[2J'))
    assert status == 404
    assert (await figures(http, a))["viiwork_requests_refused_total", "unknown_model"] == 1
    (line,) = [line for line in a.log.splitlines() if rid in line]
    assert "request.refused" in line and "code=unknown_model" in line and "\x1b" not in line
    assert not [line for line in a.log.splitlines() if line.startswith("request.done")]


async def test_a_node_that_stops_ends_its_streams_whole(
    two: tuple[NodeProcess, NodeProcess], http: aiohttp.ClientSession
):
    a, _ = two
    async with (
        http.get(f"{a.api}/v1/mesh/stream") as mesh,
        http.get(f"{a.api}/v1/activity/stream") as activity,
    ):
        a.kill(15)
        async with asyncio.timeout(PATIENCE_S):
            await mesh.content.read()
            await activity.content.read()
    assert a.end() == 0 and "Traceback" not in a.log
