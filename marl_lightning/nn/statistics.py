"""Weighted means and variances, over entries that count and over processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """``sum(w * x) / max(sum(w), 1)``: the mean of every loss and statistic, 0 if nothing counts."""
    return (weight * x).sum() / weight.sum().clamp(min=1)


def weighted_moments(
    x: Tensor, weight: Tensor, reduce_sum: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum of the weights, the weighted mean and the weighted variance of ``x``.

    The variance is taken around the mean, in a second pass: the difference of squares would cancel in float32.
    ``reduce_sum`` sums over processes, so that all get the same moments; it is called twice.
    """
    total, first = reduce_sum(torch.stack((weight.sum(), (weight * x).sum())))
    mean = first / total.clamp(min=1)
    second = reduce_sum((weight * (x - mean).square()).sum())
    return total, mean, second / total.clamp(min=1)
