"""Profiles in which agents act by policies of their own, such as those of different trainings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from marl_lightning.algorithms.base import Policy
from marl_lightning.data.schema import RecurrentState
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec


class MixedPolicy(nn.Module):
    """Acts for each agent by the policy that is given for it.

    Implements :class:`~marl_lightning.algorithms.base.Policy`, and
    :class:`~marl_lightning.algorithms.base.StochasticPolicy` if all of the policies do. Each of them sees the decision
    points of all agents, as it does alone, and of what it says only the part of its agents counts. A policy that is
    given for several agents acts once for all of them. Those that are modules become submodules and have to be on one
    device.

    Args:
        policies: by agent, policies for the groups of the environment; all agents must have one.
        spec: the environment.

    Raises:
        ValueError: listing agents without a policy, and names that are no agents.
    """

    def __init__(self, *, policies: Mapping[str, Policy], spec: EnvSpec):
        super().__init__()
        problems = []
        if missing := [agent for agent in spec.agents if agent not in policies]:
            problems.append(f"no policy for {', '.join(missing)}")
        if unknown := [str(agent) for agent in policies if agent not in spec.agents]:
            problems.append(f"there is no agent {', '.join(unknown)}")
        if problems:
            raise ValueError(
                f"{'; '.join(problems)}: give one policy for each agent of {spec.name}, {', '.join(spec.agents)}"
            )
        self._policies = list({id(policies[agent]): policies[agent] for agent in spec.agents}.values())
        self.parts = nn.ModuleList(policy for policy in self._policies if isinstance(policy, nn.Module))
        places = {id(policy): place for place, policy in enumerate(self._policies)}
        self._groups = tuple(spec.groups)
        for name, group in spec.groups.items():
            owners = torch.tensor([places[id(policies[agent])] for agent in group.agents])
            self.register_buffer(f"owners_of_{name}", owners, persistent=False)

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Returns the states of all policies, named ``"<place>/<name>"`` by the place of the policy among them."""
        return self._joined([policy.initial_state(num_envs) for policy in self._policies])

    def act(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.Policy`. The policies draw from the generator in turn."""
        answers = [
            policy.act(observations, own, is_first, deterministic=deterministic, generator=generator)
            for policy, own in zip(self._policies, self._separated(state), strict=True)
        ]
        actions, log_probs, states = zip(*answers, strict=True)
        return self._chosen(actions), self._chosen(log_probs), self._joined(states)

    def action_probabilities(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.StochasticPolicy`."""
        for policy in self._policies:
            if not callable(getattr(policy, "action_probabilities", None)):
                raise TypeError(f"a {type(policy).__name__} cannot state the probabilities of its actions")
        answers = [
            policy.action_probabilities(observations, own, is_first, deterministic=deterministic)
            for policy, own in zip(self._policies, self._separated(state), strict=True)
        ]
        probabilities, states = zip(*answers, strict=True)
        return self._chosen(probabilities), self._joined(states)

    def env_actions(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`~marl_lightning.algorithms.base.Policy`; each policy maps the actions of its agents."""
        return self._chosen([policy.env_actions(actions) for policy in self._policies])

    def _chosen(self, answers: list[Mapping[str, Tensor]] | tuple[Mapping[str, Tensor], ...]) -> dict[str, Tensor]:
        """Returns by group ``[E, A, ...]`` of each agent what its own policy answered."""
        chosen = {}
        for name in self._groups:
            chosen[name], *others = (answer[name] for answer in answers)
            owners = getattr(self, f"owners_of_{name}").view(-1, *(1,) * (chosen[name].dim() - 2))
            for place, other in enumerate(others, 1):
                chosen[name] = torch.where(owners == place, other, chosen[name])
        return chosen

    @staticmethod
    def _joined(states: list[RecurrentState] | tuple[RecurrentState, ...]) -> RecurrentState:
        return {f"{place}/{key}": value for place, state in enumerate(states) for key, value in state.items()}

    def _separated(self, state: RecurrentState) -> list[RecurrentState]:
        separated: list[RecurrentState] = [{} for _ in self._policies]
        for key, value in state.items():
            place, _, name = key.partition("/")
            separated[int(place)][name] = value
        return separated
