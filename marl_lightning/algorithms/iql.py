"""Independent Q-learning."""

from __future__ import annotations

from marl_lightning.algorithms.q_learning import QLearningModule


class IQL(QLearningModule):
    """Independent deep Q-learning (Tan 1993; Tampuu et al. 2017): every agent learns the values of its own actions.

    The others are a part of its environment. Arguments as for
    :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """
