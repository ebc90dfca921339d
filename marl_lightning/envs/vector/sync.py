"""Many instances of a Python game, stepped one after another in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from marl_lightning.envs.base import VectorStep
from marl_lightning.envs.validation import action_arrays, check_num_envs
from marl_lightning.envs.vector.buffers import allocate_step
from marl_lightning.envs.vector.instances import Factory, Instances, check_factory
from marl_lightning.envs.vector.python_games import PythonVectorEnv


class SyncVectorEnv(PythonVectorEnv):
    """``num_envs`` instances of a :class:`MultiAgentEnv`, stepped in a loop.

    Results are written into preallocated arrays that the returned tensors share. Instances keep their state if
    ``spec.can_checkpoint``; their ``state_dict`` must then hold only tensors, numbers, strings and containers of them.

    Args:
        factory: returns a new instance at every call; or a list of one such function for each instance. All instances
            must have equal specs.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i`` at the first reset.
        autoreset: see :class:`PythonVectorEnv`.

    Raises:
        ValueError: if ``num_envs`` is less than 1, the specs of the instances differ, or the list is of another length.

    Errors that an instance raises keep their type and get a note with the index of the instance.
    """

    def __init__(self, *, factory: Factory, num_envs: int, seed: int, autoreset: bool = True) -> None:
        check_num_envs(num_envs)
        check_factory(factory, num_envs)
        self._factory = factory
        self._envs = Instances(factory=factory, indices=range(num_envs), num_envs=num_envs, autoreset=autoreset)
        spec = self._envs.spec
        arrays = allocate_step(spec, num_envs)
        super().__init__(spec=spec, num_envs=num_envs, seed=seed, arrays=arrays, autoreset=autoreset)
        self._envs.attach(self._arrays)

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`. Raises ``ValueError`` if an action has a wrong shape or is not legal."""
        self._check_started()
        self._envs.step(action_arrays(self.spec, actions, (self.num_envs,)))
        return self._tensors

    def replicate(self, *, num_envs: int, seed: int) -> SyncVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = SyncVectorEnv(factory=self._factory, num_envs=num_envs, seed=seed, autoreset=self._autoreset)
        other.recipe = self.recipe
        return other

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self._envs.close()

    def _reset_instances(self, *, seed: int | None, mask: np.ndarray | None) -> None:
        self._envs.reset(seed=seed, mask=mask)

    def _render_instance(self, index: int) -> np.ndarray:
        return self._envs.render(index)

    def _save_instances(self) -> list[dict[str, Any]]:
        return self._envs.state_dicts()

    def _load_instances(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._envs.load_state_dicts(states)
