"""Preallocated numpy arrays of a vector environment and the tensors that look at the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from marl_lightning.envs.base import Observations, VectorStep
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.vector.layout import build_observations, build_step


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns zeros that a GPU, if there is one, can read while the CPU goes on: the memory is page-locked then."""
    if not torch.cuda.is_available():
        return np.zeros(shape, dtype)
    dtype = np.dtype(dtype)
    return torch.zeros((*shape, dtype.itemsize), dtype=torch.uint8, pin_memory=True).numpy().view(dtype)[..., 0]


def allocate_observations(spec: EnvSpec, num_envs: int) -> Observations[np.ndarray]:
    """Returns zeroed arrays for the decision points of ``num_envs`` instances."""
    return build_observations(spec, num_envs, zeros)


def allocate_step(spec: EnvSpec, num_envs: int) -> VectorStep[np.ndarray]:
    """Returns zeroed arrays for the outcome of a vector step of ``num_envs`` instances."""
    return build_step(spec, num_envs, zeros)


def map_observations(function: Callable, observations: Observations) -> Observations:
    """Applies ``function`` to every array of ``observations``."""
    return Observations(
        observation={name: function(array) for name, array in observations.observation.items()},
        action_mask={name: function(array) for name, array in observations.action_mask.items()},
        alive={name: function(array) for name, array in observations.alive.items()},
        state=function(observations.state),
    )


def as_tensors(step: VectorStep[np.ndarray]) -> VectorStep[torch.Tensor]:
    """Returns tensors that share the memory of ``step``."""
    return VectorStep(
        observations=map_observations(torch.from_numpy, step.observations),
        reward={name: torch.from_numpy(array) for name, array in step.reward.items()},
        terminated=torch.from_numpy(step.terminated),
        truncated=torch.from_numpy(step.truncated),
        final=map_observations(torch.from_numpy, step.final),
        info={key: torch.from_numpy(array) for key, array in step.info.items()},
    )
