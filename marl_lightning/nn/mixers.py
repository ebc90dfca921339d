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

    Rashid et al. 2018, section 4. The biases may have any sign. They start at 0, so that the value of the team starts
    at about 0 where those of the agents do, however large the entries of the state are.

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
        require_state(state_size)
        self.num_agents = num_agents
        self.embedding_size = embedding_size
        self.first_weight = _hypernet(state_size, num_agents * embedding_size, hypernet_size)
        self.first_bias = nn.Linear(state_size, embedding_size)
        self.second_weight = _hypernet(state_size, embedding_size, hypernet_size)
        self.offset = _hypernet(state_size, 1, embedding_size)
        for layer in (self.first_bias, self.offset[-1]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, value: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., 1]``."""
        first_weight = self.first_weight(state).abs().unflatten(-1, (self.num_agents, self.embedding_size))
        # Thousands of products of a small matrix each: a sum is faster than a batched product.
        hidden = elu((value.unsqueeze(-1) * first_weight).sum(-2) + self.first_bias(state))
        second_weight = self.second_weight(state).abs()
        return (hidden * second_weight).sum(-1, keepdim=True) + self.offset(state)


class UnrestrictedMixer(nn.Module):
    """A plain network over the agents' values and the state, which may fall in any of them (weighted QMIX).

    Three hidden layers and an offset by the state, as in Rashid et al. 2020, "Weighted QMIX", appendix.

    Args:
        num_agents: ``A``.
        state_size: ``S``, at least 1.
        hidden_size: width of the hidden layers.
        embedding_size: hidden width of the offset.
    """

    def __init__(self, *, num_agents: int, state_size: int, hidden_size: int = 256, embedding_size: int = 32):
        super().__init__()
        require_state(state_size)
        sizes = (num_agents + state_size, hidden_size, hidden_size, hidden_size)
        layers = [layer for i in range(3) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(hidden_size, 1))
        self.offset = _hypernet(state_size, 1, embedding_size)

    def forward(self, value: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., 1]``."""
        return self.network(torch.cat((value, state), -1)) + self.offset(state)


class AttentionMixer(nn.Module):
    """Weighted sums of the agents' values, the weights coming from attention (Qatten, Yang et al. 2020).

    ::

        Q_tot = c(s) + sum_h w_h(s) sum_i softmax_i(<query_h(s), key_hi(s)> / sqrt(d)) Q_i,    w_h >= 0

    In the paper, the key of an agent is a linear map of the part of the state that describes it. Which part that is
    is not known in general, so that here every agent has a linear map of the whole state.

    Args:
        num_agents: ``A``.
        state_size: ``S``, at least 1.
        num_heads: ``h``.
        embedding_size: ``d``; also the hidden width of the offset ``c``.
        hypernet_size: hidden width of the networks that make queries and ``w``.
    """

    def __init__(
        self,
        *,
        num_agents: int,
        state_size: int,
        num_heads: int = 4,
        embedding_size: int = 32,
        hypernet_size: int | None = 64,
    ):
        super().__init__()
        require_state(state_size)
        self.heads = (num_heads, embedding_size)
        self.keys_shape = (num_heads, num_agents, embedding_size)
        self.query = _hypernet(state_size, num_heads * embedding_size, hypernet_size)
        self.key = nn.Linear(state_size, num_heads * num_agents * embedding_size, bias=False)
        self.head_weight = _hypernet(state_size, num_heads, hypernet_size)
        self.offset = _hypernet(state_size, 1, embedding_size)

    def forward(self, value: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., 1]``."""
        query = self.query(state).unflatten(-1, self.heads).unsqueeze(-2)
        key = self.key(state).unflatten(-1, self.keys_shape)
        attention = torch.softmax((query * key).sum(-1) / self.heads[1] ** 0.5, -1)  # [..., h, A]
        heads = (attention @ value.unsqueeze(-1)).squeeze(-1)
        return (self.head_weight(state).abs() * heads).sum(-1, keepdim=True) + self.offset(state)


class DuplexDuelingMixer(nn.Module):
    """Values and advantages of the team from those of the agents (QPLEX, Wang et al. 2021).

    ::

        Q'_i = w_i(s) Q_i + b_i(s),    V'_i = max_a Q'_i(a),    A'_i = Q'_i - V'_i <= 0
        Q_tot = sum_i V'_i + sum_i lambda_i(s, u) A'_i
        lambda_i = sum_k key_k(s) agent_ki(s) action_ki(s, u),    all of them and w positive

    so that all joint value functions whose best action is made of the agents' best ones can be represented, and no
    others. It is computed as ``sum_i Q'_i + sum_i (lambda_i - 1) A'_i``, where ``A'`` has no gradient in the second
    sum.

    Args:
        num_agents: ``A``.
        num_actions: length of ``u``, the actions of all agents one-hot.
        state_size: ``S``, at least 1.
        num_heads: ``k``.
        hypernet_size: hidden width of all the networks of the state.
    """

    def __init__(
        self, *, num_agents: int, num_actions: int, state_size: int, num_heads: int = 4, hypernet_size: int | None = 64
    ):
        super().__init__()
        require_state(state_size)
        self.shape = (num_heads, num_agents)
        self.weight = _hypernet(state_size, num_agents, hypernet_size)
        self.bias = _hypernet(state_size, num_agents, hypernet_size)
        self.key = _hypernet(state_size, num_heads, hypernet_size)
        self.agent = _hypernet(state_size, num_heads * num_agents, hypernet_size)
        self.action = _hypernet(state_size + num_actions, num_heads * num_agents, hypernet_size)

    def forward(self, value: Tensor, best: Tensor, action: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., 1]``.

        Args:
            value: ``[..., A]``, of the actions that are asked for.
            best: ``[..., A]``, of the agents' best legal actions.
            action: ``[..., num_actions]``, those that are asked for.
            state: ``[..., S]``.
        """
        weight = self.weight(state).abs() + 1e-10
        advantage = (weight * (value - best)).detach()
        importance = self.importance(action, state)
        total = weight * value + self.bias(state) + (importance - 1) * advantage
        return total.sum(-1, keepdim=True)

    def importance(self, action: Tensor, state: Tensor) -> Tensor:
        """Returns ``lambda`` ``[..., A]``."""
        key = self.key(state).abs().unsqueeze(-1) + 1e-10
        agent = self.agent(state).sigmoid().unflatten(-1, self.shape)
        chosen = self.action(torch.cat((state, action), -1)).sigmoid().unflatten(-1, self.shape)
        return (key * agent * chosen).sum(-2)


class ShapleyMixer(nn.Module):
    """Weights the values of actions that are not an agent's best (SHAQ, Wang et al. 2022).

    ::

        Q_tot = sum_i delta_i Q_i,    delta_i = 1 for the best action of agent i, alpha_i(s, u) for others
        alpha_i = 1 + mean_m |F_s(mean of Q_j over the coalition before i in permutation m, Q_i)|

    where ``F_s`` is a network like that of :class:`MonotonicMixer`. Permutations are drawn anew in every call.

    Args:
        state_size: ``S``, at least 1.
        num_samples: permutations.
        embedding_size: width of the hidden layer of ``F``.
        hypernet_size: hidden width of the networks that make its weights.
    """

    def __init__(
        self, *, state_size: int, num_samples: int = 10, embedding_size: int = 32, hypernet_size: int | None = 64
    ):
        super().__init__()
        self.num_samples = num_samples
        self.coalition_value = MonotonicMixer(
            num_agents=2, state_size=state_size, embedding_size=embedding_size, hypernet_size=hypernet_size
        )

    def forward(self, value: Tensor, is_best: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., 1]`` from values ``[..., A]`` and whether they are the agents' largest, ``[..., A]`` bool."""
        return torch.where(is_best, value, self.alpha(value, state) * value).sum(-1, keepdim=True)

    def alpha(self, value: Tensor, state: Tensor) -> Tensor:
        """Returns ``[..., A]``, at least 1."""
        *batch, num_agents = value.shape
        place = torch.rand(*batch, self.num_samples, num_agents, device=value.device).argsort(-1)
        before = (place.unsqueeze(-2) < place.unsqueeze(-1)).float()  # [..., M, i, j]: j comes before i
        others = (before @ value[..., None, :, None]).squeeze(-1) / before.sum(-1).clamp(min=1)
        pairs = torch.stack((others, value.unsqueeze(-2).expand_as(others)), -1)
        return 1 + self.coalition_value(pairs, state[..., None, None, :]).squeeze(-1).abs().mean(-2)


def require_state(state_size: int) -> None:
    """Raises ``ValueError`` if the environment has no state."""
    if state_size < 1:
        raise ValueError("a mixer needs a global state, but the environment has none: use VDN or IQL instead")


def _hypernet(in_features: int, out_features: int, hidden_size: int | None) -> nn.Module:
    if hidden_size is None:
        return nn.Linear(in_features, out_features)
    return nn.Sequential(nn.Linear(in_features, hidden_size), nn.ReLU(), nn.Linear(hidden_size, out_features))


def one_hot(action: Tensor, num_actions: int) -> Tensor:
    """Returns ``[..., n]`` float32 from actions ``[...]`` int64."""
    return torch.nn.functional.one_hot(action, num_actions).float()
