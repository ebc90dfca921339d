"""Losses of proximal policy optimisation, as pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marl_lightning.nn.statistics import weighted_mean, weighted_moments


def normalise_advantage(
    advantage: Tensor,
    weight: Tensor,
    reduce_sum: Callable[[Tensor], Tensor] = lambda x: x,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Shifts and scales advantages to mean 0 and standard deviation 1 over the entries that count.

    Args:
        advantage: any shape.
        weight: same shape, 1 for entries that count, 0 for others.
        reduce_sum: sums over processes, so that the moments are those of all data.
        epsilon: added to the standard deviation.

    Returns:
        The advantages, and the scalar by which they were divided: what is weighed against them in units of reward has
        to be divided by it too.
    """
    _, mean, variance = weighted_moments(advantage, weight, reduce_sum)
    scale = variance.sqrt() + epsilon
    return (advantage - mean) / scale, scale


def clipped_policy_loss(
    *, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, weight: Tensor, clip_ratio: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate objective (Schulman et al. 2017, equation 7), negated.

    Args:
        log_prob: ``[...]``, of the stored actions under the current policy.
        old_log_prob: ``[...]``, as of collection time.
        advantage: ``[...]``.
        weight: ``[...]``, 1 where the agent acted, 0 elsewhere.
        clip_ratio: half width of the clipping interval around 1.

    Returns:
        The scalar loss, and diagnostics: ``approx_kl`` (the estimator ``(r - 1) - log r``) and ``clip_fraction``.
    """
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantage)
    with torch.no_grad():
        diagnostics = {
            "approx_kl": weighted_mean(ratio - 1 - log_ratio, weight),
            "clip_fraction": weighted_mean(((ratio - 1).abs() > clip_ratio).to(ratio.dtype), weight),
        }
    return -weighted_mean(surrogate, weight), diagnostics


def clipped_value_loss(
    *,
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    weight: Tensor,
    clip: float | None,
    huber_delta: float | None,
) -> Tensor:
    """Value loss with optional clipping (Schulman et al. 2017, reference code) and Huber error (Yu et al. 2022).

    All of ``value``, ``old_value`` and ``target`` are on the scale of the network's output.

    Args:
        value: ``[...]``, current prediction.
        old_value: ``[...]``, prediction at collection time.
        target: ``[...]``, return.
        weight: ``[...]``.
        clip: the prediction may profit from moving away from ``old_value`` by this much; ``None`` does not clip.
        huber_delta: error above which the loss is linear; ``None`` is the squared error.

    Returns:
        Scalar, half the squared error where it is quadratic.
    """

    def error(prediction: Tensor) -> Tensor:
        if huber_delta is None:
            return 0.5 * (prediction - target).square()
        return torch.nn.functional.huber_loss(prediction, target, reduction="none", delta=huber_delta)

    loss = error(value)
    if clip is not None:
        loss = torch.maximum(loss, error(old_value + (value - old_value).clamp(-clip, clip)))
    return weighted_mean(loss, weight)
