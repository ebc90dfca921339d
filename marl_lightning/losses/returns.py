"""Returns and advantages over time-major tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantage_estimate(
    *,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16) with termination and truncation apart.

    ::

        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}

    where ``s'_t`` is the true successor, also at the end of an episode. The trace is cut wherever an episode ended;
    the bootstrap vanishes only where the game was over.

    Args:
        reward: ``[T, ...]``.
        value: ``[T, ...]``, values of the states before the steps.
        next_value: ``[T, ...]``, values of the true successors; ignored where terminated.
        terminated: ``[T, ...]`` bool, broadcastable.
        done: ``[T, ...]`` bool, terminated or truncated.
        gamma: discount in [0, 1].
        gae_lambda: trace decay in [0, 1].

    Returns:
        Advantages ``[T, ...]``. The returns for value learning are ``advantages + value``.
    """
    bootstrap = torch.where(terminated, 0.0, next_value)
    advantage = torch.add(reward, bootstrap, alpha=gamma).sub_(value)
    trace = (gamma * gae_lambda) * (~done).to(advantage.dtype)
    for t in range(len(advantage) - 2, -1, -1):
        advantage[t].addcmul_(trace[t], advantage[t + 1])
    return advantage
