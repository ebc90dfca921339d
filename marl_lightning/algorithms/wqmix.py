"""Weighted monotonic value factorisation."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from marl_lightning.algorithms.q_learning import (
    AgentValues,
    QLearningModule,
    QPolicy,
    action_masks,
    actions,
    best_actions,
    join,
    values_of,
)
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.mixers import MonotonicMixer, UnrestrictedMixer
from marl_lightning.nn.statistics import weighted_mean
from marl_lightning.validation import Fraction, PositiveInt, extends


class WeightedMixer(nn.Module):
    """The monotonic mixer of the team, and the networks and the mixer of the unrestricted value ``Q*`` beside it."""

    def __init__(self, *, monotonic: MonotonicMixer, central_networks: QPolicy, central: UnrestrictedMixer):
        super().__init__()
        self.monotonic = monotonic
        self.central_networks = central_networks
        self.central = central

    def forward(self, value: Tensor, state: Tensor) -> Tensor:
        """Returns the monotonic value ``[..., 1]``."""
        return self.monotonic(value, state)


class WeightedQMIX(QLearningModule):
    """Weighted QMIX (Rashid et al. 2020), the base of its two forms.

    QMIX cannot represent every joint value, and spends its capacity on all joint actions alike. Here a second, central
    value ``Q*`` without restrictions is learned, which targets are made of, and the monotonic one, by which agents act,
    is drawn to the same targets with less weight for joint actions that matter less::

        y = r + gamma (1 - terminated) Q*(s', argmax Q_tot(s', .))
        loss = mean w(s, u) (Q_tot - y)^2 + mean (Q* - y)^2
    """

    is_joint = True

    @extends(QLearningModule.__init__)
    def __init__(
        self,
        *,
        alpha: Fraction = 0.1,
        embedding_size: PositiveInt = 32,
        hypernet_size: PositiveInt | None = 64,
        central_hidden_size: PositiveInt = 256,
    ) -> None: ...

    @abstractmethod
    def action_weight(
        self, *, total: Tensor, goal: Tensor, best_central: Tensor, is_best: Tensor, alpha: float
    ) -> Tensor:
        """Returns the weights ``[..., 1]`` of joint actions.

        Args:
            total: ``[..., 1]``, their monotonic value.
            goal: ``[..., 1]``, their target.
            best_central: ``[..., 1]``, the central value of the best joint action.
            is_best: ``[..., 1]`` bool, whether they are the best joint action.
            alpha: the weight of those that matter less.
        """

    def build_mixer(self, spec: EnvSpec) -> WeightedMixer:
        hp = self.hparams
        sizes = {"num_agents": spec.num_agents, "state_size": spec.state_size, "embedding_size": hp.embedding_size}
        return WeightedMixer(
            monotonic=MonotonicMixer(hypernet_size=hp.hypernet_size, **sizes),
            central_networks=self.build_networks(spec),
            central=UnrestrictedMixer(hidden_size=hp.central_hidden_size, **sizes),
        )

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        steps = batch.steps[batch.burn_in :]
        state, action = steps[schema.STATE], actions(steps, self.networks)
        online = self.agent_values(self.networks, batch)
        central = self.agent_values(self.mixer.central_networks, batch)
        with torch.no_grad():
            goal = self.target(batch, self.next_value(batch, online))
        total = self.value(batch, online)
        central_total = self.mixer.central(values_of(central.value, action), state)
        with torch.no_grad():
            best = best_actions(online.value, action_masks(steps))
            agrees = join({name: (best[name] == action[name]) | ~steps[name, schema.ALIVE] for name in best})
            action_weight = self.action_weight(
                total=total,
                goal=goal,
                best_central=self.mixer.central(values_of(central.value, best), state),
                is_best=agrees.all(-1, keepdim=True),
                alpha=self.hparams.alpha,
            )
        _, error, diagnostics = self.temporal_difference(batch, total, goal)
        central_loss = self.td_loss(batch, central_total - goal)
        diagnostics |= {
            "central_loss": central_loss,
            "action_weight": weighted_mean(action_weight, self.weight(batch)),
        }
        return self.td_loss(batch, total - goal, importance=action_weight) + central_loss, error, diagnostics

    def next_value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        """Returns the central values of the true successors."""
        following = batch.steps[batch.burn_in :][schema.NEXT]
        central = self.agent_values(self.target_mixer.central_networks, batch).next_value
        chooser = online if self.hparams.double_q else self.agent_values(self.target_networks, batch)
        action = best_actions(chooser.next_value, action_masks(following))
        return self.target_mixer.central(values_of(central, action), following[schema.STATE])


class OWQMIX(WeightedQMIX):
    """Optimistically weighted QMIX (Rashid et al. 2020): ``w = 1`` if ``Q_tot < y``, else ``alpha``.

    Args:
        alpha: weight of joint actions that are overestimated.
        embedding_size: width of the monotonic mixing network.
        hypernet_size: hidden width of the networks that make its weights from the state; ``None`` makes them linear.
        central_hidden_size: width of the unrestricted mixing network.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    def action_weight(
        self, *, total: Tensor, goal: Tensor, best_central: Tensor, is_best: Tensor, alpha: float
    ) -> Tensor:
        return torch.where(total < goal, 1.0, alpha)


class CWQMIX(WeightedQMIX):
    """Centrally weighted QMIX (Rashid et al. 2020).

    ``w = 1`` if the joint action is the best one ``u*`` by ``Q_tot``, or if ``y > Q*(s, u*)``; else ``alpha``. Agents
    that are not alive always agree with ``u*``.

    Args:
        alpha: weight of joint actions that seem worse than ``u*``.
        embedding_size: width of the monotonic mixing network.
        hypernet_size: hidden width of the networks that make its weights from the state; ``None`` makes them linear.
        central_hidden_size: width of the unrestricted mixing network.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    def action_weight(
        self, *, total: Tensor, goal: Tensor, best_central: Tensor, is_best: Tensor, alpha: float
    ) -> Tensor:
        return torch.where(is_best | (goal > best_central), 1.0, alpha)
