"""Targets and losses of temporal-difference learning, over time-major tensors.

In all of them the true successor is bootstrapped unless the game was over (``terminated``), and traces are cut where an
episode ended in whatever way (``done``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from marl_lightning.nn.statistics import weighted_mean

ILLEGAL_VALUE = -1e10
"""What an illegal action seems to be worth when the best one is looked for."""


def greedy_action(value: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns the legal actions of the largest value, ``[...]`` int64, from ``[..., n]``; the first of equal ones."""
    if action_mask is not None:
        value = value.masked_fill(~action_mask, ILLEGAL_VALUE)
    return value.argmax(-1)


def take(value: Tensor, action: Tensor) -> Tensor:
    """Returns the values ``[...]`` of actions ``[...]`` from ``[..., n]``."""
    return value.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def one_step_target(*, reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """``r_t + gamma (1 - terminated_t) V(s'_t)`` (Watkins 1989).

    Args:
        reward: ``[T, ...]``.
        next_value: ``[T, ...]``, values of the true successors; ignored where terminated.
        terminated: ``[T, ...]`` bool, broadcastable.
        gamma: discount in [0, 1].
    """
    return reward + gamma * torch.where(terminated, 0.0, next_value)


def n_step_target(
    *, reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, steps: int
) -> Tensor:
    """Sums up to ``steps`` rewards and bootstraps from there (Sutton and Barto 2018, equation 7.1).

    ::

        G^1_t = r_t + gamma (1 - terminated_t) V(s'_t)
        G^n_t = r_t + gamma G^{n-1}_{t+1}    if the episode goes on and step t + 1 is there, else G^1_t

    Args:
        reward: ``[T, ...]``.
        next_value: ``[T, ...]``, values of the true successors; ignored where terminated.
        terminated: ``[T, ...]`` bool, broadcastable.
        done: ``[T, ...]`` bool, step ``t + 1`` does not continue the episode of step ``t``, or is padding.
        gamma: discount in [0, 1].
        steps: number of rewards, at least 1.
    """
    one_step = target = one_step_target(reward=reward, next_value=next_value, terminated=terminated, gamma=gamma)
    goes_on = ~done[:-1]
    for _ in range(steps - 1):
        longer = torch.where(goes_on, reward[:-1] + gamma * target[1:], one_step[:-1])
        target = torch.cat((longer, one_step[-1:]))
    return target


def td_lambda_target(
    *, reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, td_lambda: float
) -> Tensor:
    """Mixes targets of all lengths (Sutton and Barto 2018, section 12.1), within what is there.

    ::

        G_t = r_t + gamma (1 - terminated_t) [(1 - lambda) V(s'_t) + lambda G_{t+1}]

    where ``G_{t+1}`` is ``V(s'_t)`` at the end of an episode or of the sequence: a truncated episode is bootstrapped in
    full. Arguments as for :func:`n_step_target`.
    """
    target = one_step_target(reward=reward, next_value=next_value, terminated=terminated, gamma=gamma)
    trace = gamma * td_lambda * (~done).to(target.dtype)
    for t in range(len(target) - 2, -1, -1):
        target[t] += trace[t] * (target[t + 1] - next_value[t])
    return target


def td_loss(
    error: Tensor,
    weight: Tensor,
    *,
    importance: Tensor | None = None,
    huber_delta: float | None = None,
    separate: bool = False,
) -> Tensor:
    """Returns the mean of squared errors, or of Huber losses that are linear above ``huber_delta``, over what counts.

    Args:
        error: ``[..., A]``, value minus target.
        weight: broadcastable: 0 for what does not count, else 1.
        importance: broadcastable factors of the losses, of draws by priority. They do not count in the mean's
            denominator (Schaul et al. 2016, algorithm 1).
        huber_delta: ``None`` for the squared error ``e^2``; else ``e^2 / 2`` below it and ``delta (|e| - delta / 2)``
            above it.
        separate: take a mean for each entry of the last axis and add them up, so that learners that share nothing do
            not scale each other's gradients.
    """
    if huber_delta is None:
        loss = error.square()
    else:
        loss = huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)
    if importance is not None:
        loss = loss * importance
    weight = weight.expand_as(loss)
    if not separate:
        return weighted_mean(loss, weight)
    axes = tuple(range(loss.dim() - 1))
    return ((weight * loss).sum(axes) / weight.sum(axes).clamp(min=1)).sum()
