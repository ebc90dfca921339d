"""Last layers of value networks: one number an action, a dueling pair of streams, or a distribution of returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from marl_lightning.nn.linear import AgentLinear
from marl_lightning.nn.noisy import NoisyLinear


class PlainHead(nn.Module):
    """``num_atoms`` numbers for each action, starting at about 0.

    Args:
        in_features: size of the features.
        num_actions: ``n``.
        num_atoms: ``M``.
        noisy: use noisy layers.
        num_agents: see :class:`~marl_lightning.nn.linear.AgentLinear`.
    """

    def __init__(
        self, *, in_features: int, num_actions: int, num_atoms: int = 1, noisy: bool = False, num_agents: int | None
    ):
        super().__init__()
        self.shape = (num_actions, num_atoms)
        linear = NoisyLinear if noisy else AgentLinear
        self.linear = linear(
            in_features=in_features, out_features=num_actions * num_atoms, num_agents=num_agents, gain=0.01
        )

    def forward(self, features: Tensor) -> Tensor:
        """Returns ``[..., n, M]``."""
        return self.linear(features).unflatten(-1, self.shape)


class DuelingHead(nn.Module):
    """``Q(a) = V + A(a) - mean_b A(b)``, for each atom (Wang et al. 2016, equation 9). Arguments as :class:`PlainHead`.

    The mean is over all actions, legal or not.
    """

    def __init__(
        self, *, in_features: int, num_actions: int, num_atoms: int = 1, noisy: bool = False, num_agents: int | None
    ):
        super().__init__()
        common = {"in_features": in_features, "num_atoms": num_atoms, "noisy": noisy, "num_agents": num_agents}
        self.value = PlainHead(num_actions=1, **common)
        self.advantage = PlainHead(num_actions=num_actions, **common)

    def forward(self, features: Tensor) -> Tensor:
        """Returns ``[..., n, M]``."""
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-2, keepdim=True)


class ExpectedValue(nn.Module):
    """Values of actions, the means of what a head says of their returns.

    Args:
        head: gives ``[..., n, M]``.
    """

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def atoms(self, features: Tensor) -> Tensor:
        """Returns what the head says, ``[..., n, M]`` float32: of a value itself or the quantiles of the return."""
        return self.head(features).float()

    def forward(self, features: Tensor) -> Tensor:
        """Returns ``[..., n]``."""
        return self.atoms(features).mean(-1)


class ExpectedCategorical(ExpectedValue):
    """Values of actions whose returns have a categorical distribution; the atoms are its logits.

    Args:
        head: gives ``[..., n, M]``.
        support: ``[M]``, the returns that have a probability.
    """

    def __init__(self, head: nn.Module, support: Tensor):
        super().__init__(head)
        self.register_buffer("support", support, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Returns ``[..., n]``."""
        return torch.softmax(self.atoms(features), -1) @ self.support
