"""Algorithms as LightningModules."""

from marl_lightning.algorithms.base import MARLModule, Policy
from marl_lightning.algorithms.ippo import IPPO
from marl_lightning.algorithms.mappo import MAPPO
from marl_lightning.algorithms.on_policy import OnPolicyActorCriticModule

__all__ = ["IPPO", "MAPPO", "MARLModule", "OnPolicyActorCriticModule", "Policy"]
