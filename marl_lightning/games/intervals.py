"""How sure an estimate is: confidence intervals of means and proportions, and how many episodes they take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

Interval = tuple[float, float]

MANY_EPISODES = 500
"""Results whose mean is taken to be normally distributed by :func:`mean_interval`."""


def mean_interval(values: np.ndarray, *, bounds: Interval | None = None, level: float = 0.95) -> Interval:
    """Interval of a mean by what suits the number of results.

    From :data:`MANY_EPISODES` on, :func:`normal_interval`; of fewer, :func:`empirical_bernstein_interval` if their
    bounds are known, which holds for any number, and :func:`bootstrap_interval` otherwise, which is a little too narrow
    if there are very few.

    Args:
        values: ``[n]``, independent results of episodes.
        bounds: smallest and largest possible result, ``None`` if unknown.
        level: probability of covering the true mean, in (0, 1).

    Raises:
        ValueError: if there are too few values, they are not finite or out of bounds, or the level is out of range.
    """
    if len(values) >= MANY_EPISODES:
        return normal_interval(values, level=level)
    if bounds is not None:
        return empirical_bernstein_interval(values, low=bounds[0], high=bounds[1], level=level)
    return bootstrap_interval(values, level=level)


def sum_interval(estimates: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """Interval of a sum of independent quantities, from an interval of each (Zou and Donner 2008, "Construction of
    Confidence Limits about Effect Measures: A General Approach", equation 7): to each side, the distances between
    estimate and limit add up as standard deviations do ::

        low = sum_i x_i - sqrt(sum_i (x_i - low_i)^2),    high = sum_i x_i + sqrt(sum_i (high_i - x_i)^2)

    Of normal intervals this is the normal interval of the sum, whose variance is the sum of the variances.

    Args:
        estimates: ``x_i``, one for each quantity.
        intervals: ``(low_i, high_i)``, all of the same level, which is that of the result.
    """
    total = math.fsum(estimates)
    pairs = list(zip(estimates, intervals, strict=True))
    return (
        total - math.hypot(*(x - low for x, (low, _) in pairs)),
        total + math.hypot(*(high - x for x, (_, high) in pairs)),
    )


def normal_interval(values: np.ndarray, *, level: float = 0.95) -> Interval:
    """Interval of a mean by the central limit theorem: ``mean +- z sd / sqrt(n)``. For some hundred episodes or more.

    Args:
        values: ``[n]``, independent results of episodes, at least 2.
        level: probability of covering the true mean, in (0, 1).

    Raises:
        ValueError: if there are too few values, they are not finite, or the level is out of range.
    """
    values = _checked(values, level, needed=2, name="a normal interval")
    half = _quantile(level) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def empirical_bernstein_interval(values: np.ndarray, *, low: float, high: float, level: float = 0.95) -> Interval:
    """Interval of the mean of bounded results that holds for any number of them (Maurer and Pontil 2009, "Empirical
    Bernstein Bounds and Sample-Variance Penalization", theorem 4): with probability at least ``1 - delta`` ::

        E[Z] - mean <= sqrt(2 V ln(2 / delta) / n) + 7 ln(2 / delta) / (3 (n - 1))

    for ``Z`` in [0, 1] with sample variance ``V``; here on both sides with half of ``delta = 1 - level`` each.

    Args:
        values: ``[n]``, independent results of episodes, at least 2.
        low: smallest possible result.
        high: largest possible result.
        level: probability of covering the true mean, in (0, 1).

    Returns:
        The interval, cut to ``[low, high]``.

    Raises:
        ValueError: also if a value is out of the bounds.
    """
    values = _checked(values, level, needed=2, name="an empirical Bernstein interval")
    if not low < high:
        raise ValueError(f"low must be less than high, got {low} and {high}")
    if values.min() < low or values.max() > high:
        raise ValueError(f"values must be in [{low}, {high}], got some in [{values.min()}, {values.max()}]")
    width, n = high - low, len(values)
    log = math.log(4 / (1 - level))
    half = math.sqrt(2 * values.var(ddof=1) * log / n) + width * 7 * log / (3 * (n - 1))
    return max(low, float(values.mean() - half)), min(high, float(values.mean() + half))


def bootstrap_interval(values: np.ndarray, *, level: float = 0.95, resamples: int = 2_000, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of a mean over episodes (Efron 1979).

    Args:
        values: ``[n]``, independent results of episodes; differences of paired episodes are results too. There must be
            so many that a resample of equal values is rarer than a tail of the interval, 4 for 95 %.
        level: probability of covering the true mean, in (0, 1).
        resamples: number of means that are drawn.
        seed: of the draws; equal arguments give equal intervals.

    Raises:
        ValueError: if there are too few values, they are not finite, or the level is out of range.
    """
    _check_level(level)
    needed = next(n for n in range(2, 100) if float(n) ** -n < (1 - level) / 2)
    values = _checked(values, level, needed=needed, name="a bootstrap interval")
    rng = np.random.default_rng(seed)
    # One by one: all resamples of many episodes together would not fit into memory.
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def wilson_interval(successes: int, trials: int, *, level: float = 0.95) -> Interval:
    """Interval of a proportion (Wilson 1927), without continuity correction; good for few trials and near 0 and 1.

    Args:
        successes: number of successes.
        trials: number of independent trials, at least 1.
        level: probability of covering the true proportion, in (0, 1).

    Raises:
        ValueError: if the counts or the level are out of range.
    """
    _check_level(level)
    if trials < 1:
        raise ValueError(f"a Wilson interval needs at least 1 episode, got {trials}")
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be in [0, {trials}], got {successes}")
    z, share = _quantile(level), successes / trials
    scale = 1 + z**2 / trials
    centre = (share + z**2 / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    # Exactly 0 and 1 in theory, but not with rounding.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)


def newcombe_interval(
    successes: int, trials: int, other_successes: int, other_trials: int, *, level: float = 0.95
) -> Interval:
    """Interval of the difference of two independent proportions (Newcombe 1998, "Interval estimation for the difference
    between independent proportions", method 10), built of their Wilson intervals ``[l, u]`` and ``[l', u']`` ::

        (p - p') - sqrt((p - l)^2 + (u' - p')^2),    (p - p') + sqrt((u - p)^2 + (p' - l')^2)

    Args:
        successes: of the first proportion.
        trials: of the first proportion.
        other_successes: of the one that is subtracted.
        other_trials: of the one that is subtracted.
        level: probability of covering the true difference, in (0, 1).

    Raises:
        ValueError: as for :func:`wilson_interval`.
    """
    low, high = wilson_interval(successes, trials, level=level)
    other_low, other_high = wilson_interval(other_successes, other_trials, level=level)
    share, other_share = successes / trials, other_successes / other_trials
    difference = share - other_share
    return (
        difference - math.hypot(share - low, other_high - other_share),
        difference + math.hypot(high - share, other_share - other_low),
    )


def episodes_for_half_width(*, sd: float, half_width: float, level: float = 0.95) -> int:
    """Returns the episodes after which a normal interval has a half-width, ``(z sd / half_width)^2``, at least 2.

    Args:
        sd: standard deviation of the results of episodes.
        half_width: half of the length that the interval may have.
        level: probability of covering the true mean, in (0, 1).

    Raises:
        ValueError: if a number is out of range.
    """
    _check_level(level)
    if sd < 0 or half_width <= 0:
        raise ValueError(f"sd must not be negative and half_width positive, got {sd} and {half_width}")
    return max(2, math.ceil((_quantile(level) * sd / half_width) ** 2))


def hoeffding_episodes(*, epsilon: float, delta: float) -> int:
    """Returns the episodes after which the mean of results in [0, 1] is off by more than ``epsilon`` with probability
    at most ``delta`` (Hoeffding 1963, theorem 2, on both sides): ``n = ln(2 / delta) / (2 epsilon^2)``.

    For several means together, divide ``delta`` by their number.

    Raises:
        ValueError: if a number is out of (0, 1).
    """
    if not (0 < epsilon < 1 and 0 < delta < 1):
        raise ValueError(f"epsilon and delta must be in (0, 1), got {epsilon} and {delta}")
    return math.ceil(math.log(2 / delta) / (2 * epsilon**2))


def _quantile(level: float) -> float:
    """Returns ``z``, so that a standard normal number is within ``+-z`` with the probability ``level``."""
    return float(stats.norm.ppf((1 + level) / 2))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), such as 0.95, got {level}")


def _checked(values: np.ndarray, level: float, *, needed: int, name: str) -> np.ndarray:
    _check_level(level)
    values = np.asarray(values, np.float64)
    if values.ndim != 1:
        raise ValueError(f"values must be one a episode, [n], got the shape {values.shape}")
    if len(values) < needed:
        raise ValueError(f"{name} needs at least {needed} episodes, got {len(values)}: play more of them")
    if not np.isfinite(values).all():
        raise ValueError("values must be finite")
    return values
