"""Which interval is taken for how many episodes, and intervals of sums."""

import math

import numpy as np
import pytest

from marl_lightning.games import NashConvResult
from marl_lightning.games.intervals import (
    bootstrap_interval,
    empirical_bernstein_interval,
    mean_interval,
    normal_interval,
    sum_interval,
)


def test_the_interval_suits_the_number_of_results():
    values = np.random.default_rng(0).random(600)
    assert mean_interval(values) == normal_interval(values)
    assert mean_interval(values[:500], bounds=(0, 1), level=0.9) == normal_interval(values[:500], level=0.9)
    few = values[:499]
    assert mean_interval(few, level=0.9) == bootstrap_interval(few, level=0.9)
    assert mean_interval(few, bounds=(0, 2)) == empirical_bernstein_interval(few, low=0, high=2)


def test_distances_add_as_deviations_do():
    """Distances 3 and 4 to the low limits, 5 and 12 to the high ones."""
    assert sum_interval([1.0, 10.0], [(-2, 6), (6, 22)]) == pytest.approx((11 - 5, 11 + 13))
    assert sum_interval([1.0], [(0, 5)]) == pytest.approx((0, 5))


def test_normal_intervals_add_their_variances():
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=700), rng.normal(3, 2, size=900)]
    low, high = sum_interval([x.mean() for x in samples], [normal_interval(x) for x in samples])
    variance = sum(x.var(ddof=1) / len(x) for x in samples)
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(variance), rel=1e-6)


def test_coverage_of_a_sum_of_proportions():
    """Of 0.9 and 0.6, from 40 and 60 trials, with Wilson's intervals."""
    from marl_lightning.games.intervals import wilson_interval

    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        counts = (rng.binomial(40, 0.9), rng.binomial(60, 0.6))
        shares = [counts[0] / 40, counts[1] / 60]
        low, high = sum_interval(shares, [wilson_interval(counts[0], 40), wilson_interval(counts[1], 60)])
        covered += low <= 1.5 <= high
    assert covered / 2000 == pytest.approx(0.95, abs=0.03)


def test_raw_and_clipped_values():
    result = NashConvResult(
        value=0.2,
        gains={"a": 0.3, "b": -0.1},
        on_policy={"a": 0.0, "b": 0.1},
        best_response_values={"a": 0.3, "b": 0.0},
        bound="lower",
        interval=(0.0, 0.4),
        gain_intervals={"a": (0.1, 0.5), "b": (-0.2, 0.0)},
    )
    assert result.clipped == pytest.approx(0.3)
    written = result.as_dict()
    assert written["clipped"] == result.clipped
    assert written["gain_intervals"] == {"a": [0.1, 0.5], "b": [-0.2, 0.0]}
    assert written["on_policy_intervals"] == {}
