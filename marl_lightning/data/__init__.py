"""Data modules: they own the environments, collect with the module's policy, and feed Lightning."""

from marl_lightning.data.counterfactual import CounterfactualReplay
from marl_lightning.data.replay import ReplayDataModule
from marl_lightning.data.rollout import RolloutDataModule
from marl_lightning.data.schema import Rollout

__all__ = ["CounterfactualReplay", "ReplayDataModule", "Rollout", "RolloutDataModule"]
