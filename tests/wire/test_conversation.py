"""What a body says about its conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.core.turn import Chain
from viiwork.errors import RequestError
from viiwork.limits import CHAIN_LINKS_MAX, SESSION_FIELD_MAX_BYTES
from viiwork.wire.conversation import forwarded_session
from viiwork.wire.openai import SESSION_HEADERS, peek

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
relaxed = settings(deadline=None, max_examples=80)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def chain(path: str, **body: Any) -> Chain:
    found = chain_or_none(path, **body)
    assert found is not None
    return found


def chain_or_none(path: str, **body: Any) -> Chain | None:
    raw = json.dumps({"model": "m", **body}, separators=(",", ":"), ensure_ascii=False)
    return peek(path, {}, raw.encode()).chain


def key(headers: dict[str, str] | None = None, **body: Any) -> str | None:
    return peek(CHAT, headers or {}, json.dumps({"model": "m", **body}).encode()).session_key


# -- chains ----------------------------------------------------------------------------------------


def test_a_conversation_that_grew_has_its_old_links_still():
    first = [said("system", "be kind"), said("user", "hi")]
    later = [*first, said("assistant", "hello"), said("user", "how are you")]
    old, new = chain(CHAT, messages=first), chain(CHAT, messages=later)
    assert len(old.links) == 2 and len(new.links) == 4
    assert new.links[:2] == old.links and new.ends[:2] == old.ends
    assert list(new.ends) == sorted(new.ends)


def test_another_word_early_on_changes_every_later_link():
    one = chain(CHAT, messages=[said("user", "a"), said("assistant", "b"), said("user", "c")])
    other = chain(CHAT, messages=[said("user", "a"), said("assistant", "B"), said("user", "c")])
    assert one.links[:2] == other.links[:2] and not set(one.links[2:]) & set(other.links[2:])


@pytest.mark.parametrize(
    "other",
    [
        {"tools": [{"type": "function"}], "messages": [said("user", "a")]},
        {"messages": [said("system", "x"), said("user", "a")]},
        {"messages": [{"content": "x", "role": "developer"}, said("user", "a")]},
    ],
)
def test_tools_and_system_prompt_are_link_zero(other):
    plain, found = chain(CHAT, messages=[said("user", "a")]), chain(CHAT, **other)
    assert len(found.links) == len(plain.links) == 2 and plain.ends[0] == 0 < found.ends[0]
    assert found.links[0] != plain.links[0]


def test_the_apis_of_one_engine_each_have_their_place_for_the_same_things():
    claude = chain(MESSAGES, system="s", tools=[], messages=[said("user", "a"), said("assistant", "b")])
    assert len(claude.links) == 3
    items = chain(RESPONSES, instructions="s", input=[said("user", "a"), said("assistant", "b")])
    assert len(items.links) == 3
    text = chain(RESPONSES, instructions="s", input="a question")
    assert len(text.links) == 2 and text.links[0] == items.links[0]


def test_a_plain_prompt_is_chained_in_blocks_so_that_a_longer_one_continues_it():
    start = "".join(f"line {number}\n" for number in range(600))
    old, new = chain("/v1/completions", prompt=start), chain("/v1/completions", prompt=start + "more " * 900)
    assert len(old.links) < len(new.links) and new.links[: len(old.links)] == old.links
    infill = chain("/infill", input_prefix=start, input_suffix="x", prompt="y")
    assert infill.links == old.links


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "no list"}),
        (CHAT, {"messages": [said("system", "only that")]}),
        (MESSAGES, {"messages": {"role": "user"}}),
        (RESPONSES, {"instructions": "x"}),
        ("/v1/completions", {"prompt": "short"}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/rerank", {"query": "a"}),
    ],
)
def test_a_body_without_a_conversation_has_no_chain(path, body):
    assert chain_or_none(path, **body) is None


def test_a_long_conversation_keeps_its_first_and_its_last_links():
    messages = [said("user" if n % 2 == 0 else "assistant", f"word {n}") for n in range(300)]
    long, longer = chain(CHAT, messages=messages), chain(CHAT, messages=messages + messages[:4])
    assert len(long.links) == len(long.ends) == CHAIN_LINKS_MAX
    assert longer.links[:2] == long.links[:2] == chain(CHAT, messages=messages[:1]).links
    assert long.links[-1] in longer.links


def marked(message: dict[str, Any]) -> dict[str, Any]:
    """As Claude Code marks a message: its text becomes a block that carries the mark."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(b) for b in content]
    blocks[-1]["cache_control"] = {"type": "ephemeral", "ttl": "5m"}
    return {**message, "content": blocks}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_cache_marks_that_wander_with_the_turns_change_nothing(path):
    tool_use = said("assistant", [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}}])
    result = said("user", [{"type": "tool_result", "tool_use_id": "1", "content": 'say "cache_control": {}'}])
    blocks = said("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
    one_block = said("user", [{"type": "text", "text": 'a "quoted" end'}])
    history = [said("user", "hi"), tool_use, result, said("assistant", "done"), blocks, one_block]
    system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    turns = [
        [*history[: n - 1], marked(history[n - 1])] for n in (1, 3, 5, 6)
    ]  # each marks its newest message only
    whole = chain(path, system=system, messages=[*history, marked(said("user", "end"))])
    for turn in turns:
        seen = chain(path, system=system, messages=turn)
        assert seen.links == whole.links[: len(seen.links)]


def test_a_number_that_changes_with_each_request_does_not_make_another_system_prompt():
    def of(number: str) -> Chain:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"}
        prompt = {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}
        return chain(MESSAGES, system=[billing, prompt], messages=[said("user", "hi")])

    assert of("00a1f").links == of("9c2ee").links


@relaxed
@given(st.lists(st.text(max_size=40), min_size=1, max_size=12), st.text(max_size=20))
def test_links_are_the_same_for_the_same_messages_whatever_follows(texts, last):
    messages = [said("assistant" if n % 2 else "user", text) for n, text in enumerate(texts)]
    short, long = chain(CHAT, messages=messages), chain(CHAT, messages=[*messages, said("user", last)])
    assert long.links[:-1] == short.links and len(set(long.links)) == len(long.links)


# -- keys ------------------------------------------------------------------------------------------


def test_the_first_header_that_says_something_counts():
    for n, name in enumerate(SESSION_HEADERS):
        others = {other: f"value of {other}" for other in SESSION_HEADERS[n + 1 :]}
        assert key({name: "mine"} | others) == key({"X-Session-Id": "mine"})
    blank = dict.fromkeys(SESSION_HEADERS[:-1], "  ")
    assert key(blank | {SESSION_HEADERS[-1]: "mine"}) == key({"X-Session-Id": "mine"})


def test_the_body_names_the_session_when_no_header_does():
    mine = key({"X-Session-Id": "mine"})
    assert key(prompt_cache_key="mine") == mine
    assert key(metadata={"session_id": "mine"}) == mine
    assert key(prompt_cache_key="mine", metadata={"session_id": "other"}) == mine
    assert key(prompt_cache_key="", metadata={"session_id": "mine"}) == mine
    assert key({"X-Session-Id": "mine"}, prompt_cache_key="other") == mine


def test_claude_codes_user_names_the_session_in_both_its_forms():
    mine = key({"X-Session-Id": "0-1-2"})
    assert key(metadata={"user_id": "user_ab12_account_77_session_0-1-2"}) == mine
    assert key(metadata={"user_id": json.dumps({"device_id": "d", "session_id": "0-1-2"})}) == mine
    for nobody in ("user_ab12", "alice", "my_session_", "x_session_0-1-2", "{", "{}", '{"session_id":7}', 7):
        assert key(metadata={"user_id": nobody}) is None


@pytest.mark.parametrize(
    "value", ["", " ", 7, True, None, [], ["a"], {"a": 1}, "x" * (SESSION_FIELD_MAX_BYTES + 1)]
)
def test_odd_values_name_no_session(value):
    assert key(prompt_cache_key=value) is None
    assert key(metadata={"session_id": value, "user_id": value}) is None
    assert key(metadata=value) is None


@pytest.mark.parametrize("value", ["ü" * 5000, "x" * 10_240, "\u0000\u202e", "a\nb", "\U0001f600"])
def test_any_text_may_be_a_key_and_only_its_hash_goes_on(value):
    found = key(prompt_cache_key=value)
    assert found is not None and len(found) == 32 and int(found, 16) >= 0


def test_only_a_whole_session_id_is_taken_from_a_forward():
    assert forwarded_session({"X-Viiwork-Session": "0f" * 16}) == "0f" * 16
    for odd in ("", "0f" * 15, "0F" * 16, "0f" * 17, "zz" * 16, "0f" * 16 + "\n"):
        assert forwarded_session({"X-Viiwork-Session": odd}) is None
    assert forwarded_session({}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    "messages input system instructions tools prompt input_prefix prompt_cache_key metadata".split()
)


@relaxed
@given(st.dictionaries(FIELDS, JSON, max_size=9), st.sampled_from([CHAT, MESSAGES, RESPONSES, "/infill"]))
def test_whatever_the_fields_hold_the_body_is_read_or_refused_as_before(fields, path):
    raw = json.dumps({"model": "m", **fields}).encode()
    try:
        seen = peek(path, {}, raw)
    except RequestError:
        assert b"\\ud" in raw, "only halves of surrogate pairs are refused"
        return
    assert seen.chain is None or len(seen.chain.links) == len(seen.chain.ends) >= 2
