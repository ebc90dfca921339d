"""Algorithms as LightningModules."""

from marl_lightning.algorithms.base import MARLModule, Policy
from marl_lightning.algorithms.ippo import IPPO
from marl_lightning.algorithms.iql import IQL
from marl_lightning.algorithms.mappo import MAPPO
from marl_lightning.algorithms.on_policy import OnPolicyActorCriticModule
from marl_lightning.algorithms.q_learning import QLearningModule
from marl_lightning.algorithms.qmix import QMIX
from marl_lightning.algorithms.vdn import VDN

__all__ = [
    "IPPO",
    "IQL",
    "MAPPO",
    "QMIX",
    "VDN",
    "MARLModule",
    "OnPolicyActorCriticModule",
    "Policy",
    "QLearningModule",
]
