"""The body of actors and critics: hidden layers, and a GRU for those with memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from marl_lightning.nn.gru import GRU
from marl_lightning.nn.linear import MLP


class Body(nn.Module):
    """MLP, followed by a GRU of the same width if ``recurrent``.

    Args:
        in_features: size of the input.
        hidden_sizes: widths of the layers; the last one is also the size of the recurrent state.
        recurrent: whether there is a GRU.
        activation: see :class:`~marl_lightning.nn.linear.MLP`.
        layer_norm: see :class:`~marl_lightning.nn.linear.MLP`; also normalises the output of the GRU.
        num_agents: see :class:`~marl_lightning.nn.linear.AgentLinear`.
    """

    def __init__(
        self,
        *,
        in_features: int,
        hidden_sizes: Sequence[int],
        recurrent: bool,
        activation: str,
        layer_norm: bool,
        num_agents: int | None,
    ):
        super().__init__()
        self.out_features = hidden_sizes[-1]
        self.mlp = MLP(
            in_features=in_features,
            hidden_sizes=hidden_sizes,
            activation=activation,
            layer_norm=layer_norm,
            num_agents=num_agents,
        )
        self.gru = None
        self.gru_norm: nn.Module = nn.Identity()
        if recurrent:
            self.gru = GRU(in_features=self.out_features, hidden_size=self.out_features, num_agents=num_agents)
            if layer_norm:
                self.gru_norm = nn.LayerNorm(self.out_features)

    @property
    def state_size(self) -> int:
        """Size of the recurrent state, 0 without memory."""
        return 0 if self.gru is None else self.gru.hidden_size

    def forward(self, x: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Runs sequences of inputs.

        Args:
            x: ``[T, N, A, in_features]``.
            state: ``[N, A, state_size]``.
            is_first: ``[T, N]`` bool, the state is zeroed before this step.

        Returns:
            Features ``[T, N, A, out_features]`` and the states after each step ``[T, N, A, state_size]``.
        """
        features = self.mlp(x)
        if self.gru is None:
            return features, features[..., :0]
        states = self.gru(features, state, is_first)
        return self.gru_norm(states), states


def with_agent_id(x: Tensor, num_agents: int) -> Tensor:
    """Appends a one-hot agent index to ``[..., A, F]``, giving ``[..., A, F + A]``."""
    identity = torch.eye(num_agents, dtype=x.dtype, device=x.device).expand(*x.shape[:-1], num_agents)
    return torch.cat((x, identity), -1)
