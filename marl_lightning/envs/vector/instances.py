"""The loop over single instances that all vector environments of Python games share. Needs numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorStep

Factory = Callable[[], MultiAgentEnv] | Sequence[Callable[[], MultiAgentEnv]]
"""Returns a new instance at every call; or one such function for each of the ``E`` instances."""


class Instances:
    """Some of the ``E`` instances of a vector environment, stepped one after another into rows of its arrays.

    Errors that an instance raises keep their type and get a note with the index of the instance.

    Args:
        factory: see :data:`Factory`.
        indices: which of the ``E`` instances these are; instance ``i`` writes row ``i``.
        num_envs: ``E``.

    Attributes:
        spec: description of one instance.
        progress: ``[1]`` int64, index of the instance that is being used, or was last.

    Raises:
        ValueError: if the specs of the instances differ. The instances are closed then, as after other errors.
    """

    def __init__(self, *, factory: Factory, indices: range, num_envs: int, autoreset: bool = True) -> None:
        self.progress = np.zeros(1, np.int64)
        self.spec = None
        self._indices = indices
        self._num_envs = num_envs
        self._autoreset = autoreset
        self._envs: list[MultiAgentEnv] = []
        self._arrays: VectorStep[np.ndarray] | None = None
        try:
            with self._naming():
                for index in indices:
                    self.progress[0] = index
                    self._envs.append(factory() if callable(factory) else factory[index]())
            self.spec = self._envs[0].spec
            for index, env in self._indexed():
                check_equal_specs(self.spec, env.spec, first=indices.start, second=index)
        except BaseException:
            self.close()
            raise

    def attach(self, arrays: VectorStep[np.ndarray], *, progress: np.ndarray | None = None) -> None:
        """Sets the arrays ``[E, ...]`` to write into, and, if given, the array that replaces ``progress``."""
        self._arrays = arrays
        if progress is not None:
            self.progress = progress

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> None:
        """Starts new episodes in the instances that the mask ``[E]`` selects, or in all; see :meth:`VectorEnv.reset`.

        Only their rows of the observations are written.
        """
        with self._naming():
            for index, env in self._indexed():
                if mask is None or mask[index]:
                    self.progress[0] = index
                    observations = env.reset(seed=None if seed is None else seed + index)
                    write_observations(self._arrays.observations, index, observations)
                    self._arrays.terminated[index] = self._arrays.truncated[index] = False

    def step(self, actions: Mapping[str, np.ndarray]) -> None:
        """Makes a step in every instance and resets those that ended; see :meth:`VectorEnv.step`.

        Without autoreset, instances that have ended stand still.
        """
        arrays = self._arrays
        with self._naming():
            for index, env in self._indexed():
                if not self._autoreset and (arrays.terminated[index] or arrays.truncated[index]):
                    for reward in arrays.reward.values():
                        reward[index] = 0.0
                    continue
                self.progress[0] = index
                step = env.step({name: action[index] for name, action in actions.items()})
                for name, reward in step.reward.items():
                    arrays.reward[name][index] = reward
                for key, value in step.info.items():
                    arrays.info[key][index] = value
                arrays.terminated[index] = step.terminated
                arrays.truncated[index] = step.truncated
                observations = step.observations
                if step.terminated or step.truncated:
                    write_observations(arrays.final, index, observations)
                    if self._autoreset:
                        observations = env.reset()
                write_observations(arrays.observations, index, observations)

    def render(self, index: int) -> np.ndarray:
        """Returns the picture of instance ``index``."""
        self.progress[0] = index
        with self._naming():
            return self._envs[index - self._indices.start].render()

    def state_dicts(self) -> list[dict[str, Any]]:
        """Returns what the instances save."""
        states = []
        with self._naming():
            for index, env in self._indexed():
                self.progress[0] = index
                states.append(env.state_dict())
        return states

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores what :meth:`state_dicts` returned."""
        with self._naming():
            for (index, env), state in zip(self._indexed(), states, strict=True):
                self.progress[0] = index
                env.load_state_dict(state)

    def close(self) -> None:
        """Closes the instances, all of them even if one fails to. May be called repeatedly."""
        with ExitStack() as stack:
            for env in reversed(self._envs):
                stack.callback(env.close)

    def __iter__(self) -> Iterator[MultiAgentEnv]:
        return iter(self._envs)

    def _indexed(self) -> Iterator[tuple[int, MultiAgentEnv]]:
        return zip(self._indices, self._envs, strict=True)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        # Entered once a loop: entering it for every instance would cost as much as writing its row.
        try:
            yield
        except Exception as error:
            name = f" ({self.spec.name})" if self.spec is not None else ""
            error.add_note(f"raised by environment {self.progress[0]} of {self._num_envs}{name}")
            raise


def check_factory(factory: Factory, num_envs: int) -> None:
    """Raises ``ValueError`` if there are several functions, but not one for each instance."""
    if not callable(factory) and len(factory) != num_envs:
        raise ValueError(f"several factories must be one for each of the {num_envs} instances, got {len(factory)}")


def check_equal_specs(first_spec: Any, second_spec: Any, *, first: int, second: int) -> None:
    """Raises ``ValueError`` if the specs of the instances with the indices ``first`` and ``second`` differ."""
    if first_spec != second_spec:
        raise ValueError(f"all instances need equal specs, but {second} has {second_spec} and {first} has {first_spec}")


def write_observations(target: Observations[np.ndarray], index: int | slice, source: Observations) -> None:
    """Copies ``source`` into row ``index`` of ``target``."""
    for name, observation in source.observation.items():
        target.observation[name][index] = observation
    for name, action_mask in source.action_mask.items():
        target.action_mask[name][index] = action_mask
    for name, alive in source.alive.items():
        target.alive[name][index] = alive
    target.state[index] = source.state
