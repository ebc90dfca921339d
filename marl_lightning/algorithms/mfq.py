"""Mean field Q-learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from marl_lightning.algorithms.actor_critic import flatten_observation
from marl_lightning.algorithms.q_learning import AgentValues, QLearningModule, QPolicy, action_masks, join
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.data.schema import RecurrentState
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.nn.mixers import one_hot
from marl_lightning.validation import PositiveFloat, extends


class MeanFieldPolicy(QPolicy):
    """Acts by values that see, besides the observation, what the other agents did on average in the previous step.

    The previous actions are part of the recurrent state, one-hot and zero for agents that were not alive:
    ``"previous/<group>"``, ``[E, A, n]``.

    Args:
        networks: the value networks of the groups.
        groups: the groups, in the order of the networks.
    """

    def __init__(self, networks: QPolicy, groups: Mapping[str, GroupSpec]):
        super().__init__()
        self.update(networks)
        self.groups = dict(groups)

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Returns zeros; see :class:`~marl_lightning.algorithms.base.Policy`."""
        device = next(self.parameters()).device
        previous = {
            f"previous/{name}": torch.zeros(num_envs, group.num_agents, group.action_size, device=device)
            for name, group in self.groups.items()
        }
        return super().initial_state(num_envs) | previous

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
        goes_on = ~is_first[:, None, None]
        previous = {name: state[f"previous/{name}"] * goes_on for name in self.groups}
        widened = replace(observations, observation=self.widen(observations.observation, previous))
        actions, log_probs, next_state = super().act(
            widened, state, is_first, deterministic=deterministic, generator=generator
        )
        taken = self.taken(actions, observations.alive)
        return actions, log_probs, next_state | {f"previous/{name}": x for name, x in taken.items()}

    def action_probabilities(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ``TypeError``: probabilities follow from what the others did before, which only ``act`` knows."""
        raise TypeError("a mean-field policy has no table of probabilities: it sees what the others do as it acts")

    def taken(self, action: Mapping[str, Tensor], alive: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns actions by group as ``[..., A, n]``, one-hot, and zero for agents that are not alive."""
        return {
            name: one_hot(action[name], group.action_size) * alive[name].unsqueeze(-1)
            for name, group in self.groups.items()
        }

    def widen(self, observation: Mapping[str, Tensor], previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns by group the observations, flat, with the mean actions of the others behind them."""
        mean = mean_actions(previous)
        return {
            name: torch.cat((flatten_observation(observation[name], len(group.observation_shape)), mean[name]), -1)
            for name, group in self.groups.items()
        }


class MFQ(QLearningModule):
    """Mean field Q-learning (Yang et al. 2018): an agent sees the others by their mean action.

    ::

        m_i = mean over the living j != i of one_hot(previous action of j), for each group
        y_i = r_i + gamma (1 - terminated) sum_a pi(a) Q_i(o', a, m'_i),    pi = softmax(Q_i(o', ., m'_i) / temperature)

    over the legal actions. Nothing is seen at the start of an episode, or once there is nobody else. As in the
    authors' code, the mean actions are those of the step before, when learning as when acting, so that agents need not
    know what the others are about to do. Replays of transitions or sequences must therefore keep at least one step
    before the first one that is learned from: ``burn_in`` of at least 1, as it is by default. To explore as in the
    paper, use :class:`~marl_lightning.callbacks.exploration.BoltzmannSchedule`.

    Args:
        temperature: of the policy that the successor is valued by; ``None`` values its best action, by double
            Q-learning if ``double_q``.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    @extends(QLearningModule.__init__)
    def __init__(self, *, temperature: PositiveFloat | None = 0.1) -> None: ...

    def build(self, spec: EnvSpec) -> None:
        mean_size = sum(group.action_size for group in spec.groups.values())
        wider = {name: _widened(group, mean_size) for name, group in spec.groups.items()}
        super().build(replace(spec, groups=wider))
        self.networks = MeanFieldPolicy(self.networks, spec.groups)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self._trainer, "datamodule", None)
        if stage == "fit" and getattr(data, "sample_kind", None) == "sequences" and data.burn_in == 0:
            raise ValueError("MFQ needs the actions of the step before: set data.burn_in to at least 1 or leave it out")

    @property
    def is_recurrent(self) -> bool:
        """Always: the previous actions have to be known."""
        return True

    def next_value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        temperature = self.hparams.temperature
        if temperature is None:
            return super().next_value(batch, online)
        target = self.agent_values(self.target_networks, batch).next_value
        mask = action_masks(batch.steps[batch.burn_in :][schema.NEXT])
        return join({name: boltzmann_value(value, mask[name], temperature) for name, value in target.items()})

    def agent_values(self, networks: QPolicy, batch: ReplayBatch) -> AgentValues:
        return super().agent_values(networks, replace(batch, steps=self.with_mean_actions(batch.steps)))

    def with_mean_actions(self, steps: TensorDict) -> TensorDict:
        """Returns the steps ``[T, N]`` with mean actions behind the observations; they are zero at the first step."""
        policy, following = self.networks, steps[schema.NEXT]

        def each(record: TensorDict, key: str) -> dict[str, Tensor]:
            return {name: record[name, key] for name in policy.groups}

        taken = policy.taken(each(steps, schema.ACTION), each(steps, schema.ALIVE))
        goes_on = ~steps[schema.IS_FIRST][1:, :, None, None]
        previous = {name: torch.cat((torch.zeros_like(x[:1]), x[:-1] * goes_on)) for name, x in taken.items()}
        now = policy.widen(each(steps, schema.OBSERVATION), previous)
        then = policy.widen(each(following, schema.OBSERVATION), taken)
        wider = steps.copy()
        for name in policy.groups:
            wider = wider.set((name, schema.OBSERVATION), now[name])
            wider = wider.set((schema.NEXT, name, schema.OBSERVATION), then[name])
        return wider


def mean_actions(taken: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns for every agent the mean actions of the others that are alive, one part for each group.

    Args:
        taken: by group ``[..., A, n]``, one-hot, zero for agents that are not alive.

    Returns:
        By group ``[..., A, n_1 + n_2 + ...]``; a part is zero where nobody else of that group is alive.
    """
    total = {name: x.sum(-2, keepdim=True) for name, x in taken.items()}

    def seen_by(name: str) -> Tensor:
        others = [
            total[other] - taken[name] if other == name else total[other].expand(*taken[name].shape[:-1], -1)
            for other in taken
        ]
        return torch.cat([x / x.sum(-1, keepdim=True).clamp(min=1) for x in others], -1)

    return {name: seen_by(name) for name in taken}


def boltzmann_value(value: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Returns ``sum_a pi(a) Q(a)`` with ``pi = softmax(Q / temperature)`` over legal actions, ``[...]``."""
    policy = torch.softmax((value / temperature).masked_fill(~mask, -torch.inf), -1)
    return (policy * value).sum(-1)


def _widened(group: GroupSpec, extra: int) -> GroupSpec:
    size = group.observation_size + extra
    return replace(group, observation_space=spaces.Box(-np.inf, np.inf, (size,), np.float32))
