"""Mixing networks: how the values of agents make up the value of the team. Plain modules, no learning in them.

A mixer maps the values of the chosen actions ``[..., A]`` and the global state ``[..., S]`` to joint values
``[..., 1]``. A *monotonic* one never falls when an agent's value rises, so that the agents' own best actions are the
best joint action.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import elu


class SumMixer(nn.Module):
    """``Q_tot = sum_i Q_i`` (VDN, Sunehag et al. 2018)."""

    def forward(self, value: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., 1]``; the state is not looked at."""
        return value.sum(-1, keepdim=True)


class MonotonicMixer(nn.Module):
    """A two-layer network over the agents' values whose weights are made, non-negative, from the state (QMIX).

    ::

        Q_tot = w_2(s)^T elu(W_1(s)^T q + b_1(s)) + v(s),    W_1, w_2 >= 0

    Rashid et al. 2018, section 4. The biases may have any sign.

    Args:
        num_agents: ``A``.
        state_size: ``S``, at least 1.
        embedding_size: width of the hidden layer.
        hypernet_size: hidden width of the networks that make ``W_1`` and ``w_2``; ``None`` makes them linear, as in the
            paper.

    Raises:
        ValueError: if there is no state.
    """

    def __init__(self, *, num_agents: int, state_size: int, embedding_size: int = 32, hypernet_size: int | None = None):
        super().__init__()
        if state_size < 1:
            raise ValueError("a mixer needs a global state, but the environment has none: use VDN or IQL instead")
        self.num_agents = num_agents
        self.embedding_size = embedding_size
        self.first_weight = _hypernet(state_size, num_agents * embedding_size, hypernet_size)
        self.first_bias = nn.Linear(state_size, embedding_size)
        self.second_weight = _hypernet(state_size, embedding_size, hypernet_size)
        self.offset = _hypernet(state_size, 1, embedding_size)

    def forward(self, value: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., 1]``."""
        first_weight = self.first_weight(state).abs().unflatten(-1, (self.num_agents, self.embedding_size))
        hidden = elu((value.unsqueeze(-2) @ first_weight).squeeze(-2) + self.first_bias(state))
        second_weight = self.second_weight(state).abs()
        return (hidden * second_weight).sum(-1, keepdim=True) + self.offset(state)


def _hypernet(in_features: int, out_features: int, hidden_size: int | None) -> nn.Module:
    if hidden_size is None:
        return nn.Linear(in_features, out_features)
    return nn.Sequential(nn.Linear(in_features, hidden_size), nn.ReLU(), nn.Linear(hidden_size, out_features))


def one_hot(action: Tensor, num_actions: int) -> Tensor:
    """Returns ``[..., n]`` float32 from actions ``[...]`` int64."""
    return torch.nn.functional.one_hot(action, num_actions).float()
