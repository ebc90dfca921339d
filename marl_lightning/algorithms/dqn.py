"""Deep Q-networks and their variants."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from marl_lightning.algorithms.iql import IQL
from marl_lightning.algorithms.q_learning import (
    QNetwork,
    QPolicy,
    action_masks,
    actions,
    best_actions,
    last_steps,
    mean_over_agents,
)
from marl_lightning.clock import Schedule
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.data.schema import RecurrentState
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.losses.distributional import categorical_loss, categorical_projection, quantile_huber_loss
from marl_lightning.losses.td import n_step_target
from marl_lightning.nn.noisy import noise
from marl_lightning.nn.statistics import weighted_mean
from marl_lightning.nn.value_heads import DuelingHead, ExpectedCategorical, ExpectedValue, PlainHead
from marl_lightning.validation import extends


class HeadedQNetwork(QNetwork):
    """A value network that ends in another head.

    Args:
        head: makes ``[..., A, n]`` of features.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QNetwork`.
    """

    def __init__(self, *, head: nn.Module, **inherited: Any):
        super().__init__(**inherited)
        self.head = head

    def initial_state(self, num_sequences: int) -> Tensor:
        parameter = next(self.parameters())
        return parameter.new_zeros(num_sequences, self.num_agents, self.body.state_size)


class NoisyPolicy(QPolicy):
    """Explores by the noise of its networks alone, unless it is given a schedule; without noise if deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(start=0.0, end=0.0, anneal_env_steps=0)

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
        with noise(self, enabled=not deterministic, generator=generator):
            return super().act(observations, state, is_first, deterministic=deterministic, generator=generator)

    def action_probabilities(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.StochasticPolicy`; only if deterministic."""
        if not deterministic:
            raise TypeError("noisy networks have no table of probabilities: use the deterministic policy")
        with noise(self, enabled=False):
            return super().action_probabilities(observations, state, is_first, deterministic=True)


class DQN(IQL):
    """Deep Q-networks (Mnih et al. 2015) and their variants, which combine; for one agent or independent ones.

    Double Q-learning is on by default (``double_q``), as in all of the family; memory makes it DRQN (``recurrent``).
    Prioritised replay is a setting of the data, n-step targets are ``n_steps``.

    With a distribution of returns, the best action is the one of the largest mean. Targets are made of the whole
    distribution of the successor, and ``td_lambda`` does not apply.

    Args:
        dueling: separate streams for the value of the state and the advantages of actions (Wang et al. 2016).
        noisy: explore by noise on the weights of the last layers (Fortunato et al. 2018); no other exploration is used
            unless there is a schedule for it.
        distributional: learn the distribution of the return: as probabilities of fixed returns (``"c51"``, Bellemare et
            al. 2017) or as quantiles (``"quantile"``, Dabney et al. 2018, where ``huber_delta=None`` means 1).
        num_atoms: returns or quantiles, of each action.
        min_return: the smallest of the fixed returns.
        max_return: the largest.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.

    Raises:
        ValueError: if ``max_return`` is not above ``min_return``, ``td_lambda`` is used with a distribution, or agents
            are frozen that have noisy networks.
    """

    @extends(IQL.__init__)
    def __init__(
        self,
        *,
        dueling: bool = False,
        noisy: bool = False,
        distributional: Literal["c51", "quantile"] | None = None,
        num_atoms: Annotated[int, Field(ge=2)] = 51,
        min_return: float = -10.0,
        max_return: float = 10.0,
    ) -> None:
        if max_return <= min_return:
            raise ValueError(f"max_return={max_return} must be above min_return={min_return}")

    def build_networks(self, spec: EnvSpec) -> QPolicy:
        hp = self.hparams
        if hp.distributional is not None and hp.td_lambda is not None:
            raise ValueError(
                f"td_lambda={hp.td_lambda} mixes values and does not apply to distributional={hp.distributional!r}: "
                "use n_steps"
            )
        if hp.noisy and hp.trainable_agents is not None:
            raise ValueError("noisy=True lets all agents explore, the frozen ones too: leave out trainable_agents")
        if not (hp.dueling or hp.noisy or hp.distributional):
            return super().build_networks(spec)
        networks = NoisyPolicy() if hp.noisy else QPolicy()
        for name, group in spec.groups.items():
            head = self.head(num_actions=group.action_size, num_agents=group.num_agents)
            networks[name] = HeadedQNetwork(head=head, group=group, **self.network_arguments)
        return networks

    def head(self, *, num_actions: int, num_agents: int) -> ExpectedValue:
        """Makes the head of a group's network."""
        hp = self.hparams
        head = (DuelingHead if hp.dueling else PlainHead)(
            in_features=hp.hidden_sizes[-1],
            num_actions=num_actions,
            num_atoms=hp.num_atoms if hp.distributional else 1,
            noisy=hp.noisy,
            num_agents=None if hp.share_parameters else num_agents,
        )
        if hp.distributional == "c51":
            return ExpectedCategorical(head, torch.linspace(hp.min_return, hp.max_return, hp.num_atoms))
        return ExpectedValue(head)

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.hparams.distributional is None:
            return super().loss(batch)
        return self.distributional_loss(batch)

    def distributional_loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns what :meth:`loss` returns; sequences are prioritised by their losses (Hessel et al. 2018)."""
        hp, steps = self.hparams, batch.steps[batch.burn_in :]
        online = self.agent_values(self.networks, batch)
        with torch.no_grad():
            target = self.agent_values(self.target_networks, batch)
            chooser = online if hp.double_q else target
            next_action = best_actions(chooser.next_value, action_masks(steps[schema.NEXT]))
            next_atoms = self.chosen_atoms(self.target_networks, target.next_features, next_action)
        atoms = self.chosen_atoms(self.networks, online.features, actions(steps, self.networks))
        if hp.distributional == "quantile":
            goal = self.targets(batch, next_atoms)
            loss = quantile_huber_loss(atoms, goal, huber_delta=hp.huber_delta or 1.0)
            value, goal_value = atoms.detach().mean(-1), goal.mean(-1)
        else:
            support = next(iter(self.networks.values())).head.support
            position = self.targets(batch, support.expand_as(next_atoms))
            probability = self.bootstrapped(batch, next_atoms.softmax(-1))
            goal = categorical_projection(position=position, probability=probability, support=support)
            loss = categorical_loss(atoms, goal)
            value, goal_value = atoms.detach().softmax(-1) @ support, goal @ support
        weight = self.weight(batch)
        weighted = loss * weight * batch.weight.unsqueeze(-1)
        if hp.share_parameters:
            total = weighted.sum() / weight.sum().clamp(min=1)
        else:  # agents learn as if each were alone
            total = (weighted.sum((0, 1)) / weight.sum((0, 1)).clamp(min=1)).sum()
        diagnostics = {
            "q_value": weighted_mean(value, weight),
            "td_error": weighted_mean((value - goal_value).abs(), weight),
        }
        return total, mean_over_agents(loss.detach(), weight), diagnostics

    def chosen_atoms(self, networks: QPolicy, features: dict[str, Tensor], action: dict[str, Tensor]) -> Tensor:
        """Returns the atoms of actions, ``[L, N, A, M]``, from features ``[L, N, A, F]`` by group."""
        result = []
        for name, network in networks.items():
            atoms = network.head.atoms(features[name])
            index = action[name][..., None, None].expand(*action[name].shape, 1, atoms.shape[-1])
            result.append(atoms.gather(-2, index).squeeze(-2))
        return torch.cat(result, -2)

    def targets(self, batch: ReplayBatch, next_atoms: Tensor) -> Tensor:
        """Returns the targets of each atom of the successor, as of a value: ``[L, N, A, M]`` from ``[L, N, A, M]``."""
        return torch.vmap(lambda next_value: self.target(batch, next_value), in_dims=-1, out_dims=-1)(next_atoms)

    def bootstrapped(self, batch: ReplayBatch, next_atoms: Tensor) -> Tensor:
        """Returns for each step the entry ``[L, N, A, M]`` of the successor that its target is bootstrapped from."""
        done = last_steps(batch)
        return n_step_target(  # without rewards and discount, this is the entry itself
            reward=torch.zeros_like(next_atoms),
            next_value=next_atoms,
            terminated=torch.zeros_like(done)[..., None, None],
            done=done[..., None, None],
            gamma=1.0,
            steps=self.hparams.n_steps,
        )
