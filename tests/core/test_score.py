from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.core.capacity import Perf
from viiwork.core.score import Baseline, Speeds
from viiwork.limits import SCORE_BUCKET_SAMPLES_MAX


def speeds_of(*turns: tuple[float, int], baseline: Baseline | None = None, now: float = 0.0) -> Speeds:
    """Turns as (TTFT in seconds, tokens read)."""
    speeds = Speeds()
    speeds.restore("m", baseline)
    for ttft_s, n_tokens in turns:
        speeds.sample("m", ttft_s, n_tokens, now)
    return speeds


def turns(overhead_s: float, per_1k_s: float, *tokens: int) -> list[tuple[float, int]]:
    return [(overhead_s + per_1k_s * n / 1000, n) for n in tokens]


def test_overhead_and_rate_are_told_apart():
    speeds = speeds_of(*turns(0.2, 3.0, 10, 100, 300, 1000, 4000, 8000))
    assert speeds.perf("m", 0.0) == Perf(200.0, 3000.0, 6)


def test_what_was_never_measured_has_no_score():
    assert Speeds().perf("m", 0.0) is None
    assert speeds_of(*turns(0.2, 3.0, 10, 100, 300)).perf("m", 0.0) is None


def test_one_odd_turn_is_no_score_and_does_not_change_one():
    assert speeds_of((130.0, 2000)).perf("m", 0.0) is None
    odd = speeds_of(*turns(0.2, 3.0, 10, 20, 30, 1000, 2000, 4000, 5000), (130.0, 2000))
    assert odd.perf("m", 0.0).prefill_ms_per_1k == 3000.0


def test_the_prefill_of_short_prompts_is_not_taken_for_overhead():
    speeds = speeds_of(*turns(0.1, 10.0, 400, 450, 500, 1000, 2000, 4000))
    perf = speeds.perf("m", 0.0)
    # Their whole TTFT is 4.1 to 5.1 s, of which a tenth of a second is overhead.
    assert perf.overhead_ms < 500 and 9800 <= perf.prefill_ms_per_1k <= 10_000


def test_a_rate_of_nothing_is_no_measurement():
    assert speeds_of(*[(0.0001, 5000)] * 9).perf("m", 0.0) is None


def test_nonsense_is_no_sample():
    speeds = Speeds()
    for ttft_s, n_tokens in ((0.0, 1000), (-1.0, 1000), (float("nan"), 1000), (float("inf"), 5), (1.0, -1)):
        speeds.sample("m", ttft_s, n_tokens, 0.0)
    assert speeds.models() == []


def test_turns_are_forgotten_after_ten_minutes_and_the_baseline_stays():
    few = speeds_of(*turns(0.2, 3.0, 1000, 2000, 3000))
    assert few.perf("m", 540.0) is not None
    assert few.perf("m", 600.0) is None
    many = speeds_of(*turns(0.2, 3.0, 10, 20, 30, 1000, 2000, 3000, 4000, 5000))
    assert many.perf("m", 0.0) == Perf(200.0, 3000.0, 8)
    assert many.perf("m", 600.0) == Perf(200.0, 3000.0, 0)


def test_few_turns_move_the_baseline_a_little_and_five_long_ones_replace_it():
    before = Baseline(100.0, 1000.0)
    few = speeds_of(*turns(0.1, 2.0, 1000, 2000), baseline=before)
    assert few.perf("m", 0.0) == Perf(100.0, 1300.0, 2)  # 2 / (2 + 5) of the way, rounded
    assert few.baseline("m") == before
    five = speeds_of(*turns(0.1, 2.0, 1000, 2000, 3000, 4000, 5000), baseline=before)
    assert five.perf("m", 0.0) == Perf(100.0, 2000.0, 5)
    assert five.baseline("m") == Baseline(100.0, 2000.0)


def test_fewer_than_three_short_prompts_do_not_overrule_the_baselines_overhead():
    two = speeds_of(*turns(0.9, 1.0, 1, 2), baseline=Baseline(100.0, 1000.0))
    assert two.perf("m", 0.0).overhead_ms == 100.0
    three = speeds_of(*turns(0.9, 1.0, 1, 2, 3), baseline=Baseline(100.0, 1000.0))
    assert three.perf("m", 0.0).overhead_ms == 400.0  # 3 / (3 + 5) of the way


def test_a_score_is_worked_out_at_most_once_a_second():
    speeds = speeds_of(*turns(0.2, 3.0, 1000, 2000, 3000))
    first = speeds.perf("m", 0.0)
    for turn in turns(0.2, 9.0, *[1000] * 9):
        speeds.sample("m", *turn, 0.5)
    assert speeds.perf("m", 0.5) == first
    assert speeds.perf("m", 1.0) != first


def test_what_restoring_costs_is_told_with_the_score():
    speeds = speeds_of(*turns(0.2, 3.0, 1000, 2000, 3000))
    assert speeds.perf("m", 0.0).import_ms_per_1k is None
    speeds.imports("m", 123.4)
    assert speeds.perf("m", 2.0).import_ms_per_1k == 120.0
    speeds.imports("other", 5.0)
    assert speeds.perf("other", 2.0) is None


def test_of_a_busy_minute_the_newest_turns_count():
    slow, fast = turns(0.2, 9.0, 1000), turns(0.2, 1.0, 1000)
    speeds = speeds_of(*slow * SCORE_BUCKET_SAMPLES_MAX, *fast * SCORE_BUCKET_SAMPLES_MAX)
    assert speeds.perf("m", 0.0) == Perf(1.0, 1200.0, SCORE_BUCKET_SAMPLES_MAX)


def test_forgetting_or_restoring_a_model_drops_what_was_measured():
    speeds = speeds_of(*turns(0.2, 3.0, 1000, 2000, 3000))
    speeds.forget("m")
    assert speeds.perf("m", 0.0) is None
    speeds.restore("m", Baseline(123.0, 4567.0))
    assert speeds.perf("m", 0.0) == Perf(120.0, 4600.0, 0)


samples = st.lists(st.tuples(st.floats(0.0001, 1e4), st.integers(0, 200_000)), max_size=40)
baselines = st.none() | st.builds(Baseline, st.floats(0, 1e6), st.floats(1, 1e6))


@settings(deadline=None)
@given(samples, baselines)
def test_a_published_score_is_usable_whatever_the_turns_were(turns_made, baseline):
    perf = speeds_of(*turns_made, baseline=baseline).perf("m", 0.0)
    assert perf is None or (perf.overhead_ms >= 1 and perf.prefill_ms_per_1k >= 1)


@settings(deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(10, 20_000),
    st.lists(st.integers(1, 511), min_size=3, max_size=9),
    st.lists(st.integers(5120, 100_000), min_size=3, max_size=9),
)
def test_a_steady_machine_is_measured_as_it_is(overhead_ms, per_1k_ms, small, big):
    perf = speeds_of(*turns(overhead_ms / 1000, per_1k_ms / 1000, *small, *big)).perf("m", 0.0)
    for n_tokens in (10_000, 100_000):
        true_ms = overhead_ms + per_1k_ms * n_tokens / 1000
        assert abs(perf.overhead_ms + perf.prefill_ms_per_1k * n_tokens / 1000 - true_ms) <= 0.15 * true_ms
