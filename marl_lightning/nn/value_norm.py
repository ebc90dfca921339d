"""Normalisation of value targets by running statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from marl_lightning.nn.statistics import weighted_moments


class ValueNorm(nn.Module):
    """Debiased exponential moving mean and variance of returns (Yu et al. 2022, "value normalization").

    Mean and variance are moved to those of a batch by a share of ``(1 - decay) / (1 - decay**n)`` in the ``n``-th
    update, which is debiasing without dividing at every use.

    Args:
        decay: weight of the past at each update; 1 is excluded.
        epsilon: least variance.
    """

    def __init__(self, *, decay: float = 0.99999, epsilon: float = 1e-2):
        super().__init__()
        self.decay = decay
        self.epsilon = epsilon
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("weight", torch.zeros(()))  # of all batches so far: 1 - decay**n

    @torch.no_grad()
    def update(self, x: Tensor, weight: Tensor, reduce_sum: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Takes in ``x``, each entry weighted by ``weight`` of the same shape.

        ``reduce_sum`` sums over processes, so that all keep the same statistics.
        """
        total, mean, variance = weighted_moments(x, weight, reduce_sum)
        something = (total > 0).to(self.weight.dtype)
        self.weight.lerp_(torch.ones_like(self.weight), (1 - self.decay) * something)
        share = something * (1 - self.decay) / self.weight.clamp(min=1e-12)
        step = mean - self.mean
        self.variance.lerp_(variance, share).add_(share * (1 - share) * step.square())
        self.mean.add_(share * step)

    @property
    def _std(self) -> Tensor:
        return self.variance.clamp(min=self.epsilon).sqrt()

    def normalise(self, x: Tensor) -> Tensor:
        """Returns ``(x - mean) / std``; ``x`` itself before the first update."""
        return (x - self.mean) / self._std

    def denormalise(self, x: Tensor) -> Tensor:
        """Inverse of :meth:`normalise`."""
        return x * self._std + self.mean
