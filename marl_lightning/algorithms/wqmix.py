"""Weighted monotonic value factorisation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from marl_lightning.algorithms.q_learning import QLearningModule, QNetwork, QPolicy, action_masks, join
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.losses.td import greedy_action, take, td_loss
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
        body = {key: hp[key] for key in ("hidden_sizes", "recurrent", "activation", "layer_norm")}
        central_networks = QPolicy()
        for name, group in spec.groups.items():
            central_networks[name] = QNetwork(group=group, share_parameters=hp.share_parameters, **body)
        return WeightedMixer(
            monotonic=MonotonicMixer(hypernet_size=hp.hypernet_size, **sizes),
            central_networks=central_networks,
            central=UnrestrictedMixer(hidden_size=hp.central_hidden_size, **sizes),
        )

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        hp, steps = self.hparams, batch.steps[batch.burn_in :]
        following, mask, next_mask = steps[schema.NEXT], action_masks(steps), action_masks(steps[schema.NEXT])
        state, action = steps[schema.STATE], {name: steps[name, schema.ACTION] for name in self.networks}
        online = self.agent_values(self.networks, batch)
        central = self.agent_values(self.mixer.central_networks, batch)
        with torch.no_grad():
            target_central = self.agent_values(self.target_mixer.central_networks, batch)
            chooser = online if hp.double_q else self.agent_values(self.target_networks, batch)
            next_action = {name: greedy_action(q, next_mask[name]) for name, q in chooser.next_value.items()}
            next_chosen = chosen(target_central.next_value, next_action)
            goal = self.target(batch, self.target_mixer.central(next_chosen, following[schema.STATE]))
        total = self.mix(self.mixer, value=online.value, action=action, action_mask=mask, state=state)
        central_total = self.mixer.central(chosen(central.value, action), state)
        with torch.no_grad():
            best = {name: greedy_action(q, mask[name]) for name, q in online.value.items()}
            agrees = join({name: (best[name] == action[name]) | ~steps[name, schema.ALIVE] for name in best})
            action_weight = self.action_weight(
                total=total,
                goal=goal,
                best_central=self.mixer.central(chosen(central.value, best), state),
                is_best=agrees.all(-1, keepdim=True),
                alpha=hp.alpha,
            )
        weight = self.weight(batch)
        importance = batch.weight.unsqueeze(-1)
        monotonic_loss = td_loss(
            total - goal, weight, importance=importance * action_weight, huber_delta=hp.huber_delta
        )
        central_loss = td_loss(central_total - goal, weight, importance=importance, huber_delta=hp.huber_delta)
        error = (total - goal).detach().abs()
        diagnostics = {
            "q_value": weighted_mean(total, weight),
            "td_error": weighted_mean(error, weight),
            "central_loss": central_loss,
            "action_weight": weighted_mean(action_weight, weight),
        }
        return monotonic_loss + central_loss, (error * weight).squeeze(-1), diagnostics


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


def chosen(value: Mapping[str, Tensor], action: Mapping[str, Tensor]) -> Tensor:
    """Returns the values of the actions of all agents, ``[..., A]``."""
    return join({name: take(value[name], action[name]) for name in value})
