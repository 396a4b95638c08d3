"""Every endpoint of a running node, asked in every way: an answer a client can read, and nothing kept."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, note
from hypothesis import strategies as st

from viiwork.api.routes import AnyRoute

from .client import ask, judge, say
from .conftest import Running, fuzzed
from .requests import METHODS, requests

API_DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_endpoint_answers_whatever_is_asked(running: Running):
    routes = running.routes
    assert len(routes) > 15
    before = running.size()
    for route in routes:
        fuzz(running, route)
    running.assert_clean(before)


def test_every_endpoint_is_documented_with_its_methods(running: Running):
    documented = set()
    for line in API_DOCS.read_text().splitlines():
        if line.startswith("| `/"):
            paths, methods = line.split("|")[1:3]
            documented |= {(p, m.strip()) for p in re.findall("`([^`]+)`", paths) for m in methods.split(",")}
    served = {(route.path, m) for route in running.routes for m in route.methods if m != "HEAD"}
    assert documented == served


def fuzz(running: Running, route: AnyRoute) -> None:
    @fuzzed(30, route.path)
    @given(requests(route.path, route.methods, running.address[1]))
    def asked(request):
        answer = ask(running.address, request.raw(), request.method)
        note(f"answered {answer.status}: {answer.body[:300]!r}")
        path = request.target.partition("?")[0]
        judge(path, request.method, answer)

    asked()


def test_paths_nobody_made_are_404(running: Running):
    @fuzzed(50, "nowhere")
    @given(st.text(max_size=30).map(lambda text: "/" + text), st.sampled_from(METHODS))
    def asked(path, method):
        raw = f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode("utf-8", "surrogatepass")
        for answer in say(running.address, raw):
            judge(path, method, answer)

    asked()
    running.assert_clean(running.size())
