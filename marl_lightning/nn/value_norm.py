"""Normalisation of value targets by running statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ValueNorm(nn.Module):
    """Debiased exponential moving mean and variance of returns (Yu et al. 2022, "value normalization").

    Args:
        decay: weight of the past at each update; 1 is excluded.
        epsilon: least variance.
    """

    def __init__(self, *, decay: float = 0.99999, epsilon: float = 1e-2):
        super().__init__()
        self.decay = decay
        self.epsilon = epsilon
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("square", torch.zeros(()))
        self.register_buffer("weight", torch.zeros(()))  # sum of the weights so far, for debiasing

    def _moments(self) -> tuple[Tensor, Tensor]:
        weight = self.weight.clamp(min=1e-12)
        mean = self.mean / weight
        variance = (self.square / weight - mean.square()).clamp(min=self.epsilon)
        seen = self.weight > 0
        return torch.where(seen, mean, 0.0), torch.where(seen, variance.sqrt(), 1.0)

    @torch.no_grad()
    def update(self, x: Tensor, weight: Tensor, reduce_sum: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Takes in ``x``, each entry weighted by ``weight`` of the same shape.

        ``reduce_sum`` sums over processes, so that all keep the same statistics.
        """
        sums = reduce_sum(torch.stack(((weight * x).sum(), (weight * x.square()).sum(), weight.sum().to(x.dtype))))
        mean, square = sums[:2] / sums[2].clamp(min=1)
        new = (1 - self.decay) * (sums[2] > 0)
        self.mean.lerp_(mean, new)
        self.square.lerp_(square, new)
        self.weight.lerp_(torch.ones_like(self.weight), new)

    def normalise(self, x: Tensor) -> Tensor:
        """Returns ``(x - mean) / std``; ``x`` itself before the first update."""
        mean, std = self._moments()
        return (x - mean) / std

    def denormalise(self, x: Tensor) -> Tensor:
        """Inverse of :meth:`normalise`."""
        mean, std = self._moments()
        return x * std + mean
