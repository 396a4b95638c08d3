"""Servers that somebody else runs, as the supervisor sees them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.engine import Conn, FakeEngine, Seen
from viiwork.config.model import ModelSection
from viiwork.engine import supervisor
from viiwork.engine.backend import Pace
from viiwork.engine.external import base_url, running_requests

from .conftest import Watch


class Server:
    """What the fake answers: status and body by path."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.pages: dict[str, tuple[int, Any]] = {"/health": (200, ""), "/v1/models": models("m")}
        self.silent = False

    async def answer(self, conn: Conn, seen: Seen) -> None:
        while self.silent:
            await asyncio.sleep(0.01)
        status, body = self.pages.get(seen.target, (404, {"error": "not found"}))
        conn.answer(status, body.encode() if isinstance(body, str) else json.dumps(body).encode())

    def asked(self, path: str) -> int:
        return sum(seen.target == path for seen in self.engine.requests)

    def model(self, **keys: Any) -> ModelSection:
        return ModelSection(
            **{"name": "m", "engine": "external", "url": self.engine.url, "parallel": 3} | keys
        )


def models(*names: str, **more: Any) -> tuple[int, Any]:
    return 200, {"object": "list", "data": [{"id": name, "object": "model"} | more for name in names]}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(supervisor, "EXTERNAL_POLL_S", 0.05)
    monkeypatch.setattr(supervisor, "EXTERNAL_PROBE_S", 0.3)
    async with FakeEngine() as engine:
        found = Server(engine)
        engine.script = found.answer
        yield found


async def test_a_server_that_answers_is_routable_with_the_configured_slots(watch: Watch, server: Server):
    watched = await watch(server.model(context=4096))
    view = await watched.until_healthy()
    assert (view.id, view.url, view.n_slots, view.ctx) == ("m/0", server.engine.url, 3, 4096)
    assert view.pid is view.busy is view.save_dir is None


@pytest.mark.parametrize("status", [404, 405])
async def test_without_health_the_list_of_models_tells(watch: Watch, server: Server, status: int):
    server.pages["/health"] = (status, "")
    watched = await watch(server.model())
    await watched.until_healthy()
    asked = server.asked("/v1/models")
    await server.engine.until(lambda: server.asked("/v1/models") > asked + 2, 30)
    assert server.asked("/health") == 1, "asked once and not again"
    server.pages["/v1/models"] = (500, "")
    out = await watched.until(lambda view: view.status == "unhealthy")
    assert out.reason == "/v1/models answered 500"


async def test_a_health_path_of_ones_own_is_the_only_one_asked(watch: Watch, server: Server):
    server.pages["/ready"] = (404, "")
    watched = await watch(server.model(health="/ready"))
    await watched.until(lambda view: view.reason == "/ready answered 404")
    server.pages["/ready"] = (200, "")
    await watched.until_healthy()
    assert server.asked("/health") == 0


async def test_a_server_that_loads_for_long_serves_within_one_probe_of_being_ready(
    watch: Watch, server: Server
):
    server.pages["/health"] = (503, {"error": {"message": "Loading model"}})
    watched = await watch(server.model())
    await server.engine.until(lambda: server.asked("/health") > 10, 30)
    assert [view.status for view in watched.seen if view.status != "starting"] == []
    server.pages["/health"] = (200, "")
    await watched.until_healthy()


async def test_a_server_that_goes_silent_leaves_routing_and_comes_back(watch: Watch, server: Server):
    watched = await watch(server.model())
    await watched.until_healthy()
    server.silent = True
    out = await watched.until(lambda view: view.status == "unhealthy")
    assert out.reason == "/health: no answer within 0.3 s"
    told, server.silent = len(watched.seen), False
    await watched.until(lambda view: view.status == "healthy", told)


async def test_a_server_that_is_not_there_yet_is_waited_for(watch: Watch, server: Server):
    await server.engine.stop()
    watched = await watch(server.model())
    await watched.until(lambda view: view.status == "starting" and "/health: " in view.reason)
    await server.engine.start()
    await watched.until_healthy()


async def test_an_idle_server_is_asked_at_the_health_interval_only_but_at_once_after_a_hard_failure(
    watch: Watch, server: Server
):
    watched = await watch(server.model(), pace=Pace(probe_s=3600.0))
    await watched.until_healthy()
    server.pages["/health"] = (500, "")
    watched.supervisor.hard_failure("m/0", "reset")
    await watched.until(lambda view: view.status == "unhealthy")
    assert server.asked("/health") == 2


async def test_a_redirect_is_not_followed_and_no_health(watch: Watch, server: Server):
    async def elsewhere(conn: Conn, seen: Seen) -> None:
        conn.answer(302, b"", ["Location: http://127.0.0.1:1/health"])

    server.engine.script = elsewhere
    watched = await watch(server.model())
    await watched.until(lambda view: view.reason == "/health answered 302")


async def test_a_server_that_does_not_list_the_model_is_named_in_one_line(
    watch: Watch, server: Server, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    server.pages["/v1/models"] = models("other\x1b[31m", *(f"n{i}" for i in range(9)))
    watched = await watch(server.model())
    await watched.until_healthy()
    (line,) = [r.getMessage() for r in caplog.records if "model_not_listed" in r.getMessage()]
    assert line.startswith("backend.model_not_listed m: http://127.0.0.1:") and line.isprintable()
    assert line.endswith("lists other\\x1b[31m, n0, n1, n2, n3 and 5 more")


async def test_a_listed_model_is_no_news_whatever_its_name_there(
    watch: Watch, server: Server, caplog: pytest.LogCaptureFixture
):
    server.pages["/v1/models"] = models("x", "org/m:8b", max_model_len=8192)
    watched = await watch(server.model(model="org/m:8b"))
    view = await watched.until_healthy()
    assert view.ctx == 8192 and "model_not_listed" not in caplog.text


@pytest.mark.parametrize("page", [(200, "nonsense"), (200, {"data": []}), (404, {}), (200, {"data": "x"})])
async def test_a_server_that_lists_nothing_readable_serves_all_the_same(
    watch: Watch, server: Server, page: tuple[int, Any]
):
    server.pages["/v1/models"] = page
    watched = await watch(server.model())
    assert (await watched.until_healthy()).ctx == 0


async def test_vllms_own_count_is_known_as_long_as_it_is_told(watch: Watch, server: Server):
    server.pages["/metrics"] = (200, 'vllm:num_requests_running{engine="0"} 2.0\n')
    watched = await watch(server.model())
    await watched.until(lambda view: view.busy == 2)
    server.pages["/metrics"] = (200, "nothing_of_it 1\n")
    await watched.until(lambda view: view.busy is None, len(watched.seen))


async def test_the_key_goes_with_every_question_and_into_no_log(
    watch: Watch, server: Server, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    watched = await watch(server.model(api_key_env="A_KEY"))
    await watched.until_healthy()
    await server.engine.until(lambda: server.asked("/metrics") > 0, 30)
    assert {seen.values("Authorization")[0] for seen in server.engine.requests} == {"Bearer k3y"}
    found = watched.supervisor.external("m/0")
    assert found.api_key == "k3y" and "k3y" not in repr(found)
    assert "k3y" not in caplog.text and "k3y" not in repr(watched.supervisor.views())


async def test_a_removed_server_is_asked_no_more_and_goes_on(watch: Watch, server: Server):
    watched = await watch(server.model())
    await watched.until_healthy()
    watched.in_flight["m/0"] = 1
    watched.apply()
    await watched.until(lambda view: view.status == "draining")
    watched.in_flight.clear()
    await watched.until_gone("m/0")
    asked = len(server.engine.requests)
    await asyncio.sleep(0.2)
    assert len(server.engine.requests) == asked and watched.supervisor.views() == []


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("https://h/api/v1/", "https://h/api"),
    ],
)
def test_the_v1_of_an_address_belongs_to_the_path(url: str, base: str):
    assert base_url(url) == base


@pytest.mark.parametrize(
    ("metrics", "running"),
    [
        (b"", None),
        (b"# TYPE vllm:num_requests_running gauge\n", None),
        (b"vllm:num_requests_running 0\n", 0),
        (
            b'a 1\nvllm:num_requests_running{model_name="x"} 3.0\nvllm:num_requests_running{e="1"} 2\n',
            5,
        ),
        (b"vllm:num_requests_running nan\n", None),
        (b"vllm:num_requests_running 1e999\n", None),
        (b"vllm:num_requests_running e\n", None),
    ],
)
def test_running_requests_are_the_sum_of_the_gauge_and_unknown_without_it(
    metrics: bytes, running: int | None
):
    assert running_requests(metrics) == running
