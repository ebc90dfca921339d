"""Duplex dueling value factorisation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from marl_lightning.algorithms.q_learning import QLearningModule, best_actions, values_of
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.mixers import DuplexDuelingMixer, one_hot
from marl_lightning.validation import PositiveInt, extends


class QPLEX(QLearningModule):
    """QPLEX (Wang et al. 2021): joint advantages are the agents' ones, each times a positive number of all actions.

    It can represent every joint value whose best joint action is made of the agents' best ones. See
    :class:`~marl_lightning.nn.mixers.DuplexDuelingMixer`.

    Args:
        num_heads: of the attention that weights advantages.
        hypernet_size: hidden width of the networks of the state; ``None`` makes them linear.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    is_joint = True

    @extends(QLearningModule.__init__)
    def __init__(self, *, num_heads: PositiveInt = 4, hypernet_size: PositiveInt | None = 64) -> None: ...

    def build_mixer(self, spec: EnvSpec) -> DuplexDuelingMixer:
        return DuplexDuelingMixer(
            num_agents=spec.num_agents,
            num_actions=sum(group.num_agents * group.action_size for group in spec.groups.values()),
            state_size=spec.state_size,
            num_heads=self.hparams.num_heads,
            hypernet_size=self.hparams.hypernet_size,
        )

    def mix(
        self,
        mixer: nn.Module | None,
        *,
        value: Mapping[str, Tensor],
        action: Mapping[str, Tensor],
        action_mask: Mapping[str, Tensor],
        state: Tensor,
    ) -> Tensor:
        chosen, best = values_of(value, action), values_of(value, best_actions(value, action_mask))
        joint_action = [one_hot(action[name], q.shape[-1]).flatten(-2) for name, q in value.items()]
        return mixer(chosen, best, torch.cat(joint_action, -1), state)
