"""Networks of actor-critic methods, one actor and one critic a group, and the policy that acts with the actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from marl_lightning.data.schema import RecurrentState
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.nn.body import Body, with_agent_id
from marl_lightning.nn.heads import CategoricalHead, GaussianHead, MultiCategoricalHead
from marl_lightning.nn.linear import AgentLinear

CriticInput = Literal["state", "agent_state", "observation"]


class Actor(nn.Module):
    """Policy network of one group.

    With shared parameters and more than one agent, the agent's index is appended to its observation.

    Args:
        group: the group.
        share_parameters: one network for all agents, or one each.
        output_gain: of the initial weights of the last layer.
        squash_actions: see :class:`~marl_lightning.nn.heads.GaussianHead`.
        **body: ``hidden_sizes``, ``recurrent``, ``activation`` and ``layer_norm`` of the body, see
            :class:`~marl_lightning.nn.body.Body`.
    """

    def __init__(
        self, *, group: GroupSpec, share_parameters: bool, output_gain: float, squash_actions: bool, **body: Any
    ):
        super().__init__()
        self.num_agents = group.num_agents
        self.append_id = share_parameters and group.num_agents > 1
        self.observation_dims = len(group.observation_shape)
        stack = None if share_parameters else group.num_agents
        in_features = group.observation_size + (group.num_agents if self.append_id else 0)
        self.body = Body(in_features=in_features, num_agents=stack, **body)
        head = {"in_features": self.body.out_features, "num_agents": stack, "gain": output_gain}
        self.head: CategoricalHead | MultiCategoricalHead | GaussianHead
        if not group.is_discrete:
            self.head = GaussianHead(action_space=group.action_space, squash=squash_actions, **head)
        elif group.action_shape:
            self.head = MultiCategoricalHead(action_parts=group.action_parts, **head)
        else:
            self.head = CategoricalHead(num_actions=group.action_size, **head)

    def inputs(self, observation: Tensor) -> Tensor:
        """Returns what the network reads, ``[..., A, F]``, from observations ``[..., A, *obs]``."""
        x = flatten_observation(observation, self.observation_dims)
        return with_agent_id(x, self.num_agents) if self.append_id else x

    def forward(self, inputs: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the features that the head reads and the recurrent states; see ``Body.forward``."""
        return self.body(inputs, state, is_first)


class Critic(nn.Module):
    """Value network of one group.

    Args:
        spec: the environment.
        group: the group.
        critic: what the critic sees. ``"state"``: the global state, so that there is one value for the whole group and
            it is computed once, not once an agent. ``"agent_state"``: state, own observation and agent index.
            ``"observation"``: own observation and agent index.
        share_parameters: one network for all agents, or one each (``"state"`` always has one).
        death_masking: a critic that sees an agent's own features sees zeros and the agent's index once it is dead
            (Yu et al. 2022, section 4.3); ``"state"`` is not touched.
        **body: see :class:`Actor`.
    """

    def __init__(
        self,
        *,
        spec: EnvSpec,
        group: GroupSpec,
        critic: CriticInput,
        share_parameters: bool,
        death_masking: bool,
        **body: Any,
    ):
        super().__init__()
        self.critic = critic
        self.num_agents = group.num_agents
        self.death_masking = death_masking
        self.observation_dims = len(group.observation_shape)
        own_features = critic != "state"
        self.append_id = own_features and share_parameters and group.num_agents > 1
        in_features = self.append_id * group.num_agents
        in_features += spec.state_size if critic != "observation" else 0
        in_features += group.observation_size if own_features else 0
        stack = group.num_agents if own_features and not share_parameters else None
        self.body = Body(in_features=in_features, num_agents=stack, **body)
        self.head = AgentLinear(in_features=self.body.out_features, out_features=1, num_agents=stack)

    @property
    def num_values(self) -> int:
        """Values a time step: one, or one an agent."""
        return 1 if self.critic == "state" else self.num_agents

    def inputs(self, state: Tensor, observation: Tensor, alive: Tensor) -> Tensor:
        """Returns what the network reads, ``[..., num_values, F]``.

        Args:
            state: ``[..., S]``.
            observation: ``[..., A, *obs]``.
            alive: ``[..., A]`` bool.
        """
        if self.critic == "state":
            return state.float().unsqueeze(-2)
        x = flatten_observation(observation, self.observation_dims)
        if self.critic == "agent_state":
            x = torch.cat((state.float().unsqueeze(-2).expand(*x.shape[:-1], -1), x), -1)
        if self.death_masking:
            x = x * alive.unsqueeze(-1)
        return with_agent_id(x, self.num_agents) if self.append_id else x

    def forward(self, inputs: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns values ``[T, N, num_values]`` and the recurrent states; see ``Body.forward``."""
        features, states = self.body(inputs, state, is_first)
        return self.head(features).squeeze(-1).float(), states


class ActorPolicy(nn.ModuleDict):
    """The actors of all groups, acting: implements :class:`~marl_lightning.algorithms.base.StochasticPolicy`.

    Attributes:
        always_greedy: returns which agents of a group take their likeliest actions even if the others draw theirs,
            ``[A]`` bool; ``None`` if there are no such agents.
    """

    def __init__(self) -> None:
        super().__init__()
        self.always_greedy: Callable[[str], Tensor] | None = None

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Returns zeros; see :class:`~marl_lightning.algorithms.base.Policy`."""
        return initial_states("actor", self, {name: actor.num_agents for name, actor in self.items()}, num_envs)

    def act(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.Policy`."""
        features, next_state = self._features(observations, state, is_first)
        actions, log_probs = {}, {}
        for name, actor in self.items():
            decision = features[name], observations.action_mask.get(name)
            action, log_prob = actor.head.sample(*decision, deterministic=deterministic, generator=generator)
            if self.always_greedy is not None and not deterministic:
                greedy = self.always_greedy(name)
                likeliest, its_log_prob = actor.head.sample(*decision, deterministic=True, generator=None)
                action = torch.where(greedy.view(-1, *(1,) * (action.dim() - 2)), likeliest, action)
                log_prob = torch.where(greedy, its_log_prob, log_prob)
            actions[name], log_probs[name] = action, log_prob
        return actions, log_probs, next_state

    def action_probabilities(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.StochasticPolicy`."""
        for name, actor in self.items():
            if not isinstance(actor.head, CategoricalHead):
                raise TypeError(f"the actions of {name!r} have no table of probabilities: they must be Discrete")
        features, next_state = self._features(observations, state, is_first)
        probabilities = {}
        for name, actor in self.items():
            decision = features[name], observations.action_mask.get(name)
            probabilities[name] = actor.head.probabilities(*decision, deterministic=deterministic)
            if self.always_greedy is not None and not deterministic:
                theirs = actor.head.probabilities(*decision, deterministic=True)
                greedy = self.always_greedy(name).unsqueeze(-1)
                probabilities[name] = torch.where(greedy, theirs, probabilities[name])
        return probabilities, next_state

    def _features(
        self, observations: Observations[Tensor], state: RecurrentState, is_first: Tensor
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """Returns by group what the heads read, ``[E, A, F]``, and the next recurrent state."""
        features, next_state = {}, dict(state)
        for name, actor in self.items():
            key, inputs = f"actor/{name}", actor.inputs(observations.observation[name])
            x, states = actor(inputs.unsqueeze(0), state.get(key), is_first.unsqueeze(0))
            features[name] = x[0]
            if key in state:
                next_state[key] = states[0]
        return features, next_state

    def env_actions(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`~marl_lightning.algorithms.base.Policy`."""
        return {name: actor.head.env_action(actions[name]) for name, actor in self.items()}


def initial_states(
    prefix: str, networks: Mapping[str, nn.Module], rows: Mapping[str, int], num_envs: int
) -> RecurrentState:
    """Returns zeroed states ``[E, rows, H]`` named ``prefix/group`` of those networks that have memory."""
    return {
        f"{prefix}/{name}": next(network.parameters()).new_zeros(num_envs, rows[name], network.body.state_size)
        for name, network in networks.items()
        if network.body.state_size
    }


def flatten_observation(observation: Tensor, dims: int) -> Tensor:
    """Flattens the last ``dims`` axes into one and converts to floating point."""
    if dims != 1:
        observation = observation.unsqueeze(-1) if dims == 0 else observation.flatten(-dims)
    return observation.float()
