"""Value transformation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from marl_lightning.algorithms.q_learning import (
    AgentValues,
    QLearningModule,
    action_masks,
    actions,
    best_actions,
    join,
    values_of,
)
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.losses.td import take
from marl_lightning.nn.joint_values import JOINT_VALUES, JointValue, StateValue
from marl_lightning.validation import NonNegativeFloat, PositiveInt, extends


class TransformedValue(nn.Module):
    """``Q_jt(s, u)`` and ``V_jt(s)``."""

    def __init__(self, *, joint: JointValue, offset: StateValue):
        super().__init__()
        self.joint = joint
        self.offset = offset


class QTRAN(QLearningModule):
    """QTRAN (Son et al. 2019): the sum of the agents' values is made to agree with a joint value where that matters.

    The joint value ``Q_jt`` is learned by temporal differences and restricted by nothing. The agents' values must sum
    to it at the agents' best actions, up to an offset by the state, and to no less elsewhere: then the agents' best
    actions are the best joint one::

        y      = r + gamma (1 - terminated) Q_jt(s', u*'),    u* the agents' best actions
        L_td   = (Q_jt(s, u) - y)^2
        L_opt  = (sum_i Q_i(u*_i) - Q_jt(s, u*) + V(s))^2
        L_nopt = min(0, sum_i Q_i(u_i) - Q_jt(s, u) + V(s))^2

    ``Q_jt`` has no gradient in the last two. ``variant="alt"`` has a joint value for each own action of every agent,
    the others' actions being given, and demands more: that the smallest difference over the own actions is 0
    (theorem 2)::

        L_nopt = mean_i (min_a Q_i(a) + sum_{j != i} Q_j(u_j) - Q_jt(s, (u_-i, a)) + V(s))^2

    Args:
        variant: ``"base"`` or ``"alt"``.
        opt_coefficient: of ``L_opt``.
        nopt_coefficient: of ``L_nopt``.
        embedding_size: width of the networks of the joint value.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    is_joint = True

    @extends(QLearningModule.__init__)
    def __init__(
        self,
        *,
        variant: Literal["base", "alt"] = "base",
        opt_coefficient: NonNegativeFloat = 1.0,
        nopt_coefficient: NonNegativeFloat = 1.0,
        embedding_size: PositiveInt = 64,
    ) -> None: ...

    def build_mixer(self, spec: EnvSpec) -> TransformedValue:
        hp = self.hparams
        joint = JOINT_VALUES[hp.variant](
            spec=spec,
            feature_size=hp.hidden_sizes[-1],
            embedding_size=hp.embedding_size,
            share_parameters=hp.share_parameters,
        )
        sizes = (hp.embedding_size, hp.embedding_size)
        return TransformedValue(joint=joint, offset=StateValue(state_size=spec.state_size, hidden_sizes=sizes))

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        hp, steps = self.hparams, batch.steps[batch.burn_in :]
        state, action, mask = steps[schema.STATE], actions(steps, self.networks), action_masks(steps)
        online = self.agent_values(self.networks, batch)
        joint = self.value(batch, online)
        with torch.no_grad():
            goal = self.target(batch, self.next_value(batch, online))
            best = best_actions(online.value, mask)
            best_joint = self.mixer.joint(online.features, best, state)
        value = {name: take(q, action[name]) for name, q in online.value.items()}
        total = join(value).sum(-1, keepdim=True)
        best_total = values_of(online.value, best).sum(-1, keepdim=True)
        offset = self.mixer.offset(state)
        if hp.variant == "base":
            shortfall = (total - joint.detach() + offset).clamp(max=0)
        else:
            with torch.no_grad():
                own = self.mixer.joint.of_own_actions(online.features, action, state)
            others = {name: total - value[name] for name in value}
            difference = {name: online.value[name] + (others[name] + offset).unsqueeze(-1) - own[name] for name in own}
            shortfall = join({name: smallest(difference[name], mask[name]) for name in own})
        td, error, diagnostics = self.temporal_difference(batch, joint, goal)
        opt = self.td_loss(batch, best_total - best_joint + offset)
        nopt = self.td_loss(batch, shortfall)
        loss = td + hp.opt_coefficient * opt + hp.nopt_coefficient * nopt
        return loss, error, diagnostics | {"td_loss": td, "opt_loss": opt, "nopt_loss": nopt}

    def value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        """Returns joint values ``[L, N, 1]``, or with ``variant="alt"`` ``[L, N, A]``, one by each agent's network."""
        steps = batch.steps[batch.burn_in :]
        return self.mixer.joint(online.features, actions(steps, self.networks), steps[schema.STATE])

    def next_value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        following = batch.steps[batch.burn_in :][schema.NEXT]
        target = self.agent_values(self.target_networks, batch)
        chooser = online if self.hparams.double_q else target
        action = best_actions(chooser.next_value, action_masks(following))
        return self.target_mixer.joint(target.next_features, action, following[schema.STATE])


def smallest(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the smallest legal entries ``[...]`` of ``[..., n]``."""
    return x.masked_fill(~mask, torch.inf).amin(-1)
