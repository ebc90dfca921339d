"""Environments: their description, the two contracts, makers by name and a checker.

Names that need torch are imported on first use, so that worker processes stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from marl_lightning.envs.adapters.pettingzoo import PettingZooAdapter
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step, VectorEnv, VectorStep
from marl_lightning.envs.checker import check_env
from marl_lightning.envs.registry import make_env, make_vector_env, register_family, registered_environments
from marl_lightning.envs.spec import EnvSpec, GroupSpec

if TYPE_CHECKING:
    from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv
    from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv as SubprocVectorEnv
    from marl_lightning.envs.vector.sync import SyncVectorEnv

__all__ = [
    "EnvSpec",
    "GroupSpec",
    "MultiAgentEnv",
    "Observations",
    "PettingZooAdapter",
    "SharedMemoryVectorEnv",
    "Step",
    "SubprocVectorEnv",
    "SyncVectorEnv",
    "VectorEnv",
    "VectorStep",
    "check_env",
    "make_env",
    "make_vector_env",
    "register_family",
    "registered_environments",
]


# SubprocVectorEnv is the usual name of such an environment.
_LAZY = {
    "SharedMemoryVectorEnv": ("marl_lightning.envs.vector.shared_memory", "SharedMemoryVectorEnv"),
    "SubprocVectorEnv": ("marl_lightning.envs.vector.shared_memory", "SharedMemoryVectorEnv"),
    "SyncVectorEnv": ("marl_lightning.envs.vector.sync", "SyncVectorEnv"),
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
