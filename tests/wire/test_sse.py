"""What the scanner sees in a stream, wherever its pieces are cut."""

from __future__ import annotations

import json
import random

import pytest

from viiwork.core.turn import Usage
from viiwork.limits import SSE_LINE_MAX_BYTES
from viiwork.wire.sse import StreamScanner, usage_of_body, usage_of_tail


def data(value: object, event: str = "") -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def chat(**delta: object) -> bytes:
    return data({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


TIMINGS = {"cache_n": 7, "prompt_n": 3, "predicted_n": 4}
CHAT_END = data({"choices": [], "usage": {"prompt_tokens": 10}, "timings": TIMINGS}) + b"data: [DONE]\n\n"
STREAMS = {
    "chat": (chat(role="assistant", content=None) + b":\n\n", chat(content="hi"), CHAT_END, Usage(7, 3, 4)),
    "completions": (
        data({"choices": [{"text": ""}]}),
        data({"choices": [{"text": "x"}]}),
        CHAT_END,
        Usage(7, 3, 4),
    ),
    "infill": (
        data({"content": "", "stop": False}),
        data({"content": "x", "stop": False}),
        data({"content": "", "stop": True, "timings": TIMINGS}),
        Usage(7, 3, 4),
    ),
    "messages": (
        data(
            {
                "type": "message_start",
                "message": {"usage": {"cache_read_input_tokens": 7, "input_tokens": 3, "output_tokens": 0}},
            },
            "message_start",
        )
        + data({"type": "content_block_start", "content_block": {"type": "text", "text": ""}})
        + data({"type": "ping"}),
        data({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}),
        data({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}})
        + data({"type": "message_stop"}, "message_stop"),
        Usage(7, 3, 4),
    ),
    "responses": (
        data({"type": "response.created", "response": {"output": []}})
        + data({"type": "response.output_text.delta", "delta": ""}),
        data({"type": "response.output_text.delta", "delta": "x"}),
        data({"type": "response.completed", "response": {"usage": {}}, "timings": TIMINGS}),
        Usage(7, 3, 4),
    ),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("cut", ["whole", "bytes", "random"])
def test_each_dialect_is_understood_however_it_is_cut(kind, newline, cut):
    before, content, end, usage = (
        part.replace(b"\n", newline) if isinstance(part, bytes) else part for part in STREAMS[kind]
    )
    scanner = StreamScanner()
    rng = random.Random(1)

    def feed(part: bytes) -> None:
        while part:
            n = {"whole": len(part), "bytes": 1, "random": rng.randint(1, 40)}[cut]
            scanner.feed(part[:n])
            part = part[n:]

    feed(before)
    assert not scanner.content_seen and not scanner.finished and scanner.at_boundary
    feed(content)
    assert scanner.content_seen and not scanner.finished
    for _ in range(3):
        feed(content)
    feed(end)
    assert (scanner.finished, scanner.usage, scanner.error_seen) == (True, usage, False)


@pytest.mark.parametrize(
    "silent",
    [
        b":\n\n",
        b": ping\n",
        b"\n\n",
        b"event: ping\n\n",
        chat(role="assistant"),
        chat(content=""),
        chat(tool_calls=[]),
        data({"choices": []}),
        data({"choices": None, "prompt_progress": {"total": 9}}),
        data([1]),
        b"data: not json\n\n",
        b"data:\n\n",
        b'data: {"choices":[1,null,{"delta":4}]}\n\n',
    ],
)
def test_what_carries_no_token_is_no_content(silent):
    scanner = StreamScanner()
    scanner.feed(silent)
    assert not scanner.content_seen
    scanner.feed(chat(content="x"))
    assert scanner.content_seen or not silent.endswith(b"\n\n")


@pytest.mark.parametrize(
    "delta",
    [{"content": "x"}, {"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"id": "1"}]}],
)
def test_the_first_token_of_any_kind_counts(delta):
    scanner = StreamScanner()
    scanner.feed(chat(**delta))
    assert scanner.content_seen


def test_a_tool_call_or_thought_in_other_dialects_counts_too():
    for event in (
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x"}},
        {"type": "response.function_call_arguments.delta", "delta": "{"},
    ):
        scanner = StreamScanner()
        scanner.feed(data(event))
        assert scanner.content_seen, event


def test_words_of_the_protocol_inside_of_text_mean_nothing():
    scanner = StreamScanner()
    for text in (
        '"usage":{"prompt_tokens":1}',
        "[DONE]",
        'data: [DONE]\n\n"timings"',
        '"error":1',
        "message_stop",
    ):
        scanner.feed(chat(content=text))
    assert (scanner.finished, scanner.usage, scanner.error_seen) == (False, None, False)


def test_errors_are_seen_in_both_shapes():
    for event in (data({"error": {"message": "x"}}), b'error: {"message":"x"}\n\n', data({"type": "error"})):
        scanner = StreamScanner()
        scanner.feed(chat(content="x"))
        scanner.feed(event)
        assert scanner.error_seen or b'"type"' in event


def test_a_boundary_is_between_events_only():
    scanner = StreamScanner()
    assert scanner.at_boundary
    scanner.feed(chat(content="x")[:-1])
    assert not scanner.at_boundary
    scanner.feed(b"\n")
    assert scanner.at_boundary


def test_an_event_spread_over_several_data_lines_is_one():
    scanner = StreamScanner()
    scanner.feed(
        b'data: {"choices":[],\ndata: "timings":{"cache_n":7,\ndata: "prompt_n":3,"predicted_n":4}}\n\n'
    )
    assert scanner.usage == Usage(7, 3, 4)


@pytest.mark.parametrize("piece", [1 << 16, 1 << 20])
def test_a_huge_event_is_not_kept_and_its_counts_are_still_found(piece):
    scanner = StreamScanner()
    huge = data({"type": "response.completed", "response": {"text": "x" * (8 << 20)}, "timings": TIMINGS})
    most = 0
    for i in range(0, len(huge), piece):
        scanner.feed(huge[i : i + piece])
        most = max(most, len(scanner._carry))
    assert most <= SSE_LINE_MAX_BYTES
    assert scanner.usage == Usage(7, 3, 4)


def test_endless_data_lines_without_an_end_are_not_kept():
    scanner = StreamScanner()
    for _ in range(100):
        scanner.feed(b"data: " + b"x" * 20_000 + b"\n")
    assert sum(map(len, scanner._data)) <= SSE_LINE_MAX_BYTES + 20_000


def test_counts_of_a_plain_answer_come_from_timings_or_else_from_usage():
    usage = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 7}}
    assert usage_of_body(json.dumps({"choices": [], "usage": usage}).encode()) == Usage(7, 3, 4)
    assert usage_of_body(json.dumps({"timings": TIMINGS, "usage": {}}).encode()) == Usage(7, 3, 4)
    del usage["prompt_tokens_details"]
    assert usage_of_body(json.dumps({"usage": usage}).encode()) == Usage(None, None, 4), "unknown is not zero"
    for body in (b"", b"x", b"[]", b'{"usage":7}', b'{"usage":{"prompt_tokens":"x"}}'):
        assert usage_of_body(body) in (None, Usage())


def test_counts_are_found_in_the_tail_of_a_long_answer():
    body = json.dumps({"text": "x" * 1000, "usage": {"prompt_tokens": 9}, "timings": TIMINGS}).encode()
    assert usage_of_tail(body[-200:]) == Usage(7, 3, 4)
    assert usage_of_tail(b"x" * 100) is None
