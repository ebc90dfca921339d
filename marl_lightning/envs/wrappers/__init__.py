"""Wrappers: environments that change what another one returns, around one instance or a vector environment alike.

The order matters: the first wrapper is the innermost. A sensible one is time limit, observations (normalised before
IDs are added, which then stay 0 or 1), rewards (clipped before they are normalised)::

    env = make_vector_env("lbf/Foraging-8x8-2p-2f-coop-v3", num_envs=64)
    env = TimeLimit(env, max_episode_steps=150)
    env = NormalizeObservation(env)
    env = AddAgentID(env)
    env = ClipReward(env, low=-1.0, high=1.0)
    env = NormalizeReward(env, gamma=0.99)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from marl_lightning.envs.wrappers.base import Wrapper, layers
from marl_lightning.envs.wrappers.configured import wrap
from marl_lightning.envs.wrappers.episode import RecordEpisodeStatistics, TimeLimit, recorded_returns
from marl_lightning.envs.wrappers.observation import (
    AddAgentID,
    NormalizeObservation,
    SelectFeatures,
    StackObservations,
    TransformObservation,
)
from marl_lightning.envs.wrappers.reward import AggregateReward, ClipReward, NormalizeReward, TransformReward
from marl_lightning.envs.wrappers.running import (
    freeze_statistics,
    load_statistics,
    merge_statistics,
    running_statistics,
    statistics_state_dict,
)
from marl_lightning.envs.wrappers.statistics import RunningStatistics

if TYPE_CHECKING:
    from marl_lightning.envs.wrappers.opponent_pool import OpponentPoolEnv as OpponentPoolEnv
    from marl_lightning.envs.wrappers.opponents import Opponents as Opponents

# These need torch, which worker processes are to do without: they are imported when they are asked for by name.
_NEED_TORCH = {"OpponentPoolEnv": "opponent_pool", "Opponents": "opponents"}

__all__ = [
    "AddAgentID",
    "AggregateReward",
    "ClipReward",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordEpisodeStatistics",
    "RunningStatistics",
    "SelectFeatures",
    "StackObservations",
    "TimeLimit",
    "TransformObservation",
    "TransformReward",
    "Wrapper",
    "freeze_statistics",
    "layers",
    "load_statistics",
    "merge_statistics",
    "recorded_returns",
    "running_statistics",
    "statistics_state_dict",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
