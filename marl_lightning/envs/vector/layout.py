"""Which arrays a vector environment has, and their places in one block of memory. Needs numpy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from marl_lightning.envs.base import Observations, VectorStep
from marl_lightning.envs.spec import EnvSpec

T = TypeVar("T")
MakeArray = Callable[[tuple[int, ...], Any], T]
"""Called with shape and dtype."""

_ALIGNMENT = 64  # bytes of a cache line


def build_observations(spec: EnvSpec, num_envs: int, make: MakeArray[T]) -> Observations[T]:
    """Returns what ``make`` gives for every array of the decision points of ``num_envs`` instances."""
    groups = spec.groups.items()
    return Observations(
        observation={
            name: make((num_envs, group.num_agents, *group.observation_shape), group.observation_space.dtype)
            for name, group in groups
        },
        action_mask={
            name: make((num_envs, group.num_agents, group.action_size), np.bool_)
            for name, group in groups
            if group.is_discrete
        },
        alive={name: make((num_envs, group.num_agents), np.bool_) for name, group in groups},
        state=make((num_envs, spec.state_size), np.float32),
    )


def build_step(spec: EnvSpec, num_envs: int, make: MakeArray[T]) -> VectorStep[T]:
    """Returns what ``make`` gives for every array of the outcome of a vector step of ``num_envs`` instances."""
    return VectorStep(
        observations=build_observations(spec, num_envs, make),
        reward={name: make((num_envs, group.num_agents), np.float32) for name, group in spec.groups.items()},
        terminated=make((num_envs,), np.bool_),
        truncated=make((num_envs,), np.bool_),
        final=build_observations(spec, num_envs, make),
        info={key: make((num_envs,), np.float32) for key in spec.info_keys},
    )


def build_actions(spec: EnvSpec, num_envs: int, make: MakeArray[T]) -> dict[str, T]:
    """Returns what ``make`` gives for all groups' actions: int64 ``[E, A]`` or ``[E, A, P]``, float32 ``[E, A, d]``."""
    return {
        name: make((num_envs, group.num_agents, *group.action_shape), np.int64 if group.is_discrete else np.float32)
        for name, group in spec.groups.items()
    }


@dataclass(frozen=True)
class Block:
    """All arrays that the processes of a vector environment share.

    Attributes:
        step: outcome of a vector step, the decision points included.
        actions: per group, see :func:`build_actions`.
        reset_mask: ``[E]`` bool, the instances that the next reset is for.
        progress: ``[W, 8]`` int64; column 0 is the instance that a worker is busy with, or was last. A row is a cache
            line of its own, since workers write it all the time.
    """

    step: VectorStep[np.ndarray]
    actions: dict[str, np.ndarray]
    reset_mask: np.ndarray
    progress: np.ndarray

    @classmethod
    def build(cls, *, spec: EnvSpec, num_envs: int, num_workers: int, make: MakeArray[Any]) -> Block:
        """Returns the block of what ``make`` gives for every array, always asked for in the same order."""
        return cls(
            step=build_step(spec, num_envs, make),
            actions=build_actions(spec, num_envs, make),
            reset_mask=make((num_envs,), np.bool_),
            progress=make((num_workers, _ALIGNMENT // 8), np.int64),
        )


class Carver:
    """Hands out arrays of one buffer, one behind the other, each at the start of a cache line.

    Args:
        buffer: memory that lives as long as the arrays; without it only ``size`` is counted.

    Attributes:
        size: bytes used so far.
    """

    def __init__(self, buffer: Any = None) -> None:
        self._bytes = None if buffer is None else np.frombuffer(buffer, np.uint8)
        self.size = 0

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray | None:
        dtype = np.dtype(dtype)
        start, end = self.size, self.size + prod(shape) * dtype.itemsize
        self.size = -(-end // _ALIGNMENT) * _ALIGNMENT
        return None if self._bytes is None else self._bytes[start:end].view(dtype).reshape(shape)
