from __future__ import annotations

from viiwork.core.capacity import Perf
from viiwork.core.choice import Candidate, Choice, Policy, Question
from viiwork.core.receipts import Receipts
from viiwork.core.turn import Ask, Grant, Outcome, Usage
from viiwork.limits import RECEIPT_STEPS_MAX
from viiwork.wire.why import receipt_json


def ask(number: int = 1) -> Ask:
    return Ask(f"{number:016x}", "m", session="5" * 32, body_bytes=4000)


QUESTION = Question("a", "m", 1000, (Candidate("a", 1), Candidate("b", 0)))
HERE = Choice("a", "entry")


def test_of_old_requests_nothing_is_kept():
    receipts = Receipts(limit=2)
    for number in range(3):
        receipts.add(ask(number), 1.0, QUESTION, HERE)
    assert len(receipts) == 2 and receipts.get(ask(0).request_id) is None
    assert receipts.get(ask(2).request_id) is not None


def test_of_many_decisions_about_one_request_the_first_and_the_newest_are_kept():
    receipts = Receipts()
    for n in range(9):
        receipts.add(ask(), float(n), QUESTION, HERE)
    receipt = receipts.get(ask().request_id)
    assert [step.at for step in receipt.steps] == [
        0.0,
        *(9.0 - n for n in range(RECEIPT_STEPS_MAX - 1, 0, -1)),
    ]


def test_each_try_gets_its_own_end():
    receipts = Receipts()
    for _ in range(2):
        receipts.add(ask(), 1.0, QUESTION, HERE).node = "a"
    first, second = Outcome("unreachable"), Outcome("done", 200)
    receipts.ended(Grant(ask(), "a", "http://e"), first)
    receipts.ended(Grant(ask(), "a", "http://e"), second)
    receipts.ended(Grant(ask(9), "a", "http://e"), second)  # forgotten long ago
    assert [step.outcome for step in receipts.get(ask().request_id).steps] == [second, first]


def test_a_receipt_tells_what_was_expected_and_what_came():
    receipts = Receipts()
    candidates = (
        Candidate("a", 1, perf=Perf(100.0, 1000.0, 5), held_tokens=800, held_where="ram"),
        Candidate("b", 0, rtt_ms=1.0),
    )
    question = Question("a", "m", 1000, candidates, session="5" * 32)
    step = receipts.add(ask(), 10.0, question, Choice("a", "warm"))
    assert receipt_json("a", Policy(), receipts.get(ask().request_id), 1234)["state"] == "waiting"
    step.node, step.backend, step.queued_ms = "a", "m/0", 12.0
    assert receipt_json("a", Policy(), receipts.get(ask().request_id), 1234)["state"] == "running"
    outcome = Outcome("done", 200, 0.35, True, 2.0, Usage(700, 300, 9))
    receipts.ended(Grant(ask(), "a", "http://e", "m/0", queued_s=0.5), outcome)
    assert receipt_json("a", Policy(), receipts.get(ask().request_id), 1234) == {
        "request": ask().request_id,
        "node": "a",
        "model": "m",
        "at_unix_ms": 1234,
        "body_bytes": 4000,
        "session": "5" * 32,
        "state": "ended",
        "decisions": [
            {
                "after_ms": 0.0,
                "took": "a",
                "queued_ms": 500.0,
                "backend": "m/0",
                "rule": "warm",
                "prompt_tokens_estimated": 1000,
                "candidates": [
                    {
                        "node": "a",
                        "free": 1,
                        "rtt_ms": 0.0,
                        "overhead_ms": 100.0,
                        "prefill_ms_per_1k": 1000.0,
                        "held_tokens": 800,
                        "held_where": "ram",
                        "predicted_ttft_ms": 300.0,
                        "why": "taken",
                    },
                    {"node": "b", "free": 0, "rtt_ms": 1.0, "predicted_ttft_ms": 1101.0, "why": "full"},
                ],
                "predicted_ttft_ms": 300.0,
                "cache_expected_tokens": 800,
                "result": "done",
                "status": 200,
                "ttft_ms": 350.0,
                "duration_ms": 2000.0,
                "cache_got_tokens": 700,
                "prefilled_tokens": 300,
            }
        ],
    }


def test_the_time_of_a_plain_answer_is_not_called_its_time_to_first_token():
    receipts = Receipts()
    receipts.add(ask(), 1.0, QUESTION, HERE).node = "a"
    receipts.ended(Grant(ask(), "a", "http://e"), Outcome("done", 200, 2.0, streamed=False))
    (step,) = receipt_json("a", Policy(), receipts.get(ask().request_id), 1234)["decisions"]
    assert step["answer_ms"] == 2000.0 and "ttft_ms" not in step
