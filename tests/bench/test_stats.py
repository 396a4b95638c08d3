from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.bench.stats import (
    count_interval,
    means_differ,
    percentile,
    percentile_interval,
    shares_differ,
    wilson,
)


def test_a_share_lies_where_the_tables_say():
    # Newcombe 1998, table I: 81 of 263 and 15 of 148; 0 of 20; 1 of 29.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


def test_nothing_is_known_of_a_share_of_nothing():
    assert wilson(0, 0) == (0.0, 1.0)
    assert shares_differ(0, 0, 3, 4) == (-1.0, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_is_in_its_own_interval(pair: tuple[int, int]):
    low, high = wilson(*pair)
    assert 0 <= low <= pair[0] / pair[1] <= high <= 1


def test_the_difference_of_two_shares_lies_where_the_tables_say():
    # Newcombe 1998, table II, method 10: 56/70 less 48/80.
    low, high = shares_differ(48, 80, 56, 70)
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_a_second_count_of_the_same_events_is_within_the_interval():
    rng, missed = random.Random(3), 0
    for _ in range(400):
        first, second = (sum(rng.random() < 0.01 for _ in range(6000)) for _ in range(2))
        low, high = count_interval(first)
        missed += not low <= second <= high
    assert missed < 0.09 * 400  # 5 % of them, and what chance adds


def test_means_of_a_known_sample():
    # Student 1908: the additional hours of sleep, two groups of ten.
    a = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert means_differ(a, b) == pytest.approx((-0.2055, 3.3655), abs=0.04)
    assert means_differ([1.0], b) is None
    assert means_differ([1.0, 1.0], [2.0, 2.0]) == (1.0, 1.0)


def test_percentiles_and_the_ranks_around_them():
    values = list(range(101))
    assert percentile(values, 0.5) == 50 and percentile(values, 0.99) == 99
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile_interval(values, 0.5) == (40, 61)
    assert percentile([], 0.5) is None and percentile_interval([], 0.5) is None
    assert percentile_interval([7.0], 0.99) == (7.0, 7.0)
