"""What vector environments over single Python instances have in common, wherever the instances live."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.validation import check_reset
from marl_lightning.envs.vector.buffers import as_tensors, map_observations
from marl_lightning.envs.vector.instances import write_observations


class PythonVectorEnv(VectorEnv):
    """Base of vector environments over instances of :class:`MultiAgentEnv`. A subclass says how to reach the instances.

    Saved states of its subclasses can be loaded into each other.

    Args:
        spec: description of one instance.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i`` at the first reset.
        arrays: memory ``[E, ...]`` that the instances write into.
        autoreset: whether instances that ended are reset in the same step. Otherwise they stand still until they are
            reset: their observations, flags and info stay as they are, and their reward is 0. Training needs it.
    """

    def __init__(
        self, *, spec: EnvSpec, num_envs: int, seed: int, arrays: VectorStep[np.ndarray], autoreset: bool
    ) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.seed = seed
        self._arrays = arrays
        self._tensors = as_tensors(arrays)
        self._started = False
        self._autoreset = autoreset

    @property
    def running(self) -> Tensor:
        """``[E]`` bool, the instances that the next step will step; all of them with autoreset."""
        ended = self._tensors.terminated | self._tensors.truncated
        return torch.ones_like(ended) if self._autoreset else ~ended

    @abstractmethod
    def _reset_instances(self, *, seed: int | None, mask: np.ndarray | None) -> None:
        """Resets all instances or those of the mask; instance ``i`` with ``seed + i`` if there is a seed."""

    @abstractmethod
    def _render_instance(self, index: int) -> np.ndarray:
        """Returns the picture of an instance that exists."""

    @abstractmethod
    def _save_instances(self) -> list[dict[str, Any]]:
        """Returns what the instances save, in order."""

    @abstractmethod
    def _load_instances(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores all instances from as many states."""

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Raises ``RuntimeError`` if the very first reset is a partial one."""
        check_reset(self.num_envs, seed=seed, mask=mask)
        if not self._started:
            if mask is not None:
                raise RuntimeError("the first reset must be without a mask")
            seed = self.seed if seed is None else seed
        if seed is not None:
            self.seed = seed
        self._reset_instances(seed=seed, mask=mask)
        self._started = True
        return self._tensors.observations

    def render(self, index: int) -> np.ndarray:
        """See :meth:`VectorEnv.render`. Raises ``IndexError`` if there is no such instance."""
        if not 0 <= index < self.num_envs:
            raise IndexError(f"index must be in [0, {self.num_envs}), got {index}")
        return self._render_instance(index)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        if not self.spec.can_checkpoint:
            return super().state_dict()
        states = self._save_instances()
        observations = map_observations(torch.clone, self._tensors.observations)
        return {
            "seed": self.seed,
            "started": self._started,
            "envs": states,
            "observations": {field.name: getattr(observations, field.name) for field in fields(observations)},
            "terminated": self._tensors.terminated.clone(),
            "truncated": self._tensors.truncated.clone(),
            "info": {key: value.clone() for key, value in self._tensors.info.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`. Raises ``ValueError`` if the number of instances differs."""
        if not self.spec.can_checkpoint:
            return super().load_state_dict(state)
        if len(state["envs"]) != self.num_envs:
            raise ValueError(f"the state holds {len(state['envs'])} instances, this environment {self.num_envs}")
        self._load_instances(state["envs"])
        write_observations(self._arrays.observations, slice(None), Observations(**state["observations"]))
        for flag in ("terminated", "truncated"):
            getattr(self._arrays, flag)[:] = state[flag]
        for key, value in state["info"].items():
            self._arrays.info[key][:] = value
        self.seed, self._started = state["seed"], state["started"]
        return self._tensors.observations

    def _check_started(self) -> None:
        if not self._started:
            raise RuntimeError("call reset before step")
        if not self._autoreset and not self.running.any():
            raise RuntimeError("all instances have ended: call reset before step")
