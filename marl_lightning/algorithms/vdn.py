"""Value decomposition networks."""

from __future__ import annotations

from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.mixers import SumMixer


class VDN(QLearningModule):
    """Value decomposition networks (Sunehag et al. 2018): the value of the team is the sum of those of its agents.

    Arguments as for :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    is_joint = True

    def build_mixer(self, spec: EnvSpec) -> SumMixer:
        return SumMixer()
