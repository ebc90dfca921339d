"""Many instances behind the interface of plain numpy arrays, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv
from marl_lightning.envs.interfaces.base import Host, Interface, random_seed, take_game
from marl_lightning.envs.vector import shared_memory, sync
from marl_lightning.envs.vector.buffers import map_observations

EnvFns = Sequence[Callable[[], Interface]]


class VectorInterface(Host[VectorEnv]):
    """``N`` instances with the arrays of :class:`Interface` and one more axis, the first, of length ``N``.

    ===================  ==============================================================================================
    observations         ``[N, A, O]``
    rewards              ``[N]`` float32; ``[N, A]`` with ``reward_aggr="none"``
    dones, truncated     ``[N]`` bool: terminated, and cut; see :class:`Interface`
    state                ``[N, S]``
    available actions    ``[N, A, K]`` bool
    agent mask           ``[N, A]`` bool
    env mask             ``[N]`` bool: which instances the next step will step
    infos                a list of ``N`` dictionaries
    ===================  ==============================================================================================

    **Ends of episodes.** Without ``auto_reset``, an instance that ended stands still until it is reset: everything
    stays as it was, flags included, rewards are 0, and its actions are ignored. With it, the instance is reset in the
    same step: everything is of the new episode, but rewards and flags are of the step that ended the old one, and its
    ``info`` has ``final_obs``, ``final_state``, ``final_avail_actions``, ``final_agent_mask`` and ``final_info``.

    Everything that is returned is a copy.

    Args:
        env: instances of games whose observations are flat, see :func:`take_game`.
        auto_reset: whether it was made with autoreset.
    """

    def __init__(self, env: VectorEnv, *, auto_reset: bool) -> None:
        self._auto_reset = auto_reset
        self._is_closed = False
        super().__init__(env)

    def _attach(self, env: VectorEnv) -> None:
        super()._attach(env)
        self._has_begun = False
        self._infos: list[dict[str, Any]] = [{} for _ in range(env.num_envs)]

    @property
    def n_envs(self) -> int:
        """Number of instances."""
        return self._env.num_envs

    def reset(
        self, *, seed: int | None = None, indices: int | Sequence[int] | np.ndarray | None = None
    ) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Starts episodes and returns the observations and infos of all instances.

        Args:
            seed: instance ``i`` gets ``seed + i``, and :meth:`sample` draws from ``seed``. The very first one is drawn
                at random by default; later, ``None`` goes on to the next episodes.
            indices: the instances to reset, others stay as they are: a number, several numbers, or ``[N]`` bool. All by
                default.

        Raises:
            ValueError: if a number is there twice, a mask has a wrong shape, or there are both a seed and indices.
            IndexError: if there is no such instance; numbers from the end do not count.
            RuntimeError: if the first reset is not one of all instances.
        """
        self._check_open()
        mask = None if indices is None else _mask(indices, self.n_envs)
        if mask is not None and seed is not None:
            raise ValueError("seed and indices cannot be combined: a seed restarts all instances")
        if mask is not None and not self._has_begun:
            raise RuntimeError("the first reset must be without indices")
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        elif not self._has_begun:
            seed = random_seed()
        observations = self._env.reset(seed=seed, mask=mask)
        if not self._has_begun:  # it is the same memory every time
            self._observations = map_observations(Tensor.numpy, observations)
        self._has_begun = True
        for index in np.arange(self.n_envs) if mask is None else np.flatnonzero(mask):
            self._infos[index] = {}
        return self._layout.observations(self._now()), [_copy(info) for info in self._infos]

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Makes one step and returns observations, rewards, dones, truncated and infos.

        Args:
            actions: ``[N, A]`` integers, ``[N, A, P]`` if they have several parts, ``[N, A, K]`` floats if continuous.

        Raises:
            ValueError: if actions have a wrong shape or kind, or are not legal.
            RuntimeError: if all instances have ended.
        """
        alive = self.get_agent_mask()
        step = self._env.step(self._layout.actions(actions, (self.n_envs,)))
        terminated, truncated = step.terminated.numpy().copy(), step.truncated.numpy().copy()
        info = {key: value.tolist() for key, value in step.info.items()}
        self._infos = [{key: values[index] for key, values in info.items()} for index in range(self.n_envs)]
        if self._auto_reset and (ended := terminated | truncated).any():
            final = map_observations(Tensor.numpy, step.final)
            for index in np.flatnonzero(ended):
                self._infos[index] = self._final(final, index, info=self._infos[index])
        reward = self._layout.reward({name: reward.numpy() for name, reward in step.reward.items()}, alive)
        observations = self._layout.observations(self._now())
        return observations, reward, terminated, truncated, [_copy(info) for info in self._infos]

    def get_state(self) -> np.ndarray:
        """Returns the global states."""
        return self._now().state.copy()

    def get_avail_actions(self) -> np.ndarray:
        """Returns the available actions."""
        return self._layout.available_actions(self._now())

    def get_agent_mask(self) -> np.ndarray:
        """Returns who is alive."""
        return self._layout.agent_mask(self._now())

    def get_env_mask(self) -> np.ndarray:
        """Returns which instances the next step will step."""
        self._now()
        if self._auto_reset:
            return np.ones(self.n_envs, np.bool_)
        return self._env.running.numpy().copy()

    def sample(self) -> np.ndarray:
        """Returns random legal actions, zeros for instances that have ended. Asks no process for it.

        Raises:
            RuntimeError: if all instances have ended.
        """
        running = self.get_env_mask()
        if not running.any():
            raise RuntimeError("all instances have ended: call reset first")
        actions = self._layout.sample(self.get_avail_actions(), self._rng)
        actions[~running] = 0
        return actions

    def render(self, index: int) -> np.ndarray:
        """Returns the picture of an instance, see :meth:`VectorEnv.render`."""
        return self._env.render(index)

    def close(self) -> None:
        """Frees what the games hold, processes included. May be called repeatedly."""
        self._is_closed = True
        self._env.close()

    def _final(self, final: Observations[np.ndarray], index: int, *, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the info of an instance that has ended and begun anew."""
        row = map_observations(lambda array: array[index], final)
        return {
            "final_obs": self._layout.observations(row),
            "final_state": row.state.copy(),
            "final_avail_actions": self._layout.available_actions(row),
            "final_agent_mask": self._layout.agent_mask(row),
            "final_info": info,
        }

    def _now(self) -> Observations[np.ndarray]:
        self._check_open()
        if not self._has_begun:
            raise RuntimeError("the environment has not been reset: call reset first")
        return self._observations

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the vector environment is closed")


class SyncVectorEnv(VectorInterface):
    """Instances stepped one after another in this process; see :class:`VectorInterface`.

    Args:
        env_fns: a function for each instance, which returns an :class:`Interface`, wrapped or not. All must have equal
            specs: the same game with the same arguments and wrappers.
        auto_reset: whether instances that ended are reset in the same step.

    Raises:
        ValueError: if there is no function, or specs differ.
        TypeError: if a function returns something else.
    """

    def __init__(self, env_fns: EnvFns, auto_reset: bool = False) -> None:
        factories = _factories(env_fns)
        env = sync.SyncVectorEnv(factory=factories, num_envs=len(factories), seed=0, autoreset=auto_reset)
        super().__init__(env, auto_reset=auto_reset)


class SubprocVectorEnv(VectorInterface):
    """Instances stepped by a few worker processes; see :class:`VectorInterface`. The same results as in one process.

    Workers have several instances each and write into shared memory, see
    :class:`~marl_lightning.envs.vector.shared_memory.SharedMemoryVectorEnv`.

    Args:
        env_fns: see :class:`SyncVectorEnv`; lambdas and local functions too.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        auto_reset: see :class:`SyncVectorEnv`.
        num_workers: processes; by default one for every core that this process may use.
        timeout: seconds within which workers must start, and answer every call.

    Raises:
        ValueError: see :class:`SyncVectorEnv`; or if ``start_method``, ``num_workers`` or ``timeout`` is out of range.
        TypeError: see :class:`SyncVectorEnv`.
        RuntimeError: if a worker dies or does not answer in time.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
        auto_reset: bool = False,
        *,
        num_workers: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        factories = _factories(env_fns)
        env = shared_memory.SharedMemoryVectorEnv(
            factory=factories,
            num_envs=len(factories),
            seed=0,
            num_workers=num_workers,
            context=start_method,
            timeout=timeout,
            autoreset=auto_reset,
        )
        super().__init__(env, auto_reset=auto_reset)


def _factories(env_fns: EnvFns) -> list[Callable[[], Any]]:
    return [partial(take_game, env_fn) for env_fn in env_fns]


def _copy(info: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of numbers, arrays and a dictionary of numbers."""
    return {key: value if isinstance(value, float) else value.copy() for key, value in info.items()}


def _mask(indices: int | Sequence[int] | np.ndarray, num_envs: int) -> np.ndarray:
    """Returns the instances that are meant, ``[N]`` bool."""
    chosen = np.asarray(indices)
    if chosen.dtype == np.bool_:
        if chosen.shape != (num_envs,):
            raise ValueError(f"a mask of instances must have shape ({num_envs},), got {chosen.shape}")
        return chosen.copy()
    if chosen.ndim > 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise ValueError(f"indices must be a number, a list of numbers or a bool mask, got {indices!r}")
    chosen = chosen.reshape(-1).astype(np.int64)
    outside = (chosen < 0) | (chosen >= num_envs)
    if outside.any():
        raise IndexError(f"indices must be in [0, {num_envs}), got {chosen[outside].tolist()}")
    mask = np.zeros(num_envs, np.bool_)
    mask[chosen] = True
    if mask.sum() != len(chosen):
        raise ValueError(f"indices must differ, got {chosen.tolist()}")
    return mask
