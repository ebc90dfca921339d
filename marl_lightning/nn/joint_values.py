"""Values of joint actions that are learned without being made of the agents' own values (QTRAN, Son et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.linear import MLP, AgentLinear
from marl_lightning.nn.mixers import one_hot, require_state


class JointValue(nn.Module):
    """``Q_jt(s, u)`` of the state and the sum of an encoding of every agent's features and action.

    The encoding has two layers, the value three, as in the reference implementation; being a sum, it does not grow with
    the number of agents.

    Args:
        spec: the environment.
        feature_size: ``F``, of the agents' features.
        embedding_size: width of all layers.
        share_parameters: one encoder for the agents of a group, or one each.
    """

    def __init__(self, *, spec: EnvSpec, feature_size: int, embedding_size: int, share_parameters: bool):
        super().__init__()
        require_state(spec.state_size)
        self.num_actions = {name: group.action_size for name, group in spec.groups.items()}
        self.encoders = nn.ModuleDict()
        for name, group in spec.groups.items():
            stack = None if share_parameters else group.num_agents
            self.encoders[name] = nn.Sequential(
                AgentLinear(
                    in_features=feature_size + group.action_size, out_features=embedding_size, num_agents=stack
                ),
                nn.ReLU(),
                AgentLinear(in_features=embedding_size, out_features=embedding_size, num_agents=stack),
            )
        self.build_value(spec, feature_size=feature_size, size=embedding_size, share_parameters=share_parameters)

    def build_value(self, spec: EnvSpec, *, feature_size: int, size: int, share_parameters: bool) -> None:
        """Makes the layers behind the encoding."""
        self.network = nn.Sequential(
            nn.Linear(spec.state_size + size, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1)
        )

    def forward(self, features: Mapping[str, Tensor], action: Mapping[str, Tensor], state: Tensor) -> Tensor:
        """Returns ``[..., 1]``.

        Args:
            features: by group ``[..., A, F]``.
            action: by group ``[..., A]``.
            state: ``[..., S]``.
        """
        total = sum(encoding.sum(-2) for encoding in self.encode(features, action).values())
        return self.network(torch.cat((state, total), -1))

    def encode(self, features: Mapping[str, Tensor], action: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the encodings by group, ``[..., A, E]``."""
        return {
            name: encoder(torch.cat((features[name], one_hot(action[name], self.num_actions[name])), -1))
            for name, encoder in self.encoders.items()
        }


class CounterfactualJointValue(JointValue):
    """``Q_jt(s, (u_-i, a))`` for every agent ``i`` and each of its actions ``a``, the others' being given.

    The layers behind the encodings see those of the others and the agent's own features. There is one network a group,
    or one an agent. Arguments as for :class:`JointValue`.
    """

    def build_value(self, spec: EnvSpec, *, feature_size: int, size: int, share_parameters: bool) -> None:
        self.networks = nn.ModuleDict()
        for name, group in spec.groups.items():
            stack = None if share_parameters else group.num_agents
            inputs = spec.state_size + size + feature_size
            self.networks[name] = nn.Sequential(
                MLP(in_features=inputs, hidden_sizes=(size, size), activation="relu", num_agents=stack),
                AgentLinear(in_features=size, out_features=group.action_size, num_agents=stack),
            )

    def forward(self, features: Mapping[str, Tensor], action: Mapping[str, Tensor], state: Tensor) -> Tensor:
        """Returns what each agent's network says of the joint action, ``[..., A_total]``, group after group."""
        value = self.of_own_actions(features, action, state)
        return torch.cat([v.gather(-1, action[name].unsqueeze(-1)).squeeze(-1) for name, v in value.items()], -1)

    def of_own_actions(
        self, features: Mapping[str, Tensor], action: Mapping[str, Tensor], state: Tensor
    ) -> dict[str, Tensor]:
        """Returns ``[..., A, n]`` by group; the value of agent ``i`` does not depend on its own entry of ``action``."""
        encoding = self.encode(features, action)
        total = sum(x.sum(-2, keepdim=True) for x in encoding.values())
        value = {}
        for name, network in self.networks.items():
            others = total - encoding[name]
            inputs = (state.unsqueeze(-2).expand(*others.shape[:-1], -1), others, features[name])
            value[name] = network(torch.cat(inputs, -1))
        return value


JOINT_VALUES: dict[str, type[JointValue]] = {"base": JointValue, "alt": CounterfactualJointValue}


class StateValue(nn.Module):
    """``V(s)``.

    Args:
        state_size: ``S``, at least 1.
        hidden_sizes: widths of the hidden layers.
    """

    def __init__(self, *, state_size: int, hidden_sizes: tuple[int, ...]):
        super().__init__()
        require_state(state_size)
        self.network = nn.Sequential(
            MLP(in_features=state_size, hidden_sizes=hidden_sizes, activation="relu"),
            AgentLinear(in_features=hidden_sizes[-1], out_features=1),
        )

    def forward(self, state: Tensor) -> Tensor:
        """Returns ``[..., 1]``."""
        return self.network(state)
