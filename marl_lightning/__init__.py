"""Multi-agent reinforcement learning as PyTorch Lightning modules.

The names below are imported when they are first used, so that a process which only needs an environment stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_lightning.algorithms import IPPO, MAPPO
    from marl_lightning.configuration import ConfigurationError
    from marl_lightning.data import RolloutDataModule
    from marl_lightning.envs import make_env, make_vector_env
    from marl_lightning.evaluation import evaluate, evaluate_checkpoint, load_checkpoint
    from marl_lightning.trainers import make_train
    from marl_lightning.training import TrainingResult, train

_HOMES = {
    "ConfigurationError": "configuration",
    "IPPO": "algorithms",
    "MAPPO": "algorithms",
    "RolloutDataModule": "data",
    "TrainingResult": "training",
    "evaluate": "evaluation",
    "evaluate_checkpoint": "evaluation",
    "load_checkpoint": "evaluation",
    "make_env": "envs",
    "make_train": "trainers",
    "make_vector_env": "envs",
    "train": "training",
}

__all__ = [
    "IPPO",
    "MAPPO",
    "ConfigurationError",
    "RolloutDataModule",
    "TrainingResult",
    "evaluate",
    "evaluate_checkpoint",
    "load_checkpoint",
    "make_env",
    "make_train",
    "make_vector_env",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("marl-lightning")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
