"""Action distributions: plain functions of tensors for acting, and heads that end a policy network.

No ``torch.distributions`` object is made: creating and validating one costs about as much as a small network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

from marl_lightning.nn.linear import AgentLinear

ILLEGAL_LOGIT = -1e8
"""Logit of an illegal action: its probability is exactly 0, and 0 times its log-probability is 0, not NaN."""


def choose(log_probs: Tensor, *, deterministic: bool, generator: torch.Generator | None) -> Tensor:
    """Returns the likeliest indices, or samples of them, ``[...]`` int64, from log-probabilities ``[..., n]``.

    Sampling is the Gumbel-max trick (Maddison et al. 2014) with exponential noise: ``argmax(log p - log e)``.
    """
    if deterministic:
        return log_probs.argmax(-1)
    noise = torch.empty_like(log_probs).exponential_(generator=generator)
    return (log_probs - noise.log_()).argmax(-1)


def log_prob_of(index: Tensor, log_probs: Tensor) -> Tensor:
    """Returns the entries ``[...]`` of ``log_probs`` ``[..., n]`` at ``index`` ``[...]``."""
    return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Returns the entropies ``[...]``, in nats, of normalised log-probabilities ``[..., n]``."""
    return -(log_probs.exp() * log_probs).sum(-1)


def kl_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns ``KL(p || q) = sum_a p(a) (log p(a) - log q(a))``, ``[...]`` in nats, of log-probabilities ``[..., n]``.

    Both must be finite, as :data:`ILLEGAL_LOGIT` makes them: what ``p`` never does then adds 0.
    """
    return (log_probs.exp() * (log_probs - reference)).sum(-1)


def gaussian_kl_divergence(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """Returns ``KL(p || q)``, ``[...]`` in nats, of diagonal Gaussians ``[..., d]``; ``q`` is the other one.

    ::

        KL = sum_d log(s_q / s_p) + (s_p^2 + (m_p - m_q)^2) / (2 s_q^2) - 1/2

    An invertible map of the samples, such as tanh, leaves it as it is.
    """
    log_ratio = log_std - other_log_std
    distance = (mean - other_mean) * (-other_log_std).exp()
    return (0.5 * ((2 * log_ratio).exp() + distance.square() - 1) - log_ratio).sum(-1)


class CategoricalHead(nn.Module):
    """Distribution over ``n`` actions of which some may be illegal.

    Args:
        in_features: size of the features.
        num_actions: ``n``.
        num_agents: see :class:`~marl_lightning.nn.linear.AgentLinear`.
        gain: of the initial weights; a small one starts nearly uniform.
    """

    def __init__(self, *, in_features: int, num_actions: int, num_agents: int | None = None, gain: float = 0.01):
        super().__init__()
        self.logits = AgentLinear(in_features=in_features, out_features=num_actions, num_agents=num_agents, gain=gain)

    def log_probs(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Returns normalised log-probabilities ``[..., n]``; ``mask`` ``[..., n]`` is True where legal."""
        return self._normalised(self.logits(features).float(), mask)

    def uniform(self, mask: Tensor) -> Tensor:
        """Returns what :meth:`log_probs` does if all legal actions are equally likely."""
        return self._normalised(torch.zeros(mask.shape, device=mask.device), mask)

    def _normalised(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            logits = logits.masked_fill(~mask, ILLEGAL_LOGIT)
        return torch.log_softmax(logits, -1)

    def probabilities(self, features: Tensor, mask: Tensor | None, *, deterministic: bool) -> Tensor:
        """Returns what :meth:`sample` draws from, ``[..., n]``; exactly 0 where illegal."""
        log_probs = self.log_probs(features, mask)
        return one_hot(log_probs.argmax(-1), log_probs.shape[-1]).float() if deterministic else log_probs.exp()

    def sample(
        self, features: Tensor, mask: Tensor | None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Returns actions ``[...]`` int64 and their log-probabilities ``[...]``."""
        log_probs = self.log_probs(features, mask)
        action = choose(log_probs, deterministic=deterministic, generator=generator)
        return action, log_prob_of(action, log_probs)

    def evaluate(self, features: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of ``action`` and the entropy, each ``[...]``."""
        log_probs = self.log_probs(features, mask)
        return log_prob_of(action, log_probs), entropy_of(log_probs)

    def distribution(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Returns all there is to know of the distribution, here :meth:`log_probs`, for :meth:`kl_divergence`."""
        return self.log_probs(features, mask)

    def kl_divergence(self, features: Tensor, mask: Tensor | None, reference: Tensor) -> Tensor:
        """Returns ``KL(pi || rho)`` ``[...]``, where ``reference`` is a :meth:`distribution` with the same mask."""
        return kl_divergence(self.log_probs(features, mask), reference)

    def env_action(self, action: Tensor) -> Tensor:
        """Actions are indices already."""
        return action


class MultiCategoricalHead(nn.Module):
    """Distribution over actions of ``P`` parts that are chosen independently, some choices of which may be illegal.

    One layer gives the logits of all parts, one part after another; the probability of an action is the product of
    those of its parts (Tavakoli et al. 2018, "Action Branching Architectures"; Huang and Ontanon 2022 for the masks).

    Args:
        in_features: size of the features.
        action_parts: numbers of choices of the parts, ``(n_1, ..., n_P)``; their sum is ``n``.
        num_agents: see :class:`~marl_lightning.nn.linear.AgentLinear`.
        gain: of the initial weights; a small one starts nearly uniform.
    """

    def __init__(
        self, *, in_features: int, action_parts: Sequence[int], num_agents: int | None = None, gain: float = 0.01
    ):
        super().__init__()
        sizes = torch.as_tensor(action_parts)
        self.logits = AgentLinear(
            in_features=in_features, out_features=int(sizes.sum()), num_agents=num_agents, gain=gain
        )
        # Parts are worked on together as rows of the longest one's length. Where each logit lies in these rows:
        choices = torch.arange(int(sizes.max()))
        self.rows = (len(sizes), len(choices))
        slots = (choices < sizes.unsqueeze(-1)).flatten().nonzero().squeeze(-1)
        self.register_buffer("slots", slots if len(slots) < math.prod(self.rows) else None, persistent=False)

    def log_probs(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Returns normalised log-probabilities ``[..., P, max(n_1, ..., n_P)]``; shorter parts end in illegal choices.

        ``mask`` ``[..., n]`` is True where legal and leaves every part a legal choice.
        """
        return self._normalised(self.logits(features).float(), mask)

    def uniform(self, mask: Tensor) -> Tensor:
        """Returns what :meth:`log_probs` does if all legal choices of a part are equally likely."""
        return self._normalised(torch.zeros(mask.shape, device=mask.device), mask)

    def _normalised(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            logits = logits.masked_fill(~mask, ILLEGAL_LOGIT)
        if self.slots is not None:
            filled = logits.new_full((*logits.shape[:-1], math.prod(self.rows)), ILLEGAL_LOGIT)
            logits = filled.index_copy(-1, self.slots, logits)
        return torch.log_softmax(logits.unflatten(-1, self.rows), -1)

    def sample(
        self, features: Tensor, mask: Tensor | None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Returns actions ``[..., P]`` int64 and their log-probabilities ``[...]``."""
        log_probs = self.log_probs(features, mask)
        action = choose(log_probs, deterministic=deterministic, generator=generator)
        return action, log_prob_of(action, log_probs).sum(-1)

    def evaluate(self, features: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of ``action`` ``[..., P]`` and the entropy, each ``[...]``."""
        log_probs = self.log_probs(features, mask)
        return log_prob_of(action, log_probs).sum(-1), entropy_of(log_probs).sum(-1)

    def distribution(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Returns all there is to know of the distribution, here :meth:`log_probs`, for :meth:`kl_divergence`."""
        return self.log_probs(features, mask)

    def kl_divergence(self, features: Tensor, mask: Tensor | None, reference: Tensor) -> Tensor:
        """Returns ``KL(pi || rho)`` ``[...]``, where ``reference`` is a :meth:`distribution` with the same mask."""
        return kl_divergence(self.log_probs(features, mask), reference).sum(-1)

    def env_action(self, action: Tensor) -> Tensor:
        """Actions are indices already."""
        return action


class GaussianHead(nn.Module):
    """Diagonal Gaussian with a state-independent standard deviation, optionally squashed by tanh.

    Its samples live in an unbounded space, and log-probabilities are densities of ``tanh(sample)`` if squashed, of
    the sample otherwise. :meth:`env_action` squashes (or clips) to [-1, 1] and scales to the bounds of the game.

    Args:
        in_features: size of the features.
        action_space: bounded box ``[d]``.
        num_agents: see :class:`~marl_lightning.nn.linear.AgentLinear`.
        gain: of the initial weights of the mean.
        squash: use tanh instead of clipping.
        initial_log_std: natural logarithm of the initial standard deviation.
    """

    def __init__(
        self,
        *,
        in_features: int,
        action_space: spaces.Box,
        num_agents: int | None = None,
        gain: float = 0.01,
        squash: bool = False,
        initial_log_std: float = -0.5,
    ):
        super().__init__()
        size = action_space.shape[0]
        self.squash = squash
        self.mean = AgentLinear(in_features=in_features, out_features=size, num_agents=num_agents, gain=gain)
        shape = (size,) if num_agents is None else (num_agents, size)
        self.log_std = nn.Parameter(torch.full(shape, initial_log_std))
        low, high = torch.from_numpy(action_space.low), torch.from_numpy(action_space.high)
        self.register_buffer("centre", (high + low) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2, persistent=False)

    def sample(
        self, features: Tensor, mask: None, *, deterministic: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Returns samples ``[..., d]`` before squashing and their log-probabilities ``[...]``."""
        mean = self.mean(features).float()
        if deterministic:
            return mean, self.log_prob(mean, mean)
        noise = torch.empty_like(mean).normal_(generator=generator)
        action = mean + self.log_std.exp() * noise
        return action, self.log_prob(mean, action)

    def log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        """Returns ``[...]``, summed over action dimensions."""
        z = (action - mean) * (-self.log_std).exp()
        log_prob = -0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        if self.squash:
            log_prob = log_prob - _log_tanh_slope(action)
        return log_prob.sum(-1)

    def evaluate(self, features: Tensor, action: Tensor, mask: None) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of ``action`` and the entropy, each ``[...]``.

        The entropy of a squashed Gaussian has no closed form: the correction is estimated with one fresh sample.
        """
        mean = self.mean(features).float()
        entropy = 0.5 * math.log(2 * math.pi * math.e) + self.log_std.expand_as(mean)
        if self.squash:
            entropy = entropy + _log_tanh_slope(mean + self.log_std.exp() * torch.randn_like(mean))
        return self.log_prob(mean, action), entropy.sum(-1)

    def distribution(self, features: Tensor, mask: None) -> Tensor:
        """Returns all there is to know of the distribution: means and log standard deviations ``[..., 2 d]``."""
        mean = self.mean(features).float()
        return torch.cat((mean, self.log_std.expand_as(mean)), -1)

    def kl_divergence(self, features: Tensor, mask: None, reference: Tensor) -> Tensor:
        """Returns ``KL(pi || rho)`` ``[...]``, where ``reference`` is a :meth:`distribution`."""
        return gaussian_kl_divergence(self.mean(features).float(), self.log_std, *reference.chunk(2, -1))

    def env_action(self, action: Tensor) -> Tensor:
        """Maps samples to the box of the game."""
        unit = action.tanh() if self.squash else action.clamp(-1, 1)
        return self.centre + self.half_range * unit


def _log_tanh_slope(x: Tensor) -> Tensor:
    """``log(d tanh(x) / dx)`` without cancellation for large ``|x|`` (Haarnoja et al. 2018, appendix C)."""
    return 2 * (math.log(2) - x - softplus(-2 * x))
