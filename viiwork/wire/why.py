"""Body of `/v1/why/<request id>`: a receipt as JSON."""

from __future__ import annotations

from typing import Any

from viiwork.core.choice import Policy
from viiwork.core.receipts import Receipt, Step, reasons
from viiwork.core.turn import Outcome


def receipt_json(node: str, policy: Policy, receipt: Receipt, at_unix_ms: int) -> dict[str, Any]:
    """What `node` decided about a request that came at `at_unix_ms`; what is not known is left out."""
    body: dict[str, Any] = {
        "request": receipt.request_id,
        "node": node,
        "model": receipt.model,
        "at_unix_ms": at_unix_ms,
        "body_bytes": receipt.body_bytes,
    }
    if receipt.session is not None:
        body["session"] = receipt.session
    if receipt.forwarded_by is not None:
        body["forwarded_by"] = receipt.forwarded_by
    body["state"] = _state(receipt)
    if receipt.error:
        body["error"] = receipt.error
    body["decisions"] = [_step_json(policy, step, receipt.at) for step in receipt.steps]
    return body


def _state(receipt: Receipt) -> str:
    last = receipt.steps[-1]
    if receipt.error:
        return "refused"
    if not last.node:
        return "waiting"
    return "running" if last.outcome is None else "ended"


def _step_json(policy: Policy, step: Step, since: float) -> dict[str, Any]:
    body: dict[str, Any] = {"after_ms": _ms((step.at - since) * 1000)}
    if step.node:
        body |= {"took": step.node, "queued_ms": _ms(step.queued_ms)}
        if step.backend:
            body["backend"] = step.backend
    question, choice = step.question, step.choice
    if question is not None and choice is not None:
        body["rule"] = choice.rule
        if choice.rule == "hold":
            body |= {"held_out_for": choice.node, "hold_ms": _ms(choice.hold_ms)}
        body["prompt_tokens_estimated"] = question.n_tokens
        body["candidates"] = []
        for reason in reasons(policy, question, choice):
            c = reason.candidate
            row: dict[str, Any] = {"node": c.node, "free": c.free, "rtt_ms": _ms(c.rtt_ms)}
            if c.perf is not None:
                row |= {"overhead_ms": c.perf.overhead_ms, "prefill_ms_per_1k": c.perf.prefill_ms_per_1k}
            if c.perf is not None and c.held_where == "replica" and c.perf.import_ms_per_1k is not None:
                row["import_ms_per_1k"] = c.perf.import_ms_per_1k
            if c.held_tokens:
                row |= {"held_tokens": c.held_tokens, "held_where": c.held_where}
            if reason.predicted_ms is not None:
                row["predicted_ttft_ms"] = _ms(reason.predicted_ms)
                if c.node == step.node:
                    body["predicted_ttft_ms"] = row["predicted_ttft_ms"]
            if c.node == step.node:
                body["cache_expected_tokens"] = c.held_tokens
            row["why"] = reason.why
            body["candidates"].append(row)
    if step.outcome is not None:
        body |= _outcome_json(step.outcome)
    return body


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    body: dict[str, Any] = {"result": outcome.result}
    if outcome.status:
        body["status"] = outcome.status
    if outcome.ttft_s is not None:
        # Of a plain answer the first byte comes with the last token: that is no time to the first one.
        body["ttft_ms" if outcome.streamed else "answer_ms"] = _ms(outcome.ttft_s * 1000)
    body["duration_ms"] = _ms(outcome.duration_s * 1000)
    usage = outcome.usage
    if usage is not None and usage.cached is not None:
        body["cache_got_tokens"] = usage.cached
    if usage is not None and usage.prefilled is not None:
        body["prefilled_tokens"] = usage.prefilled
    if outcome.detail:
        body["detail"] = outcome.detail
    return body


def _ms(value: float) -> float:
    return round(value, 1)
