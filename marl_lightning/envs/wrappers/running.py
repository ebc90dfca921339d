"""Running statistics of the wrappers around an environment: kept, shared with evaluation, saved, merged, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from marl_lightning.envs.base import MultiAgentEnv, VectorEnv
from marl_lightning.envs.wrappers.base import Wrapper, layers
from marl_lightning.envs.wrappers.statistics import RunningStatistics

if TYPE_CHECKING:
    from torch import Tensor


class StatisticsWrapper(Wrapper):
    """Base of wrappers that normalise by running statistics.

    Args:
        env: see :class:`Wrapper`.
        statistics: see below.
        epsilon: see below.
        update_running_statistics: see below.
        **arguments: for the next base class.

    Attributes:
        statistics: by name, usually that of a group. A replica has those of the environment that it was made from.
        update_running_statistics: whether they follow the data. Always False in a replica.
        epsilon: added to variances.

    Raises:
        ValueError: if ``epsilon`` is not positive.
    """

    def __init__(
        self,
        env: MultiAgentEnv | VectorEnv,
        *,
        statistics: dict[str, RunningStatistics],
        epsilon: float,
        update_running_statistics: bool,
        **arguments: Any,
    ) -> None:
        if not epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {epsilon}")
        super().__init__(env, **arguments)
        self.statistics = statistics
        self.epsilon = epsilon
        self.update_running_statistics = update_running_statistics
        self._shared = False

    def _memory(self) -> dict[str, np.ndarray]:
        return {**super()._memory(), **self._statistics_arrays()}

    def _statistics_arrays(self) -> dict[str, np.ndarray]:
        return {
            f"statistics.{name}.{moment}": array
            for name, statistics in self.statistics.items()
            for moment, array in statistics.arrays().items()
        }

    def _before_load(self) -> None:
        if self._shared:  # what is loaded into a replica must not change its origin
            self.statistics = {name: RunningStatistics(known.shape) for name, known in self.statistics.items()}
            self._shared = False

    def _follow(self, leader: StatisticsWrapper) -> None:
        self.statistics = leader.statistics
        self._shared = True
        self.update_running_statistics = False


def running_statistics(env: MultiAgentEnv | VectorEnv) -> dict[str, RunningStatistics]:
    """Returns all running statistics of the wrappers around ``env``, by place, wrapper and group; empty without any."""
    return {
        f"{place}.{type(layer).__name__}.{name}": statistics
        for place, layer in _statistics_layers(env).items()
        for name, statistics in layer.statistics.items()
    }


def freeze_statistics(env: MultiAgentEnv | VectorEnv) -> None:
    """Stops all running statistics of the wrappers around ``env`` from following the data, for evaluation say."""
    for layer in _statistics_layers(env).values():
        layer.update_running_statistics = False


def statistics_state_dict(env: VectorEnv) -> dict[str, Tensor]:
    """Returns copies of all running statistics as tensors; empty without any.

    Unlike ``env.state_dict()``, this can always be saved, whether or not the game can.
    """
    import torch

    return {
        f"{key}.{moment}": torch.tensor(array)
        for key, statistics in running_statistics(env).items()
        for moment, array in statistics.arrays().items()
    }


def load_statistics(env: VectorEnv, state: Mapping[str, Any]) -> None:
    """Restores what :func:`statistics_state_dict` returned.

    Raises:
        ValueError: if ``env`` has other wrappers, or other shapes.
    """
    for layer in _statistics_layers(env).values():
        layer._before_load()
    arrays = {
        f"{key}.{moment}": array
        for key, statistics in running_statistics(env).items()
        for moment, array in statistics.arrays().items()
    }
    shapes = {name: tuple(np.shape(value)) for name, value in state.items()}
    expected = {name: array.shape for name, array in arrays.items()}
    if shapes != expected:
        raise ValueError(
            f"the saved running statistics {shapes} do not fit those of the wrappers, {expected}: "
            "use the wrappers that they were saved with"
        )
    for name, array in arrays.items():
        array[...] = np.asarray(state[name])


def merge_statistics(env: VectorEnv, all_gather: Callable[[Tensor], Tensor]) -> None:
    """Merges the running statistics of several processes, exactly: each sample of each process counts once.

    A collective, to be called in all processes after a rollout; none is made if there are no statistics.

    Args:
        env: the environment of this process; all processes have the same wrappers.
        all_gather: takes a float64 tensor ``[n]`` and returns those of all processes, ``[world_size, n]``.
    """
    import torch

    statistics = list(running_statistics(env).values())
    if not statistics:
        return
    packed = [entry.pack() for entry in statistics]
    everyone = all_gather(torch.from_numpy(np.concatenate(packed))).numpy(force=True)
    start = 0
    for entry, own in zip(statistics, packed, strict=True):
        entry.merge(everyone[:, start : start + len(own)])
        start += len(own)


def _statistics_layers(env: MultiAgentEnv | VectorEnv) -> dict[int, StatisticsWrapper]:
    """Returns the wrappers that have statistics, by place, the innermost wrapper being 0."""
    wrappers = list(layers(env))[::-1]
    return {place: layer for place, layer in enumerate(wrappers) if isinstance(layer, StatisticsWrapper)}
