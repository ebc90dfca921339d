"""Losses of distributional Q-learning: returns are random, and their whole distribution is learned.

Bellemare, Dabney and Munos 2017, "A Distributional Perspective on Reinforcement Learning" (C51); Dabney et al. 2018,
"Distributional Reinforcement Learning with Quantile Regression" (QR-DQN).
"""

from __future__ import annotations

import torch
from torch import Tensor


def categorical_projection(*, position: Tensor, probability: Tensor, support: Tensor) -> Tensor:
    """Moves probability that lies anywhere onto the atoms of an evenly spaced support (C51, equation 7).

    Each piece is shared by the two atoms around it, the nearer one getting more; what lies outside goes to the ends.
    The mean of what lies inside stays the same.

    Args:
        position: ``[..., K]``, where the probability lies, in units of returns.
        probability: ``[..., K]``, at least 0.
        support: ``[M]``, rising by the same amount from atom to atom, at least 2.

    Returns:
        ``[..., M]``, summing to what ``probability`` sums to.
    """
    position, probability = torch.broadcast_tensors(position, probability)
    low, last = support[0], len(support) - 1
    index = (position.clamp(low, support[-1]) - low) * (last / (support[-1] - low))
    lower = index.floor().clamp(max=last)
    share = index - lower
    lower = lower.long()
    projected = probability.new_zeros(*probability.shape[:-1], len(support))
    projected.scatter_add_(-1, lower, probability * (1 - share))
    return projected.scatter_add_(-1, (lower + 1).clamp(max=last), probability * share)


def categorical_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the cross-entropies ``[...]`` of target probabilities ``[..., M]`` and logits ``[..., M]``."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def quantile_midpoints(count: int, device: torch.device | None = None) -> Tensor:
    """Returns the levels ``(2 i + 1) / (2 count)``, ``i = 0, 1, ...``, at which quantiles are learned."""
    return (torch.arange(count, device=device) + 0.5) / count


def quantile_huber_loss(quantile: Tensor, target: Tensor, *, huber_delta: float = 1.0) -> Tensor:
    """Quantile regression with the Huber loss (QR-DQN, equation 10).

    ::

        u_ij = target_j - quantile_i,    sum_i mean_j |tau_i - 1(u_ij < 0)| L(u_ij) / delta

    Args:
        quantile: ``[..., M]``, at the levels of :func:`quantile_midpoints`.
        target: ``[..., K]``, equally likely.
        huber_delta: error above which ``L`` is linear, in units of returns.

    Returns:
        ``[...]``.
    """
    error = target.unsqueeze(-2) - quantile.unsqueeze(-1)
    size = error.abs()
    huber = torch.where(size <= huber_delta, error.square() / (2 * huber_delta), size - huber_delta / 2)
    level = quantile_midpoints(quantile.shape[-1], quantile.device).unsqueeze(-1)
    return ((level - (error < 0).float()).abs() * huber).mean(-1).sum(-1)
