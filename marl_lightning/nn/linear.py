"""Linear layers for stacks of agents: one weight for all of them, or one weight each in a single batched product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AgentLinear(nn.Module):
    """Affine map on ``[..., A, in_features]`` with weights shared by the agents, or one set of weights an agent.

    Weights start orthogonal with the given gain and biases at zero, as PPO implementations do
    (Engstrom et al. 2020, "Implementation Matters in Deep RL").

    Args:
        in_features: size of the last axis of the input.
        out_features: size of the last axis of the output.
        num_agents: ``None`` shares one weight; a number ``A`` stacks ``A`` weights and needs an agent axis of that
            size before the features.
        gain: factor on the orthogonal initial weights.
    """

    def __init__(self, *, in_features: int, out_features: int, num_agents: int | None = None, gain: float = 1.0):
        super().__init__()
        stack = () if num_agents is None else (num_agents,)
        self.weight = nn.Parameter(torch.empty(*stack, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(*stack, out_features))
        with torch.no_grad():
            for weight in self.weight.reshape(-1, out_features, in_features):
                nn.init.orthogonal_(weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return nn.functional.linear(x, self.weight, self.bias)
        agents, features = x.shape[-2:]
        rows = x.reshape(-1, agents, features).transpose(0, 1)
        out = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight.transpose(1, 2))
        return out.transpose(0, 1).reshape(*x.shape[:-1], -1)


class MLP(nn.Module):
    """Hidden layers with an activation after each, on ``[..., A, in_features]``.

    Args:
        in_features: size of the last axis of the input.
        hidden_sizes: width of each layer; the last one is ``out_features``.
        activation: ``"tanh"`` or ``"relu"``.
        layer_norm: normalise the input and the output of every layer (as in the MAPPO reference).
        num_agents: see :class:`AgentLinear`.
    """

    def __init__(
        self,
        *,
        in_features: int,
        hidden_sizes: Sequence[int],
        activation: str = "tanh",
        layer_norm: bool = False,
        num_agents: int | None = None,
    ):
        super().__init__()
        make_activation, gain = ACTIVATIONS[activation]
        layers: list[nn.Module] = [nn.LayerNorm(in_features)] if layer_norm else []
        for size in hidden_sizes:
            layers.append(AgentLinear(in_features=in_features, out_features=size, num_agents=num_agents, gain=gain))
            layers.append(make_activation())
            if layer_norm:
                layers.append(nn.LayerNorm(size))
            in_features = size
        self.layers = nn.Sequential(*layers)
        self.out_features = in_features

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


ACTIVATIONS: dict[str, tuple[type[nn.Module], float]] = {
    "tanh": (nn.Tanh, nn.init.calculate_gain("tanh")),
    "relu": (nn.ReLU, nn.init.calculate_gain("relu")),
}
