"""Value factorisation by attention."""

from __future__ import annotations

from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.mixers import AttentionMixer
from marl_lightning.validation import PositiveInt, extends


class QATTEN(QLearningModule):
    """Qatten (Yang et al. 2020): several weighted sums of the agents' values, the weights coming from attention.

    See :class:`~marl_lightning.nn.mixers.AttentionMixer`.

    Args:
        num_heads: weighted sums.
        embedding_size: size of queries and keys.
        hypernet_size: hidden width of the networks that make queries and head weights; ``None`` makes them linear.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    is_joint = True

    @extends(QLearningModule.__init__)
    def __init__(
        self,
        *,
        num_heads: PositiveInt = 4,
        embedding_size: PositiveInt = 32,
        hypernet_size: PositiveInt | None = 64,
    ) -> None: ...

    def build_mixer(self, spec: EnvSpec) -> AttentionMixer:
        return AttentionMixer(
            num_agents=spec.num_agents,
            state_size=spec.state_size,
            num_heads=self.hparams.num_heads,
            embedding_size=self.hparams.embedding_size,
            hypernet_size=self.hparams.hypernet_size,
        )
