from __future__ import annotations

import pytest

from jacobi_forcing.evaluate.statistics import Wilson, mcnemar, paired_bootstrap


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_equals_published_values(count: int, of: int, low: float, high: float) -> None:
    interval = Wilson.of_counts(count, of)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)
    assert interval.low <= interval.share <= interval.high


@pytest.mark.parametrize(
    ("first", "second", "p"),
    # Twice the lower tail of a binomial with n = first + second and p = 1/2, by hand.
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (6, 0, 2 / 64), (1, 9, 2 * 11 / 1024), (5, 5, 1.0), (10, 2, 158 / 4096)],
)
def test_mcnemars_exact_test_equals_the_binomial_by_hand(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p)
    assert mcnemar(second, first) == pytest.approx(p)


def test_mcnemar_takes_large_counts() -> None:
    assert mcnemar(2100, 1968) == pytest.approx(0.0400, abs=5e-4)  # z = 131 / sqrt(4068)
    assert mcnemar(5000, 1000) < 1e-300


def test_the_bootstrap_of_equal_answers_is_a_point() -> None:
    assert paired_bootstrap([1, 0, 1], [1, 0, 1]) == (0.0, 0.0)


def test_the_bootstrap_meets_the_normal_interval_where_that_holds() -> None:
    first, second = [1.0] * 60 + [0.0] * 40, [1.0] * 40 + [0.0] * 60
    low, high = paired_bootstrap(first, second, seed=3)
    # Mean 0.2, each difference 0 or 1 with share 0.2: standard error 0.04.
    assert low == pytest.approx(0.2 - 1.96 * 0.04, abs=0.011)
    assert high == pytest.approx(0.2 + 1.96 * 0.04, abs=0.011)
    assert paired_bootstrap(first, second, seed=3) == (low, high)


def test_unpaired_values_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 1"):
        paired_bootstrap([1, 2], [1])
