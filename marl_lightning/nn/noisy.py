"""Linear layers with learned noise, which explore by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from marl_lightning.nn.linear import AgentLinear


class NoisyLinear(nn.Module):
    """Affine map whose weights are drawn anew whenever it is used (Fortunato et al. 2018, factorised noise).

    ::

        W = mean_W + scale_W * f(e_out) f(e_in)^T,    b = mean_b + scale_b * f(e_out),    f(e) = sign(e) sqrt(|e|)

    Every row of the input has noise of its own: since the noise is factorised, this is one more product and no weights
    are made. Without noise (:func:`noise`) it is the affine map of the means.

    Args:
        in_features: size of the last axis of the input.
        out_features: size of the last axis of the output.
        num_agents: see :class:`~marl_lightning.nn.linear.AgentLinear`.
        gain: of the means.
        initial_noise: ``sigma_0``; the scales start at ``sigma_0 / sqrt(in_features)``.
    """

    def __init__(
        self,
        *,
        in_features: int,
        out_features: int,
        num_agents: int | None = None,
        gain: float = 1.0,
        initial_noise: float = 0.5,
    ):
        super().__init__()
        size = {"in_features": in_features, "out_features": out_features, "num_agents": num_agents}
        self.mean, self.scale = AgentLinear(**size, gain=gain), AgentLinear(**size)
        for parameter in self.scale.parameters():
            nn.init.constant_(parameter, initial_noise / math.sqrt(in_features))
        self.is_noisy = True
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.mean(x)
        if not self.is_noisy:
            return out
        return out + self._noise(out) * self.scale(x * self._noise(x))

    def _noise(self, like: Tensor) -> Tensor:
        e = torch.empty_like(like).normal_(generator=self.generator)
        return e.sign() * e.abs().sqrt()


@contextmanager
def noise(module: nn.Module, *, enabled: bool, generator: torch.Generator | None = None) -> Iterator[None]:
    """Switches the noise of all :class:`NoisyLinear` on or off for a while and draws it from ``generator``."""
    layers = [layer for layer in module.modules() if isinstance(layer, NoisyLinear)]
    before = [(layer.is_noisy, layer.generator) for layer in layers]
    for layer in layers:
        layer.is_noisy, layer.generator = enabled, generator
    try:
        yield
    finally:
        for layer, (was_noisy, old) in zip(layers, before, strict=True):
            layer.is_noisy, layer.generator = was_noisy, old
