"""One instance of a game that exists only as a vector environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step, VectorEnv
from marl_lightning.envs.validation import action_arrays, check_legal
from marl_lightning.envs.vector.buffers import map_observations


class SingleEnv(MultiAgentEnv):
    """A :class:`MultiAgentEnv` view of a vector environment with one instance, of which it takes ownership.

    Plays the same episodes as that instance would: the reset after an episode returns the start that the vector
    environment has made already. For the same reason ``render`` shows this start once an episode is over.

    Args:
        env: a vector environment with ``num_envs=1``.

    Raises:
        ValueError: if ``env`` has more than one instance.
    """

    def __init__(self, *, env: VectorEnv) -> None:
        if env.num_envs != 1:
            raise ValueError(f"SingleEnv needs a vector environment with num_envs=1, got {env.num_envs}")
        self.spec = env.spec
        self._env = env
        self._current: Observations[torch.Tensor] | None = None
        self._over = False

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        if seed is not None or not self._over:
            self._current = self._env.reset(seed=seed)
        self._over = False
        return _first(self._current)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._current is None or self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        current = map_observations(lambda tensor: tensor[0].numpy(), self._current)
        check_legal(self.spec, arrays, action_mask=current.action_mask, alive=current.alive)
        step = self._env.step({name: torch.from_numpy(array[None]) for name, array in arrays.items()})
        self._current = step.observations
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        self._over = terminated or truncated
        return Step(
            observations=_first(step.final if self._over else step.observations),
            reward={name: reward[0].numpy().copy() for name, reward in step.reward.items()},
            terminated=terminated,
            truncated=truncated,
            info={key: float(value[0]) for key, value in step.info.items()},
        )

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`."""
        return self._env.render(0)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MultiAgentEnv.state_dict`."""
        return {"env": self._env.state_dict(), "started": self._current is not None, "over": self._over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`MultiAgentEnv.load_state_dict`."""
        observations = self._env.load_state_dict(state["env"])
        self._current = observations if state["started"] else None
        self._over = state["over"]

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        self._env.close()


def _first(observations: Observations[torch.Tensor]) -> Observations[np.ndarray]:
    """Returns a copy of the first row, since the vector environment overwrites its own."""
    return map_observations(lambda tensor: tensor[0].numpy().copy(), observations)
