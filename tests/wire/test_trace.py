from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_choice import policies, questions
from viiwork.core.choice import Policy, pick
from viiwork.core.replay import Replay
from viiwork.errors import TraceError
from viiwork.limits import TRACE_LINE_MAX_BYTES
from viiwork.wire.trace import VERSION, Arrival, Head, decode_line, encode_line


@given(policies, questions)
def test_a_recorded_decision_reads_back_as_it_was_and_is_made_again(policy, question):
    head, arrival = Head(VERSION, "a", policy), Arrival(7, "1f", question, pick(policy, question))
    read = [decode_line(encode_line(value).rstrip(b"\n")) for value in (head, arrival)]
    assert read == [head, arrival]
    assert pick(read[0].policy, read[1].question) == read[1].choice


@given(policies, st.lists(questions, max_size=20))
def test_replay_under_the_same_policy_reproduces_every_choice(policy, asked):
    replay = Replay(policy)
    for question in asked:
        assert replay.add(question, pick(policy, question)) == pick(policy, question)
    assert replay.n_decisions == len(asked) and replay.n_elsewhere == 0
    assert replay.old == replay.new


@given(policies, policies, st.lists(questions, max_size=20))
def test_replay_counts_what_another_policy_places_elsewhere(one, other, asked):
    replay = Replay(other)
    moved = 0
    for question in asked:
        recorded = pick(one, question)
        moved += replay.add(question, recorded).node != recorded.node
    assert replay.n_elsewhere == moved
    assert len(replay.old.predicted_ms) == len(replay.new.predicted_ms) <= len(asked)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"null",
        b'{"line":"head","v":2,"node":"a","policy":{}}',
        b'{"line":"decision"}',
        b'{"line":"other"}',
        b"[" * 5000,
        b'{"line":"head","v":1,"node":"\xff","policy":{}}',
        b"x" * (TRACE_LINE_MAX_BYTES + 1),
    ],
)
def test_what_is_no_line_of_a_trace_is_refused_in_one_line(line: bytes):
    with pytest.raises(TraceError) as caught:
        decode_line(line)
    assert "\n" not in str(caught.value)


def test_a_head_without_settings_means_the_defaults():
    assert decode_line(b'{"line":"head","v":1,"node":"a","policy":{}}') == Head(1, "a", Policy())
