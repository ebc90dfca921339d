"""How an agent values its own actions when the others' may respond to them: probabilistic recursive reasoning.

An agent that learns ``Q(a, o)`` of its own action ``a`` and the others' joint action ``o`` needs ``F(a)``, the value of
``a`` alone, to act and to bootstrap (Wen et al. 2019, "Probabilistic recursive reasoning for multi-agent reinforcement
learning").

Values of what the others may do lie on the last axis in *parts*. One part of ``M`` entries enumerates all joint
actions. Several parts, one for each of the others, stand for values that are sums, ``Q(a, o) = sum_j Q_j(a, o_j)``, and
for responses that are products: all functions below are exact for these too, without enumerating anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Aggregate = Literal["lme", "lse", "expectation"]


def encode(actions: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the number ``[...]`` of joint actions ``[..., J]``, in mixed radix: the first one counts most.

    Args:
        actions: int64, ``0 <= actions[..., j] < sizes[j]``.
        sizes: numbers of actions. Without any there is one joint action, 0.
    """
    index = torch.zeros(actions.shape[:-1], dtype=torch.int64, device=actions.device)
    for j, size in enumerate(sizes):
        index = index * size + actions[..., j]
    return index


def decode(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the joint actions ``[..., J]`` of numbers ``[...]``: the inverse of :func:`encode`."""
    digits = []
    for size in reversed(sizes):
        digits.append(index % size)
        index = index // size
    return torch.stack(digits[::-1], -1) if digits else index.new_zeros(*index.shape, 0)


def soft_value(
    value: Tensor,
    parts: Sequence[int],
    *,
    temperature: float,
    aggregate: Aggregate = "lme",
    mask: Tensor | None = None,
) -> Tensor:
    """Returns what an action is worth if the others respond by ``softmax(Q / temperature)``.

    This is theorem 1 of Wen et al. (2019), up to a constant.

    With ``alpha`` for the temperature and ``M`` for the number of joint actions::

        lse          alpha log sum_o exp(Q(a, o) / alpha), as in the paper
        lme          the same less alpha log M: the mean instead of the sum
        expectation  sum_o softmax(Q(a, o) / alpha) Q(a, o)

    The first two order actions equally, but the sum grows by ``alpha log M`` with every step that is bootstrapped. Both
    are non-expansions in the largest difference, the expectation is not. All are optimistic: they tend to the maximum
    over ``o`` for a small temperature.

    Args:
        value: ``[..., sum(parts)]``.
        parts: see the module.
        temperature: ``alpha``, positive, in units of the values.
        aggregate: one of the three.
        mask: ``[..., sum(parts)]`` bool, what the others may do; a part without any may be anything.
    """
    masks = [None] * len(parts) if mask is None else mask.split(list(parts), -1)
    total = 0.0
    for part, allowed in zip(value.split(list(parts), -1), masks, strict=True):
        total = total + _soft_part(part, temperature, aggregate, allowed)
    return total


def _soft_part(value: Tensor, temperature: float, aggregate: Aggregate, mask: Tensor | None) -> Tensor:
    if value.shape[-1] == 1:  # nothing to choose from: exact, where logarithms of exponentials would round
        return value.squeeze(-1)
    logits, count = value / temperature, value.shape[-1]
    if mask is not None:
        mask = mask | ~mask.any(-1, keepdim=True)
        logits, count = logits.masked_fill(~mask, -torch.inf), mask.sum(-1).to(value.dtype)
    if aggregate == "expectation":
        return (torch.softmax(logits, -1) * value).sum(-1)
    total = temperature * logits.logsumexp(-1)
    if aggregate == "lse":
        return total
    return total - temperature * (count.log() if isinstance(count, Tensor) else math.log(count))


def expected_value(value: Tensor, logits: Tensor, parts: Sequence[int]) -> Tensor:
    """Returns ``sum_o p(o) Q(o)``, ``[...]``, with ``p = softmax(logits)`` in every part.

    Args:
        value: ``[..., sum(parts)]``.
        logits: broadcastable to it.
        parts: see the module.
    """
    total = 0.0
    for part, response in zip(value.split(list(parts), -1), logits.split(list(parts), -1), strict=True):
        total = total + (part.squeeze(-1) if part.shape[-1] == 1 else (torch.softmax(response, -1) * part).sum(-1))
    return total


def value_of(value: Tensor, index: Tensor, parts: Sequence[int]) -> Tensor:
    """Returns the values ``[...]`` of what the others did.

    Args:
        value: ``[..., sum(parts)]``.
        index: ``[..., P]`` int64, what happened in each part.
        parts: see the module.
    """
    total = 0.0
    for part, chosen in zip(value.split(list(parts), -1), index.split(1, -1), strict=True):
        total = total + part.gather(-1, chosen).squeeze(-1)
    return total


def response_log_prob(logits: Tensor, index: Tensor, parts: Sequence[int]) -> Tensor:
    """Returns the log-probabilities ``[...]`` of what the others did; arguments as for :func:`value_of`."""
    normalised = [part.log_softmax(-1) for part in logits.split(list(parts), -1)]
    return value_of(torch.cat(normalised, -1), index, parts)


def draw_responses(logits: Tensor, points: Tensor, parts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draws what the others do, by inverting the distribution functions at given points.

    Args:
        logits: ``[..., sum(parts)]`` of the responses.
        points: ``[K, P]`` in [0, 1).
        parts: see the module.

    Returns:
        Indices ``[K, ..., P]`` int64 and their log-probabilities ``[K, ...]``.
    """
    indices, log_prob = [], 0.0
    for part, point in zip(logits.split(list(parts), -1), points.unbind(-1), strict=True):
        normalised = part.log_softmax(-1)
        reached = normalised.exp().cumsum(-1) <= point.view(-1, *[1] * part.dim())
        index = reached.sum(-1).clamp(max=part.shape[-1] - 1)  # the last sum may be rounded to below 1
        indices.append(index)
        log_prob = log_prob + normalised.expand(len(points), *part.shape).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.stack(indices, -1), log_prob


def sampled_soft_value(
    value: Tensor, log_prob: Tensor, num_joint: float, *, temperature: float, aggregate: Aggregate = "lme"
) -> Tensor:
    """Estimates :func:`soft_value` from ``K`` joint actions that were drawn from other probabilities.

    With importance weights, the sum inside the logarithm is estimated without bias; its logarithm therefore is too
    small on average, less so with more samples.

    Args:
        value: ``[K, ...]`` of the joint actions that were drawn.
        log_prob: ``[K, ...]`` with which these were drawn.
        num_joint: ``M``, how many there are.
        temperature: see :func:`soft_value`.
        aggregate: see :func:`soft_value`.
    """
    logits = value / temperature - log_prob
    if aggregate == "expectation":
        return (torch.softmax(logits, 0) * value).sum(0)
    log_count = math.log(len(value)) + (math.log(num_joint) if aggregate == "lme" else 0.0)
    return temperature * (logits.logsumexp(0) - log_count)
