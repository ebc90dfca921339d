"""What the vector environments of native games have in common: everything but the game."""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.validation import action_arrays, check_num_envs, check_reset
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors
from marl_lightning.envs.vector.layout import build_actions


class NativeVectorEnv(VectorEnv):
    """Base of vector environments whose instances are the rows of numpy arrays, stepped together by compiled code.

    It owns the arrays of actions and results, the threads, the seeds, and saving. A subclass sets the class attributes
    below, implements ``_step_instances``, ``_reset_instances`` and ``_observe_instances``, and in its constructor calls
    this one and then sets ``_state``: a named tuple of arrays ``[E, ...]`` with everything that changes in a game.
    Every random number must depend on nothing but its fields ``seed``, ``episode`` (-1 before the first episode, to be
    increased at the start of each one) and ``time``, as those of :mod:`.hashing` do.

    Args:
        spec: description of one instance.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``.
        num_threads: threads that step the instances, at most one an instance. ``None`` takes one for every
            ``_instances_per_thread`` instances, at most as many as torch uses.
        arguments: all other arguments of the subclass's constructor, defaults filled in. A replica is built from them,
            and a saved state fits only an environment that was built from equal ones.
        arrays: memory for the results of steps, for kernels that need a layout of their own.
        actions: memory for the actions of every group, for the same kernels.

    Attributes:
        num_threads: threads that step the instances.

    Raises:
        ValueError: if ``num_envs``, ``seed`` or ``num_threads`` is out of range.
    """

    _instances_per_thread: ClassVar[int]
    """So many instances take longer to step than one more thread costs, about 50 microseconds."""
    _saved_fields: ClassVar[tuple[str, ...]]
    """The fields of ``_state`` that are saved; the others are scratch space that lives within a step."""

    _state: NamedTuple

    def __init__(
        self,
        *,
        spec: EnvSpec,
        num_envs: int,
        seed: int,
        num_threads: int | None,
        arguments: Mapping[str, Any],
        arrays: VectorStep[np.ndarray] | None = None,
        actions: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        check_num_envs(num_envs)
        _check_seed(seed, num_envs)
        if num_threads is None:
            num_threads = max(1, min(num_envs // self._instances_per_thread, torch.get_num_threads()))
        if num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {num_threads}")
        self.spec = spec
        self.num_envs = num_envs
        self.seed = seed
        self.num_threads = min(num_threads, num_envs)
        self._arguments = dict(arguments)
        self._arrays = allocate_step(spec, num_envs) if arrays is None else arrays
        self._action_arrays = build_actions(spec, num_envs, np.zeros) if actions is None else actions
        self._action_tensors = {name: torch.from_numpy(array) for name, array in self._action_arrays.items()}
        self._step = as_tensors(self._arrays)
        self._mask = np.ones(num_envs, np.bool_)
        # Contiguous ranges of instances, one a thread.
        self._ranges = list(itertools.pairwise(np.linspace(0, num_envs, self.num_threads + 1).astype(int).tolist()))
        self._started = False
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0

    @abstractmethod
    def _step_instances(self, first: int, last: int) -> None:
        """Makes one env step of the instances ``first <= e < last`` with the actions in ``_action_arrays``.

        Writes the results to ``_arrays``, and begins the next episode of the instances that ended. Called by several
        threads at the same time, with disjoint ranges; the compiled code should release the GIL.
        """

    @abstractmethod
    def _reset_instances(self, mask: np.ndarray) -> None:
        """Begins an episode of the instances of ``mask`` (``[E]`` bool) and writes their decision points."""

    @abstractmethod
    def _observe_instances(self) -> None:
        """Writes the decision points of all instances, whose state was loaded."""

    def _check_actions(self) -> None:
        """Raises ``ValueError`` if a step with the actions in ``_action_arrays`` is to be refused."""

    def _render_instance(self, index: int) -> np.ndarray:
        """Returns the picture of an instance that exists and has begun its first episode."""
        return super().render(index)

    def _save_extra(self) -> dict[str, Any]:
        """Returns what is to be saved beside ``_state``."""
        return {}

    def _load_extra(self, state: Mapping[str, Any]) -> None:
        """Restores what ``_save_extra`` returned, from the whole saved state."""

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Raises ``RuntimeError`` if the very first reset is a partial one."""
        check_reset(self.num_envs, seed=seed, mask=mask)
        if not self._started:
            if mask is not None:
                raise RuntimeError("the first reset must be without a mask: it starts all instances")
            seed = self.seed if seed is None else seed
        if seed is not None:
            _check_seed(seed, self.num_envs)
            self.seed = seed
            self._seed_instances(seed)
        self._mask[:] = True if mask is None else mask  # compiled code is compiled anew for another type of array
        self._reset_instances(self._mask)
        self._started = True
        return self._step.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`; actions of a wrong shape or kind raise ``ValueError``."""
        if not self._started:
            raise RuntimeError("call reset before step")
        self._read_actions(actions)
        self._check_actions()
        # This thread steps the first range, the pool the others.
        (first, last), *others = self._ranges
        pending = [self._threads().submit(self._step_instances, *bounds) for bounds in others]
        try:
            self._step_instances(first, last)
        finally:
            errors = [future.exception() for future in pending]  # no thread may still be at work in the next step
        for error in errors:
            if error is not None:
                raise error
        return self._step

    def replicate(self, *, num_envs: int, seed: int) -> NativeVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = type(self)(num_envs=num_envs, seed=seed, **self._arguments)
        other.recipe = self.recipe
        return other

    def render(self, index: int) -> np.ndarray:
        """See :meth:`VectorEnv.render`.

        Raises:
            RuntimeError: before the first ``reset``.
            IndexError: if there is no such instance.
            NotImplementedError: if the game has no pictures.
        """
        if not self._started:
            raise RuntimeError("call reset before render")
        if not 0 <= index < self.num_envs:
            raise IndexError(f"index must be in [0, {self.num_envs}), got {index}")
        return self._render_instance(index)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        fields = {name: torch.from_numpy(getattr(self._state, name).copy()) for name in self._saved_fields}
        return {"game": self._game, "seed": self.seed, "started": self._started, "fields": fields, **self._save_extra()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`.

        Raises:
            ValueError: if it was saved from another game, with other arguments or another number of instances.
        """
        if "game" not in state:
            raise ValueError("the state was saved by another version or another kind of this environment")
        saved, expected = state["game"], self._game
        if saved["num_envs"] != self.num_envs:
            raise ValueError(
                f"the state does not fit: it holds {saved['num_envs']} instances, this environment {self.num_envs}"
            )
        # Arguments that the saved state does not know are younger than it and have a default that changes nothing.
        game = {key: (value, expected.get(key)) for key, value in saved.items() if value != expected.get(key)}
        if game:
            raise ValueError(f"the state does not fit this environment; saved and expected differ in {game}")
        fields, arrays = state["fields"], {name: getattr(self._state, name) for name in self._saved_fields}
        if {name: tuple(field.shape) for name, field in fields.items()} != {k: v.shape for k, v in arrays.items()}:
            raise ValueError("the state was saved by another version of this environment")
        for name, array in arrays.items():
            array[...] = fields[name].numpy(force=True)
        self.seed, self._started = state["seed"], state["started"]
        self._load_extra(state)
        if self._started:
            self._observe_instances()
        return self._step.observations

    def close(self) -> None:
        """See :meth:`VectorEnv.close`. Only ends the threads: the environment can still be used and starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_process == os.getpid():
            pool.shutdown()

    @property
    def _game(self) -> dict[str, Any]:
        """What must be equal for a saved state to continue exactly."""
        return {"name": self.spec.name, "num_envs": self.num_envs, **self._arguments}

    def _seed_instances(self, seed: int) -> None:
        self._state.seed[:] = seed + np.arange(self.num_envs)
        self._state.episode[:] = -1

    def _read_actions(self, actions: Mapping[str, Tensor]) -> None:
        """Copies the actions, whatever their device, memory layout and number of bits."""
        for name, tensor in self._action_tensors.items():
            action = actions.get(name)
            # The step of a small game takes 10 microseconds: what is wrong is looked up only if something is.
            if (
                action is None
                or len(actions) != len(self._action_tensors)
                or action.shape != tensor.shape
                or action.is_floating_point() != tensor.is_floating_point()
            ):
                action_arrays(self.spec, {key: value.cpu() for key, value in actions.items()}, (self.num_envs,))
            tensor.copy_(action)

    def _threads(self) -> ThreadPoolExecutor:
        """Returns the pool. A forked process inherits it without its threads and gets its own."""
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix=self.spec.name)
            self._pool_process = os.getpid()
        return self._pool


def _check_seed(seed: int, num_envs: int) -> None:
    if not 0 <= seed < 2**63 - num_envs:
        raise ValueError(f"seed must be in [0, 2^63 - num_envs), got {seed}")
