"""Monotonic value factorisation."""

from __future__ import annotations

from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.mixers import MonotonicMixer
from marl_lightning.validation import PositiveInt, extends


class QMIX(QLearningModule):
    """QMIX (Rashid et al. 2018): a network that never falls in the agents' values makes the value of the team of them.

    Args:
        embedding_size: width of the mixing network.
        hypernet_size: hidden width of the networks that make its weights from the state; ``None`` makes them linear.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    is_joint = True

    @extends(QLearningModule.__init__)
    def __init__(self, *, embedding_size: PositiveInt = 32, hypernet_size: PositiveInt | None = 64) -> None: ...

    def build_mixer(self, spec: EnvSpec) -> MonotonicMixer:
        return MonotonicMixer(
            num_agents=spec.num_agents,
            state_size=spec.state_size,
            embedding_size=self.hparams.embedding_size,
            hypernet_size=self.hparams.hypernet_size,
        )
