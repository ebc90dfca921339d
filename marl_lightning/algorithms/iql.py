"""Independent Q-learning."""

from __future__ import annotations

from collections.abc import Sequence

from marl_lightning.algorithms.freezing import FrozenAgents, OpponentMode, Opponents, check_opponents
from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.validation import extends


class IQL(QLearningModule):
    """Independent deep Q-learning (Tan 1993; Tampuu et al. 2017): every agent learns the values of its own actions.

    The others are a part of its environment, and they may be frozen: they then act, but their networks stay as they
    are, bit for bit. In evaluations all agents act greedily.

    Args:
        trainable_agents: names of the agents that learn, which must not share parameters with others; ``None`` for all.
        opponent_mode: how the others act while these learn: ``"greedy"``; by ``"softmax"`` of the values; or
            ``"epsilon"``-greedily.
        opponent_rate: temperature of the softmax, or the probability of a random action; ``None`` if greedy.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.

    Raises:
        ValueError: if two settings exclude each other, or there is no agent of such a name.
    """

    @extends(QLearningModule.__init__)
    def __init__(
        self,
        *,
        trainable_agents: Sequence[str] | None = None,
        opponent_mode: OpponentMode = "greedy",
        opponent_rate: float | None = None,
        share_parameters: bool = True,
    ) -> None:
        check_opponents(
            trainable_agents=trainable_agents,
            mode=opponent_mode,
            rate=opponent_rate,
            share_parameters=share_parameters,
        )

    def use_spec(self, spec: EnvSpec) -> None:
        super().use_spec(spec)
        hp = self.hparams
        if hp.trainable_agents is not None:
            frozen = FrozenAgents(spec=spec, trainable=hp.trainable_agents)
            self.freeze(frozen, Opponents(frozen=frozen, mode=hp.opponent_mode, rate=hp.opponent_rate))
