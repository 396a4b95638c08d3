from __future__ import annotations

import pytest

from viiwork.core.ways import ImportCosts, Way, best_way, worth_s
from viiwork.limits import KV_IMPORT_MAX_S, KV_IMPORT_MIN_S

EMPTY = Way("slot", 0)
MS = 0.001  # seconds a token: 1,000 tokens a second


def kind(slot: Way, *others: Way, read_s: float | None = MS) -> str:
    return best_way(slot, others, read_s).kind


@pytest.mark.parametrize(
    ("slot", "others", "chosen"),
    [
        (EMPTY, [], "slot"),
        (EMPTY, [Way("import", 5000, 1.0)], "import"),
        (EMPTY, [Way("import", 5000, 6.0)], "slot"),  # reading takes 5 s
        (Way("slot", 4500), [Way("import", 5000, 1.0)], "slot"),  # 0.5 s are left to save
        (Way("slot", 5000), [Way("import", 5000, 0.1)], "slot"),
        (EMPTY, [Way("import", 100, 0.3)], "import"),  # slower than 0.1 s of reading, and still cheap
        (Way("slot", 95), [Way("import", 100, 0.3)], "slot"),  # but the slot is warm
        (EMPTY, [Way("pull", 100, 0.3)], "slot"),  # nothing is waited for unless it is faster
        (EMPTY, [Way("pull", 5000, 2.0)], "pull"),
        (EMPTY, [Way("import", 5000, 1.0), Way("pull", 5500, 2.0)], "import"),  # 0.5 s for 1 s more
        (EMPTY, [Way("import", 5000, 1.0), Way("pull", 9000, 2.0)], "pull"),
        (EMPTY, [Way("tail", 9000, 1.5), Way("pull", 9000, 2.0)], "tail"),
        (EMPTY, [Way("import", 10_000, 9.0), Way("pull", 9000, 2.0)], "pull"),
        (EMPTY, [Way("import", 100, 0.3), Way("pull", 9000, 2.0)], "pull"),
    ],
)
def test_the_way_with_the_earliest_first_token_is_taken(slot: Way, others: list[Way], chosen: str):
    assert kind(slot, *others) == chosen


def test_nothing_is_waited_for_while_reading_was_not_measured():
    ways = [Way("import", 100, 9.0), Way("pull", 9000, 0.1), Way("tail", 9000, 0.1)]
    assert kind(EMPTY, *ways, read_s=None) == "import"
    assert kind(EMPTY, *ways[1:], read_s=None) == "slot"
    assert kind(Way("slot", 200), *ways, read_s=None) == "slot"


def test_an_import_may_take_as_long_as_reading_within_bounds():
    assert worth_s(Way("import", 5000, 1.0), Way("slot", 2000), MS) == 3.0
    assert worth_s(Way("import", 5000, 1.0), Way("slot", 2000), 1e-6) == KV_IMPORT_MIN_S
    assert worth_s(Way("import", 500_000, 1.0), EMPTY, MS) == KV_IMPORT_MAX_S
    assert worth_s(Way("import", 5000, 1.0), EMPTY, None) == KV_IMPORT_MAX_S


def test_what_an_import_costs_is_learned_for_each_model():
    costs = ImportCosts()
    guess = costs.seconds("m", 10**9)
    costs.took("m", 10**9, 4 * guess)
    assert costs.seconds("m", 10**9) == pytest.approx(4 * guess)
    assert costs.seconds("n", 10**9) == guess
    costs.took("m", 10**9, 2 * guess)
    assert 2 * guess < costs.seconds("m", 10**9) < 4 * guess


def test_one_small_import_says_what_a_large_one_takes():
    costs = ImportCosts()
    costs.took("m", 10**6, 2 * costs.seconds("m", 10**6))
    assert costs.seconds("m", 10**9) == pytest.approx(2 * ImportCosts().seconds("m", 10**9))


def test_a_high_cost_fades_while_nothing_is_imported_for_it_and_a_low_one_stays():
    costs = ImportCosts()
    costs.took("m", 10**9, 1000.0)
    for _ in range(100):
        costs.passed_over("m")
    assert costs.seconds("m", 10**9) == ImportCosts().seconds("m", 10**9)
    costs.took("n", 10**9, 0.5)
    before = costs.seconds("n", 10**9)
    costs.passed_over("n")
    assert costs.seconds("n", 10**9) == before


def test_peers_are_told_the_cost_of_a_thousand_tokens():
    costs = ImportCosts()
    told = costs.ms_per_1k("m", 64_000)
    assert 100 < told < 200  # 64 MB at 2 ns a byte, and a share of the overhead
    costs.took("m", 10**9, 3 * costs.seconds("m", 10**9))
    assert costs.ms_per_1k("m", 64_000) == pytest.approx(3 * told)
