"""Many instances of a Python game, stepped one after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorEnv, VectorStep
from marl_lightning.envs.validation import action_arrays, check_num_envs, check_reset
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors, map_observations


class SyncVectorEnv(VectorEnv):
    """``num_envs`` instances of a :class:`MultiAgentEnv`, stepped in a loop.

    Results are written into preallocated arrays that the returned tensors share. Instances keep their state if
    ``spec.can_checkpoint``; their ``state_dict`` must then hold only tensors, numbers, strings and containers of them.

    Args:
        factory: returns a new instance at every call. All instances must have equal specs.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i`` at the first reset.

    Raises:
        ValueError: if ``num_envs`` is less than 1 or the specs of the instances differ.

    Errors that an instance raises keep their type and get a note with the index of the instance.
    """

    def __init__(self, *, factory: Callable[[], MultiAgentEnv], num_envs: int, seed: int) -> None:
        check_num_envs(num_envs)
        self.num_envs = num_envs
        self.seed = seed
        self._factory = factory
        self._envs = [factory() for _ in range(num_envs)]
        self.spec = self._envs[0].spec
        for index, env in enumerate(self._envs):
            if env.spec != self.spec:
                self.close()
                raise ValueError(f"all instances need equal specs, but {index} has {env.spec} and 0 has {self.spec}")
        self._arrays = allocate_step(self.spec, num_envs)
        self._tensors = as_tensors(self._arrays)
        self._started = False

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Raises ``RuntimeError`` if the very first reset is a partial one."""
        check_reset(self.num_envs, seed=seed, mask=mask)
        if not self._started:
            if mask is not None:
                raise RuntimeError("the first reset must be without a mask")
            seed = self.seed if seed is None else seed
        if seed is not None:
            self.seed = seed
        for index in range(self.num_envs) if mask is None else np.flatnonzero(mask):
            with self._naming(index):
                observations = self._envs[index].reset(seed=None if seed is None else seed + int(index))
                _write(self._arrays.observations, index, observations)
        self._started = True
        return self._tensors.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`. Raises ``ValueError`` if an action has a wrong shape or is not legal."""
        if not self._started:
            raise RuntimeError("call reset before step")
        arrays, actions = self._arrays, action_arrays(self.spec, actions, (self.num_envs,))
        for index, env in enumerate(self._envs):
            with self._naming(index):
                step = env.step({name: action[index] for name, action in actions.items()})
                for name, reward in step.reward.items():
                    arrays.reward[name][index] = reward
                for key, value in step.info.items():
                    arrays.info[key][index] = value
                arrays.terminated[index] = step.terminated
                arrays.truncated[index] = step.truncated
                observations = step.observations
                if step.terminated or step.truncated:
                    _write(arrays.final, index, observations)
                    observations = env.reset()
                _write(arrays.observations, index, observations)
        return self._tensors

    def replicate(self, *, num_envs: int, seed: int) -> SyncVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = SyncVectorEnv(factory=self._factory, num_envs=num_envs, seed=seed)
        other.recipe = self.recipe
        return other

    def render(self, index: int) -> np.ndarray:
        """See :meth:`VectorEnv.render`."""
        if not 0 <= index < self.num_envs:
            raise IndexError(f"index must be in [0, {self.num_envs}), got {index}")
        return self._envs[index].render()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        if not self.spec.can_checkpoint:
            return super().state_dict()
        observations = map_observations(torch.clone, self._tensors.observations)
        return {
            "seed": self.seed,
            "started": self._started,
            "envs": [env.state_dict() for env in self._envs],
            "observations": {field.name: getattr(observations, field.name) for field in fields(observations)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`. Raises ``ValueError`` if the number of instances differs."""
        if not self.spec.can_checkpoint:
            return super().load_state_dict(state)
        if len(state["envs"]) != self.num_envs:
            raise ValueError(f"the state holds {len(state['envs'])} instances, this environment {self.num_envs}")
        for index, (env, env_state) in enumerate(zip(self._envs, state["envs"], strict=True)):
            with self._naming(index):
                env.load_state_dict(env_state)
        _write(self._arrays.observations, slice(None), Observations(**state["observations"]))
        self.seed, self._started = state["seed"], state["started"]
        return self._tensors.observations

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        for env in self._envs:
            env.close()

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by environment {index} of {self.num_envs} ({self.spec.name})")
            raise


def _write(target: Observations[np.ndarray], index: int | slice, source: Observations) -> None:
    """Copies ``source`` into row ``index`` of ``target``."""
    for name, observation in source.observation.items():
        target.observation[name][index] = observation
    for name, action_mask in source.action_mask.items():
        target.action_mask[name][index] = action_mask
    for name, alive in source.alive.items():
        target.alive[name][index] = alive
    target.state[index] = source.state
