"""Wrappers around vector environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.validation import is_plain
from marl_lightning.envs.vector.buffers import map_observations, zeros
from marl_lightning.envs.wrappers.base import ALL, Batch, autoresets


class WrappedVectorEnv(VectorEnv):
    """The part of a wrapper that makes it a :class:`VectorEnv`.

    The environment inside returns the same tensors every time, so that views of their memory are made once. It has to
    be on the CPU.
    """

    _source: Observations[np.ndarray] | None = None
    _batch: Batch | None = None

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    @property
    def seed(self) -> int:
        return self.env.seed

    @property
    def recipe(self) -> dict[str, Any] | None:
        """See :class:`VectorEnv`; wrappers are entries of the argument ``wrappers``.

        ``None`` also if a wrapper is not one of this library or has an argument that cannot be written down, such as a
        function.
        """
        from marl_lightning.envs.wrappers.configured import WRAPPERS  # which imports wrappers of all kinds

        inside, name = self.env.recipe, type(self).__name__
        known = name in WRAPPERS and isinstance(self, WRAPPERS[name])
        if inside is None or not known or not is_plain(self._arguments):
            return None
        kwargs, entry = inside["kwargs"], {"name": name, **self._arguments}
        return {**inside, "kwargs": {**kwargs, "wrappers": [*kwargs.get("wrappers", ()), entry]}}

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`."""
        self._bind(self.env.reset(seed=seed, mask=mask))
        self._on_reset(self._source, self._result, ALL if mask is None else mask)
        return self._observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`."""
        self._before_step()
        return self._after_step(self.env.step(actions))

    def step_async(self, actions: Mapping[str, Tensor]) -> None:
        """Begins a step, where the environment inside can; see :class:`SharedMemoryVectorEnv`."""
        self._before_step()
        self.env.step_async(actions)

    def step_wait(self) -> VectorStep[Tensor]:
        """Waits for the step that :meth:`step_async` began and returns its outcome."""
        return self._after_step(self.env.step_wait())

    def replicate(self, *, num_envs: int, seed: int) -> VectorEnv:
        """See :meth:`VectorEnv.replicate`.

        Running statistics are those of this environment, at each moment, and are not updated by the new one.
        """
        other = type(self)(self.env.replicate(num_envs=num_envs, seed=seed), **self._arguments)
        other._follow(self)
        return other

    def render(self, index: int) -> np.ndarray:
        """See :meth:`VectorEnv.render`."""
        return self.env.render(index)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        inside = self.env.state_dict()
        return {"env": inside, "wrapper": {name: torch.tensor(array) for name, array in self._memory().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`. Raises ``ValueError`` if the wrappers differ."""
        self._bind(self.env.load_state_dict(state["env"]))
        self._load(state["wrapper"])
        return self._observations

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self.env.close()

    def _num_instances(self) -> int:
        return self.env.num_envs

    _zeros = staticmethod(zeros)

    def _before_step(self) -> None:
        if self._source is None:
            raise RuntimeError("call reset before step")
        for name, alive in self._source.alive.items():
            np.copyto(self._alive[name], alive)
        if not self._autoreset:
            self._stepped[:] = self.env.running.numpy()

    def _after_step(self, step: VectorStep[Tensor]) -> VectorStep[Tensor]:
        if self._batch is None:
            self._bind_step(step)
        self._on_step(self._batch)
        return self._step

    def _bind(self, observations: Observations[Tensor]) -> None:
        """Makes what is returned from the own arrays and from the tensors of the environment inside, once."""
        if self._source is not None:
            return
        if observations.state.device.type != "cpu":
            raise ValueError(
                f"{type(self).__name__} works on the CPU, but the environment is on {observations.state.device}: "
                "make it with device='cpu'"
            )
        self._autoreset = autoresets(self)
        self._stepped = np.ones(self.num_envs, np.bool_)
        self._source = map_observations(Tensor.numpy, observations)
        self._result = self._own.fill_observations(self._source)
        self._tensors = self._own.map(torch.from_numpy)
        self._observations = self._tensors.fill_observations(observations)

    def _bind_step(self, step: VectorStep[Tensor]) -> None:
        source = VectorStep(
            observations=self._source,
            reward={name: reward.numpy() for name, reward in step.reward.items()},
            terminated=step.terminated.numpy(),
            truncated=step.truncated.numpy(),
            final=map_observations(Tensor.numpy, step.final),
            info={key: value.numpy() for key, value in step.info.items()},
        )
        self._step = self._tensors.fill_step(step, self._observations)
        self._batch = Batch(
            source=source,
            result=self._own.fill_step(source, self._result),
            alive=self._alive,
            stepped=self._stepped,
            autoreset=self._autoreset,
        )
