from __future__ import annotations

from viiwork.core.tally import BOUNDS_S, OTHER, RequestTally
from viiwork.core.turn import Ask, Grant, Outcome, Usage
from viiwork.limits import METRIC_MODELS_MAX


def ended(tally: RequestTally, model: str, *, backend: str = "m/0", **outcome) -> None:
    tally.ended(Grant(Ask("r", model), "n", "u", backend), Outcome("done", 200, **outcome), 2.0)


def test_a_time_counts_below_the_bound_it_does_not_exceed():
    tally = RequestTally()
    for ttft_s in (BOUNDS_S[0], BOUNDS_S[0] + 1e-6, 1e9):
        ended(tally, "m", ttft_s=ttft_s)
    ttft = tally.by_model["m", "local"].ttft
    assert (ttft.counts[0], ttft.counts[1], ttft.counts[-1], sum(ttft.counts)) == (1, 1, 1, 3)


def test_tokens_count_where_they_were_made():
    tally = RequestTally()
    ended(tally, "m", usage=Usage(7, None, 4))
    ended(tally, "m", backend="", usage=Usage(7, 3, 4))
    assert tally.by_model["m", "local"].tokens == {"cached": 7, "prefilled": 0, "generated": 4}
    assert sum(tally.by_model["m", "forward"].tokens.values()) == 0


def test_models_beyond_the_limit_share_one_count():
    tally = RequestTally()
    for i in range(METRIC_MODELS_MAX + 50):
        ended(tally, f"m{i}")
    ended(tally, "m0")
    assert len(tally.by_model) == METRIC_MODELS_MAX + 1
    assert tally.by_model[OTHER, "local"].results["done"] == 50
    assert tally.by_model["m0", "local"].results["done"] == 2
