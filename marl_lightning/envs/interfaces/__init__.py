"""Games in plain numpy arrays: one interface to all, wrappers for it, and vector environments of several instances.

Unlike :class:`~marl_lightning.envs.MultiAgentEnv`, which has an array for each group of like agents, an interface has
one for all agents, padded with zeros where they differ. It wraps such an environment, so that every game of this
library has one::

    env = LBFInterface(env_name="Foraging-2s-10x10-3p-3f-coop-v3", max_episode_steps=150)
    env = make_interface("smac/3m", reward_aggr="first")
    env = Interface(MyGame())

    obs, info = env.reset(seed=42)
    obs, reward, terminated, truncated, info = env.step(env.sample())

The vector environments need torch and are imported on first use, so that worker processes stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from marl_lightning.envs.interfaces.base import Interface
from marl_lightning.envs.interfaces.games import (
    LBFInterface,
    MAgent2Interface,
    MAmujocoInterface,
    PettingZooInterface,
    RWAREInterface,
    SMACInterface,
    SMACliteInterface,
    SMACv2Interface,
    make_interface,
)
from marl_lightning.envs.interfaces.wrappers import (
    AddAgentID,
    ClipReward,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    StackObservations,
    TimeLimit,
    TransformObservation,
    TransformReward,
)

if TYPE_CHECKING:
    from marl_lightning.envs.interfaces.vector import SubprocVectorEnv, SyncVectorEnv

__all__ = [
    "AddAgentID",
    "ClipReward",
    "Interface",
    "LBFInterface",
    "MAgent2Interface",
    "MAmujocoInterface",
    "NormalizeObservation",
    "NormalizeReward",
    "PettingZooInterface",
    "RWAREInterface",
    "RecordEpisodeStatistics",
    "SMACInterface",
    "SMACliteInterface",
    "SMACv2Interface",
    "StackObservations",
    "SubprocVectorEnv",
    "SyncVectorEnv",
    "TimeLimit",
    "TransformObservation",
    "TransformReward",
    "make_interface",
]


def __getattr__(name: str) -> object:
    if name in ("SubprocVectorEnv", "SyncVectorEnv"):
        return getattr(importlib.import_module(f"{__name__}.vector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
