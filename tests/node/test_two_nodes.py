"""Two real nodes with the real engine, asked as clients ask."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from typing import Any

import aiohttp
import openai
import pytest

from .nodes import NodeProcess

pytestmark = pytest.mark.engine

Pair = tuple[NodeProcess, NodeProcess]
WORDS = ["anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbour", "island", "jacket"]


def client(node: NodeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.api}/v1", api_key="none", max_retries=0)


def opening(n_words: int = 180) -> list[dict[str, str]]:
    """A first message of more than `kv_share.min_tokens` tokens that no engine has seen."""
    rng = random.Random(uuid.uuid4().int)
    text = " ".join(rng.choice(WORDS) for _ in range(n_words))
    return [{"role": "user", "content": f"{rng.randrange(10**9)} {text}. What is the third word?"}]


async def chat(
    http: aiohttp.ClientSession,
    node: NodeProcess,
    messages: list[dict[str, str]],
    session: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Runs at the node asked while it has room: these tests say themselves when a session moves."""
    headers = {"X-Viiwork-Prefer": node.name} | ({"X-Session-Id": session} if session else {})
    headers |= more.pop("headers", {})
    body = {"model": "small", "messages": messages, "max_tokens": 12, "temperature": 0, "seed": 1} | more
    async with http.post(f"{node.api}/v1/chat/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer | {"node": response.headers["X-Viiwork-Node"]}


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def said(answer: dict[str, Any]) -> dict[str, str]:
    return {"role": "assistant", "content": text_of(answer)}


async def until_received(http: aiohttp.ClientSession, node: NodeProcess, before: int) -> None:
    """The node holds a state more than before."""
    await node.until(http, "given the state", lambda s: s["kv_share"]["received"]["done"] > before, 20)


async def until_pushed(http: aiohttp.ClientSession, *nodes: NodeProcess) -> None:
    """No state of earlier turns is on its way any more."""
    for node in nodes:
        await node.until(http, "done pushing", lambda s: s["kv_share"]["pushing"] == 0, 20)


def reused_share(answer: dict[str, Any]) -> float:
    timings = answer["timings"]
    return timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"])


@pytest.mark.parametrize("entry", [0, 1], ids=["entered at A", "entered at B"])
def test_the_openai_client_chats_streams_and_sends_tools_unchanged(pair: Pair, entry: int):
    api = client(pair[entry])
    assert {"small", "only-b"} <= {model.id for model in api.models.list()}
    question = [{"role": "user", "content": "Say yes."}]
    for model in ("small", "only-b"):
        answer = api.chat.completions.create(model=model, messages=question, max_tokens=6)
        assert answer.choices[0].message.content
        assert answer.usage is not None and answer.usage.completion_tokens <= 6
        chunks = list(api.chat.completions.create(model=model, messages=question, max_tokens=6, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with_tools = api.chat.completions.create(model="small", messages=question, max_tokens=6, tools=[tool])
    assert with_tools.choices[0].finish_reason
    assert api.completions.create(model="only-b", prompt="Once", max_tokens=3).choices[0].text


@pytest.mark.parametrize("entry", [0, 1], ids=["entered at A", "entered at B"])
def test_the_engines_own_errors_reach_the_openai_client_as_they_are(pair: Pair, entry: int):
    api = client(pair[entry])
    with pytest.raises(openai.InternalServerError, match="does not support embeddings") as caught:
        api.embeddings.create(model="only-b", input="hi")
    assert caught.value.status_code == 501
    with pytest.raises(openai.NotFoundError, match="'nobody'"):
        api.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="exceed"):
        api.chat.completions.create(
            model="only-b", messages=[{"role": "user", "content": "long " * 900}], stream=True, max_tokens=1
        )


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}, "stop_reason"),
        (
            "/v1/messages/count_tokens?beta=true",
            {"messages": [{"role": "user", "content": "hi"}]},
            "input_tokens",
        ),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, "output"),
        ("/tokenize", {"content": "hello there"}, "tokens"),
        ("/detokenize", {"tokens": [6004]}, "content"),
        ("/apply-template", {"messages": [{"role": "user", "content": "hi"}]}, "prompt"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "error"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "error"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "error"),
    ],
)
async def test_every_dialect_reaches_the_engine_directly_and_through_a_forward(
    pair: Pair, http: aiohttp.ClientSession, path: str, body: dict[str, Any], found: str
):
    answers = []
    for node in pair:
        async with http.post(node.api + path, json=body | {"model": "only-b"}) as response:
            answers.append((response.status, response.headers["X-Viiwork-Node"], await response.json()))
    (status_a, ran_a, answer_a), (status_b, ran_b, answer_b) = answers
    assert ran_a == ran_b == "b"
    assert found in answer_a and found in answer_b
    assert status_a == status_b == (501 if found == "error" else 200)
    if path in ("/tokenize", "/detokenize", "/apply-template"):
        assert answer_a == answer_b


async def test_a_forward_names_its_entry_node_and_a_local_request_does_not(
    pair: Pair, http: aiohttp.ClientSession
):
    body = {"model": "only-b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with http.post(pair[0].api + "/v1/chat/completions", json=body) as response:
        assert response.headers["X-Viiwork-Node"] == "b" and response.headers["X-Viiwork-Origin"] == "a"
        assert response.headers["X-Viiwork-Model"] == "only-b" and response.headers["X-Viiwork-Request"]
    async with http.post(pair[1].api + "/v1/chat/completions", json=body) as response:
        assert response.headers["X-Viiwork-Node"] == "b" and "X-Viiwork-Origin" not in response.headers


async def test_a_session_stays_on_its_slot_and_finds_its_prompt_there(
    pair: Pair, http: aiohttp.ClientSession
):
    a, _ = pair
    messages, session = opening(), uuid.uuid4().hex
    first = await chat(http, a, messages, session)
    for _ in range(2):  # others may use the other slot meanwhile
        await chat(http, a, [{"role": "user", "content": "unrelated"}])
    messages += [said(first), {"role": "user", "content": "And the fourth?"}]
    second = await chat(http, a, messages, session)
    assert second["node"] == "a" and reused_share(second) > 0.9


async def test_a_warm_turn_gives_the_tokens_of_the_turn_run_at_home(pair: Pair, http: aiohttp.ClientSession):
    a, b = pair
    await until_pushed(http, a, b)
    before = (await b.status(http))["kv_share"]
    messages, session = opening(400), uuid.uuid4().hex
    first = await chat(http, a, messages, session)
    assert first["node"] == "a"
    await until_received(http, b, before["received"]["done"])
    messages += [said(first), {"role": "user", "content": "And the last?"}]
    at_home = await chat(http, a, messages, session, headers={"X-Viiwork-Kv-Share": "off"})
    warm = await chat(http, b, messages, session)
    assert (at_home["node"], warm["node"]) == ("a", "b")
    assert reused_share(warm) >= 0.95
    assert text_of(warm) == text_of(at_home)
    after = (await b.status(http))["kv_share"]
    assert after["imports"]["done"] == before["imports"]["done"] + 1
    assert after["moves"]["warm"] == before["moves"]["warm"] + 1
    assert after["moves"]["cold"] == before["moves"]["cold"]


async def test_a_session_that_comes_back_finds_what_it_said_elsewhere(
    pair: Pair, http: aiohttp.ClientSession
):
    a, b = pair
    messages, session = opening(), uuid.uuid4().hex
    for node, other in ((a, b), (b, a), (a, b)):
        await until_pushed(http, a, b)
        before = (await other.status(http))["kv_share"]["received"]["done"]
        answer = await chat(http, node, messages, session)
        assert answer["node"] == node.name
        if len(messages) > 1:
            assert reused_share(answer) >= 0.9
        messages += [said(answer), {"role": "user", "content": "Go on."}]
        await until_received(http, other, before)


async def test_a_session_that_must_not_be_shared_stays_where_it_is(pair: Pair, http: aiohttp.ClientSession):
    a, b = pair
    await until_pushed(http, a, b)
    before = (await b.status(http))["kv_share"]["received"]["done"]
    await chat(http, a, opening(), uuid.uuid4().hex, headers={"X-Viiwork-Kv-Share": "off"})
    shared = uuid.uuid4().hex
    await chat(http, a, opening(), shared)
    await until_received(http, b, before)
    assert (await b.status(http))["kv_share"]["received"]["done"] == before + 1


async def test_streams_through_both_nodes_carry_their_timings_and_end_with_done(
    pair: Pair, http: aiohttp.ClientSession
):
    body = {
        "model": "only-b",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "stream": True,
    }
    for node in pair:
        async with http.post(f"{node.api}/v1/chat/completions", json=body) as response:
            events = [e for e in (await response.read()).split(b"\n\n") if e]
        assert events[-1] == b"data: [DONE]"
        assert "timings" in json.loads(events[-2].removeprefix(b"data: "))


async def test_what_both_nodes_report_adds_up(pair: Pair, http: aiohttp.ClientSession):
    for node in pair:
        await node.until_idle(http)
    for node in pair:
        async with asyncio.timeout(10):  # each node polls the other once a second
            while True:
                fleet = await node.get(http, "/v1/fleet/capacity")
                small = next(m for m in fleet["models"] if m["name"] == "small")
                if (small["slots"], small["busy"], small["free"], small["ctx"]) == (4, 0, 4, 1024):
                    break
                await asyncio.sleep(0.1)
        assert [host["node"] for host in small["hosts"]] == ["a", "b"]
        assert await node.get(http, "/v1/fleet/capacity?model=nobody") == fleet | {"models": []}
        health = await node.get(http, "/health")
        assert health["status"] == "ok" and health["node"] == node.name


async def test_requests_beyond_all_slots_wait_their_turn_and_all_are_answered(
    pair: Pair, http: aiohttp.ClientSession
):
    questions = [chat(http, pair[n % 2], [{"role": "user", "content": f"count {n}"}]) for n in range(9)]
    answers = await asyncio.gather(*questions)
    assert {answer["node"] for answer in answers} == {"a", "b"}
    for node in pair:
        await node.until_idle(http)
