"""Which pages a node lets in, by its config and by what tailscaled says."""

from __future__ import annotations

import asyncio

import pytest

from viiwork.config.load import parse_config
from viiwork.node import web_pages
from viiwork.node.web_pages import WebPages

SECRET = {"VIIWORK_MESH_SECRET": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}
MINE, OTHERS, LOCAL = "https://box.tail1.ts.net", "https://box.tail2.ts.net", "http://localhost:3000"


class Tailscaled:
    """Gives one answer after the other, and says when all were taken."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.empty = asyncio.Event()

    async def suffix(self, socket: str) -> str | None:
        self.asked.append(socket)
        if not self.answers:
            self.empty.set()
            await asyncio.Event().wait()
        return self.answers.pop(0)


async def followed(text: str, *answers: str | None) -> tuple[WebPages, Tailscaled]:
    """The pages after tailscaled gave all its answers."""
    daemon = Tailscaled(*answers)
    pages = WebPages(parse_config(text.encode(), "x.yaml", SECRET).config, daemon.suffix)
    task = asyncio.create_task(pages.follow_tailnet())
    waiting = asyncio.create_task(daemon.empty.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert task.done() or waiting.done()
    for ended in (task, waiting):
        ended.cancel()
    await asyncio.gather(task, waiting, return_exceptions=True)
    return pages, daemon


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web_pages, "TAILNET_NAME_ASK_S", 0.0)


async def test_pages_of_the_own_tailnet_are_let_in_once_its_name_is_known():
    pages, daemon = await followed("mesh: {tailnet: {socket: /run/ts.sock}}", None, "tail1.ts.net")
    assert pages.allows(MINE) and pages.allows(LOCAL) and not pages.allows(OTHERS)
    assert set(daemon.asked) == {"/run/ts.sock"}


async def test_another_login_lets_the_new_tailnet_in_and_the_old_one_no_longer():
    pages, _ = await followed("node: {name: a}", "tail2.ts.net", "tail1.ts.net", None)
    assert pages.allows(MINE) and not pages.allows(OTHERS)


@pytest.mark.parametrize("answers", [(None,), ("ts.net",), ("\x00",), ("tail1.ts.net.evil/",)])
async def test_a_name_that_is_not_known_or_no_name_lets_nobody_more_in(answers):
    pages, _ = await followed("node: {name: a}", *answers)
    assert pages.allows(LOCAL) and not pages.allows(MINE)


@pytest.mark.parametrize(
    "text",
    [
        "mesh: {network: lan}",
        "mesh: {tailnet: {enabled: off}}",
        "api: {cors: {allow_origins: []}}",
        "api: {cors: {allow_origins: [chat.example.org]}}",
    ],
)
async def test_tailscaled_is_not_asked_where_its_name_would_not_count(text):
    pages, daemon = await followed(text, "tail1.ts.net")
    assert not daemon.asked and not pages.allows(MINE)
    assert pages.allows(LOCAL) is ("cors" not in text)


async def test_a_node_in_a_lan_that_is_told_to_use_tailscale_asks_too():
    pages, _ = await followed("mesh: {network: lan, tailnet: {enabled: on}}", "tail1.ts.net")
    assert pages.allows(MINE)


async def test_tailnet_addresses_count_unless_switched_off():
    pages, _ = await followed("node: {name: a}", "tail1.ts.net")
    assert pages.allows("http://100.64.0.9:8086")
    pages, _ = await followed("api: {cors: {allow_tailnet_ips: false}}", "tail1.ts.net")
    assert pages.allows(MINE) and not pages.allows("http://100.64.0.9:8086")
