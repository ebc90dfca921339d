"""Intervals against published numbers, SciPy, numbers by hand, and how often they cover the truth."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from marl_lightning.games.intervals import (
    bootstrap_interval,
    empirical_bernstein_interval,
    episodes_for_half_width,
    hoeffding_episodes,
    newcombe_interval,
    normal_interval,
    wilson_interval,
)


def coverage(interval, draw, truth, *, repetitions, seed=0) -> float:
    """How often the interval of freshly drawn results holds the truth."""
    rng = np.random.default_rng(seed)
    intervals = np.array([interval(draw(rng)) for _ in range(repetitions)])
    return float(((intervals[:, 0] <= truth) & (truth <= intervals[:, 1])).mean())


def test_normal_by_hand():
    """Mean 2, sample variance 5/3, half-width 1.959964 sqrt(5/3) / 2."""
    low, high = normal_interval(np.array([0.5, 1.5, 2.5, 3.5]))
    assert (low + high) / 2 == pytest.approx(2)
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(5 / 3) / 2, rel=1e-6)
    assert normal_interval(np.array([0.5, 1.5, 2.5, 3.5]), level=0.5)[1] < high
    assert normal_interval(np.full(5, 3.0)) == (3, 3)


def test_normal_against_scipy():
    values = np.random.default_rng(0).exponential(size=300)
    expected = stats.norm.interval(0.9, loc=values.mean(), scale=stats.sem(values))
    assert normal_interval(values, level=0.9) == pytest.approx(expected)


def test_empirical_bernstein_by_hand():
    """1000 results, half of them 1: V = 0.25 * 1000 / 999, and ln(2 / 0.025) = 4.382027."""
    values = np.tile([0.0, 1.0], 500)
    half = math.sqrt(2 * 0.25 * 1000 / 999 * 4.382027 / 1000) + 7 * 4.382027 / (3 * 999)
    assert half == pytest.approx(0.057067, abs=1e-5)
    assert empirical_bernstein_interval(values, low=0, high=1) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    # Scaled results have a scaled interval, and none is wider than the bounds.
    scaled = empirical_bernstein_interval(4 * values - 2, low=-2, high=2)
    assert scaled == pytest.approx((-4 * half, 4 * half), abs=1e-5)
    assert empirical_bernstein_interval(values[:4], low=0, high=1) == (0, 1)


def test_bootstrap():
    values = np.random.default_rng(0).exponential(size=200)
    low, high = bootstrap_interval(values)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval(values, seed=1) != (low, high)
    assert (low, high) == pytest.approx(normal_interval(values), abs=0.03)
    result = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(1))
    assert (low, high) == pytest.approx(result.confidence_interval, abs=0.02)


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (0, 20), (3, 20), (20, 20), (500, 738)])
def test_wilson_against_scipy(successes, trials, level):
    expected = stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    assert wilson_interval(successes, trials, level=level) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [  # examples of Newcombe 1998, method 10
        ((56, 70, 48, 80), (0.0524, 0.3339)),
        ((9, 10, 3, 10), (0.1705, 0.8090)),
        ((6, 7, 2, 7), (0.0582, 0.8062)),
        ((5, 56, 0, 29), (-0.0381, 0.1926)),
        ((0, 10, 0, 20), (-0.1611, 0.2775)),
        ((10, 10, 0, 20), (0.6791, 1.0)),
    ],
)
def test_newcombe_as_published(counts, expected):
    assert newcombe_interval(*counts) == pytest.approx(expected, abs=6e-5)
    swapped = newcombe_interval(*counts[2:], *counts[:2])
    assert swapped == pytest.approx((-expected[1], -expected[0]), abs=6e-5)


def test_episodes_that_are_needed():
    """Of Kuhn and Leduc poker with uniform play, and of satisfaction."""
    assert episodes_for_half_width(sd=1.452, half_width=0.05) == 3240
    assert episodes_for_half_width(sd=1.452, half_width=0.02) == 20248
    assert episodes_for_half_width(sd=4.513, half_width=0.1) == 7824
    assert episodes_for_half_width(sd=0, half_width=0.1) == 2
    assert hoeffding_episodes(epsilon=0.05, delta=0.05) == 738
    assert hoeffding_episodes(epsilon=0.02, delta=0.05) == 4612


def test_planned_episodes_give_the_width():
    n = episodes_for_half_width(sd=2.0, half_width=0.1, level=0.9)
    low, high = normal_interval(np.random.default_rng(0).normal(scale=2.0, size=n), level=0.9)
    assert (high - low) / 2 == pytest.approx(0.1, rel=0.05)


# Four standard deviations of the share of 2000 repetitions are 0.02 at 0.95 and 0.027 at 0.9.


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_coverage_of_normal(level):
    found = coverage(
        lambda values: normal_interval(values, level=level), lambda rng: rng.normal(3, 2, 100), 3, repetitions=2000
    )
    assert found == pytest.approx(level, abs=0.03)


def test_coverage_of_bootstrap():
    found = coverage(
        lambda values: bootstrap_interval(values, resamples=300), lambda rng: rng.normal(3, 2, 80), 3, repetitions=400
    )
    assert found == pytest.approx(0.95, abs=0.045)


@pytest.mark.parametrize("n", [5, 50])
def test_coverage_of_empirical_bernstein_is_at_least_promised(n):
    """Of results that are 0 but for one in 20, of which a normal interval covers the mean too rarely."""

    def draw(rng):
        return (rng.random(n) < 0.05).astype(float)

    safe = coverage(lambda x: empirical_bernstein_interval(x, low=0, high=1), draw, 0.05, repetitions=2000)
    assert safe >= 0.95
    assert coverage(normal_interval, draw, 0.05, repetitions=2000) < 0.95


@pytest.mark.parametrize(("p", "trials"), [(0.1, 50), (0.5, 30)])
def test_coverage_of_wilson(p, trials):
    found = coverage(lambda x: wilson_interval(x, trials), lambda rng: rng.binomial(trials, p), p, repetitions=2000)
    assert found == pytest.approx(0.95, abs=0.03)


def test_coverage_of_newcombe():
    found = coverage(
        lambda x: newcombe_interval(x[0], 40, x[1], 60),
        lambda rng: (rng.binomial(40, 0.8), rng.binomial(60, 0.6)),
        0.2,
        repetitions=2000,
    )
    assert found == pytest.approx(0.95, abs=0.03)


def test_hoeffding_keeps_its_promise():
    n = hoeffding_episodes(epsilon=0.1, delta=0.1)
    means = np.random.default_rng(0).binomial(n, 0.5, size=5000) / n
    assert (np.abs(means - 0.5) > 0.1).mean() <= 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normal_interval([1.0]), "a normal interval needs at least 2 episodes, got 1"),
        (lambda: empirical_bernstein_interval([1.0], low=0, high=1), "Bernstein interval needs at least 2 episodes"),
        (lambda: bootstrap_interval([1.0, 2.0, 3.0]), "a bootstrap interval needs at least 4 episodes, got 3"),
        (lambda: bootstrap_interval([1.0] * 4, level=0.999), "needs at least 5 episodes, got 4"),
        (lambda: wilson_interval(0, 0), "needs at least 1 episode, got 0"),
        (lambda: newcombe_interval(1, 2, 0, 0), "needs at least 1 episode, got 0"),
        (lambda: wilson_interval(3, 2), r"successes must be in \[0, 2\], got 3"),
        (lambda: empirical_bernstein_interval([0.0, 2.0], low=0, high=1), r"values must be in \[0, 1\]"),
        (lambda: empirical_bernstein_interval([0.0, 1.0], low=1, high=1), "low must be less than high"),
        (lambda: normal_interval([1.0, float("nan")]), "must be finite"),
        (lambda: normal_interval([[1.0, 2.0]]), r"one a episode, \[n\]"),
        (lambda: hoeffding_episodes(epsilon=0, delta=0.1), r"epsilon and delta must be in \(0, 1\)"),
        (lambda: episodes_for_half_width(sd=1, half_width=0), "half_width positive"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_levels_out_of_range():
    calls = (
        lambda level: normal_interval([1.0, 2.0], level=level),
        lambda level: bootstrap_interval([1.0] * 9, level=level),
        lambda level: wilson_interval(1, 2, level=level),
        lambda level: empirical_bernstein_interval([0.0, 1.0], low=0, high=1, level=level),
        lambda level: episodes_for_half_width(sd=1, half_width=1, level=level),
    )
    for call, level in itertools.product(calls, (0, 1, 95)):
        with pytest.raises(ValueError, match=r"level must be in \(0, 1\), such as 0.95"):
            call(level)
