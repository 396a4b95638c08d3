from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.client.policy import (
    Host,
    View,
    after,
    base_url,
    first_view,
    hosts_in,
    question,
)
from viiwork.limits import FLEET_BODY_MAX_BYTES, FLEET_HOSTS_MAX, FLEET_POLL_S, FLEET_SLOTS_MAX

URL = "http://10.0.0.1:8086"
FAILURES = (
    "unreachable",
    "server_error",
    "not_found",
    "refused",
    "bad_answer",
    "model_absent",
    "all_stale",
)


def answer(*models: Any, **more: Any) -> bytes:
    return json.dumps({"view": "a", "stale_after_s": 3, "models": models, **more}).encode()


def model(name: str, *hosts: Any) -> dict[str, Any]:
    return {"name": name, "slots": 99, "busy": 0, "free": 0, "queued": 0, "hosts": hosts}


OWN = {"node": "a", "slots": 2, "busy": 1, "free": 1, "ctx": 8192, "age_ms": 0}
PEER = {"node": "b", "api": "10.0.0.2:8086", "slots": 4, "busy": 0, "free": 4, "age_ms": 400}
STALE = {"node": "c", "api": "10.0.0.3:8086", "age_ms": 9000, "stale": True}


def step(view: View, *hosts: Host, configured: int = 2) -> View:
    return after(view, hosts, configured=configured, url=URL)


def view(slots: int, urls: dict[str, int] | None = None) -> View:
    return View(slots, "fleet", urls or {})


class TestReading:
    def test_the_hosts_of_the_model_are_read_and_other_models_left_alone(self):
        body = answer(model("gemma", PEER), model("qwen", OWN, PEER, STALE))
        assert hosts_in(200, body, "qwen") == (
            Host("", 2),
            Host("10.0.0.2:8086", 4),
            Host("10.0.0.3:8086", None),
        )

    def test_an_alias_is_answered_with_the_model_it_stands_for(self):
        body = answer(model("qwen", OWN), resolved_from="fast")
        assert hosts_in(200, body, "fast") == (Host("", 2),)
        assert hosts_in(200, body, "other") == "model_absent"

    @pytest.mark.parametrize(
        ("status", "body", "failure"),
        [
            (404, b"", "not_found"),
            (500, b"", "server_error"),
            (503, answer(model("qwen", OWN)), "server_error"),
            (301, b"", "refused"),
            (401, b"", "refused"),
            (200, b"", "bad_answer"),
            (200, b"<html>", "bad_answer"),
            (200, b'{"models":null}', "bad_answer"),
            (200, b"[" * 100_000, "bad_answer"),
            (200, b"\xff", "bad_answer"),
            (200, answer(model("qwen", {"node": "a", "slots": -1})), "bad_answer"),
            (200, answer(model("qwen", {"node": "a", "slots": 1.5})), "bad_answer"),
            (200, answer(model("qwen", {"node": "a", "slots": FLEET_SLOTS_MAX + 1})), "bad_answer"),
            (200, answer(model("qwen", *[OWN] * (FLEET_HOSTS_MAX + 1))), "bad_answer"),
            (200, answer(model("qwen", OWN)) + b" " * FLEET_BODY_MAX_BYTES, "bad_answer"),
            (200, answer(), "model_absent"),
            (200, answer(model("gemma", OWN)), "model_absent"),
            (200, answer(model("qwen")), "model_absent"),
            (200, answer(model("qwen", STALE, STALE)), "all_stale"),
        ],
    )
    def test_an_answer_without_a_number_says_why(self, status, body, failure):
        assert hosts_in(status, body, "qwen") == failure

    @given(st.integers(100, 599), st.binary(max_size=200))
    def test_any_answer_is_read_or_refused(self, status, body):
        assert hosts_in(status, body, "qwen")


class TestDeciding:
    def test_until_it_was_asked_the_configured_number_counts(self):
        first = first_view(URL, 8)
        assert (first.slots, first.reason, first.urls) == (8, "not_asked", {URL: 8})
        with pytest.raises(ValueError, match="at least 1"):
            first_view(URL, 0)

    def test_it_is_due_at_once_and_then_every_five_minutes(self):
        assert first_view(URL, 8).is_due(0.0)
        asked = View(8, "fleet", {}, asked_at=100.0)
        assert not asked.is_due(100.0 + FLEET_POLL_S - 0.1) and asked.is_due(100.0 + FLEET_POLL_S)

    def test_room_is_the_sum_of_the_hosts_and_taken_at_once(self):
        now = step(first_view(URL, 2), Host("", 2), Host("10.0.0.2:8086", 40))
        assert (now.slots, now.reason) == (42, "fleet")
        assert now.urls == {URL: 2, "http://10.0.0.2:8086": 40}

    @pytest.mark.parametrize(
        ("before", "total", "slots", "reason"),
        [
            (40, 43, 40, "held"),
            (40, 37, 40, "held"),
            (40, 44, 44, "fleet"),
            (40, 36, 36, "fleet"),
            (8, 9, 9, "fleet"),  # under ten, one is not a small change
            (8, 7, 7, "fleet"),
            (40, 40, 40, "fleet"),
            (40, 12, 30, "shrinking"),
            (3, 2, 2, "fleet"),
        ],
    )
    def test_small_changes_are_not_followed_and_large_falls_in_steps(self, before, total, slots, reason):
        now = step(view(before), Host("", total))
        assert (now.slots, now.reason) == (slots, reason)

    def test_many_small_changes_add_up(self):
        now = view(40)
        for total in (41, 42, 43, 44):
            now = step(now, Host("", total))
        assert now.slots == 44

    def test_a_fall_ends_at_what_the_mesh_has(self):
        now, seen = view(40), []
        while now.slots != 12:
            now = step(now, Host("", 12))
            seen.append(now.slots)
        assert seen == [30, 23, 18, 14, 12] and now.reason == "fleet"

    def test_the_configured_number_is_the_floor(self):
        now = step(first_view(URL, 8), Host("", 2), configured=8)
        assert (now.slots, now.reason) == (8, "below_configured")
        now = step(first_view(URL, 8), Host("", 0), configured=8)
        assert (now.slots, now.reason, now.urls) == (8, "below_configured", {URL: 8})
        assert step(view(9), Host("", 2), configured=8).slots == 8
        assert step(view(40), Host("", 2), configured=8).reason == "shrinking"

    @pytest.mark.parametrize("failure", FAILURES)
    def test_without_a_number_it_falls_back_to_the_configured_one_in_steps(self, failure):
        urls = {URL: 30, "http://10.0.0.2:8086": 10}
        now, seen = view(40, urls), []
        for _ in range(8):
            now = after(now, failure, configured=8, url=URL)
            seen.append(now.slots)
            assert now.reason == failure and now.urls == urls
        assert seen == [30, 23, 18, 14, 11, 9, 8, 8]
        assert after(first_view(URL, 8), failure, configured=8, url=URL).slots == 8

    def test_a_stale_host_keeps_the_slots_it_last_had(self):
        now = step(first_view(URL, 2), Host("", 2), Host("10.0.0.2:8086", 40))
        now = step(now, Host("", 2), Host("10.0.0.2:8086", None))
        assert (now.slots, now.urls["http://10.0.0.2:8086"]) == (42, 40)
        now = step(now, Host("", 2), Host("10.0.0.2:8086", None), Host("10.0.0.3:8086", None))
        assert (now.slots, "http://10.0.0.3:8086" in now.urls) == (42, False)

    def test_an_address_that_is_none_is_counted_but_nothing_is_sent_there(self):
        bad = ("evil.example/x?y:80", "user@10.0.0.9:80", "a b:1", "10.0.0.9", "[fd00::1]:8086\r\nX: y:1")
        now = step(first_view(URL, 2), Host("[fd00::2]:8086", 4), *(Host(api, 1) for api in bad))
        assert now.slots == 4 + len(bad) and now.urls == {"http://[fd00::2]:8086": 4}

    @given(
        st.integers(1, 50),
        st.lists(
            st.sampled_from(FAILURES) | st.lists(st.none() | st.integers(0, 100), max_size=4), max_size=20
        ),
    )
    def test_it_is_never_below_the_floor_nor_above_what_was_heard(self, configured, questions):
        now, most = first_view(URL, configured), configured
        for heard in questions:
            if isinstance(heard, str):
                now = after(now, heard, configured=configured, url=URL)
            else:
                hosts = [Host(f"10.0.0.{i}:1", slots) for i, slots in enumerate(heard)]
                known = sum(now.urls.get(f"http://{h.api}", 0) if h.slots is None else h.slots for h in hosts)
                most = max(most, known)
                now = step(now, *hosts, configured=configured)
            assert configured <= now.slots <= most
            assert now.urls and all(slots > 0 for slots in now.urls.values())


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "base"),
        [
            ("http://10.0.0.1:8086", "http://10.0.0.1:8086"),
            ("http://10.0.0.1:8086/", "http://10.0.0.1:8086"),
            ("https://mesh.example/viiwork/", "https://mesh.example/viiwork"),
            ("http://[fd00::1]:8086", "http://[fd00::1]:8086"),
        ],
    )
    def test_a_nodes_url_is_taken_as_it_is(self, url, base):
        assert base_url(url) == base

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "10.0.0.1:8086",
            "ftp://x",
            "http://",
            "http://x:0",
            "http://x:99999",
            "http://[x",
            "http://x/?a=1",
        ],
    )
    def test_what_is_no_url_is_refused_with_an_example(self, url):
        with pytest.raises(ValueError, match="such as http://192"):
            base_url(url)

    def test_the_base_url_of_an_openai_client_is_told_apart(self):
        with pytest.raises(ValueError, match="without /v1"):
            base_url("http://10.0.0.1:8086/v1/")

    def test_any_name_can_be_asked_for(self):
        assert question("a/b c&d=é") == "/v1/fleet/capacity?model=a%2Fb%20c%26d%3D%C3%A9"
