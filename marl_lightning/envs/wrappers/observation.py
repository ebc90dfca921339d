"""Wrappers that change what agents and critics see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorEnv
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers.base import ALL, Batch, Rows, Wrapper
from marl_lightning.envs.wrappers.running import StatisticsWrapper
from marl_lightning.envs.wrappers.statistics import RunningStatistics

Function = Callable[[np.ndarray], np.ndarray]


class ObservationWrapper(Wrapper, ABC):
    """Base of wrappers that compute observations, and maybe the state, from those of the environment inside.

    Rows of agents that are not alive are 0, whatever a subclass makes of them.
    """

    @abstractmethod
    def _change_observation(self, group: str, x: np.ndarray, out: np.ndarray, starts: Rows | None) -> None:
        """Writes the observations of a group.

        Args:
            group: its name.
            x: ``[n, A, *shape]``, of the environment inside; not to be changed.
            out: ``[n, A, *new_shape]`` in the dtype of the new space; holds those of the last step.
            starts: which of the ``n`` instances are at the start of an episode; ``None`` if none is.
        """

    def _change_state(self, x: np.ndarray, out: np.ndarray) -> None:
        """Writes the states ``[n, S']`` of ``n`` instances from those of the environment inside, ``[n, S]``."""

    def _learn(self, source: Observations[np.ndarray], rows: Rows) -> None:
        """Takes in the decision points of the environment inside in ``rows``, before they are changed."""

    def _on_reset(self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows) -> None:
        self._observe(source, result, rows, starts=ALL)

    def _on_step(self, batch: Batch) -> None:
        source, result = batch.source, batch.result
        ended = batch.ended()
        some_ended = ended.any()
        if some_ended:
            self._finish(batch, ended)
        if batch.autoreset:
            self._observe(source.observations, result.observations, ALL, starts=ended if some_ended else None)
        elif (going := batch.stepped & ~ended).any():
            self._observe(source.observations, result.observations, ALL if going.all() else going, starts=None)

    def _observe(
        self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows, starts: Rows | None
    ) -> None:
        """Makes decision points; ``starts`` selects among ``rows``."""
        self._learn(source, rows)
        for name, target in self._own.observations.observation.items():
            out = target[rows]
            self._change_observation(name, source.observation[name][rows], out, starts)
            _zero_dead(out, source.alive[name][rows])
            if rows is not ALL:
                target[rows] = out
        if (target := self._own.observations.state) is not None:
            out = target[rows]
            self._change_state(source.state[rows], out)
            if rows is not ALL:
                target[rows] = out

    def _finish(self, batch: Batch, ended: np.ndarray) -> None:
        """Makes the true successors of the instances that ended; nothing is learned from them, since nobody acts."""
        source, now, final = batch.source.final, self._own.observations, self._own.final
        for name, target in final.observation.items():
            out = now.observation[name][ended]
            self._change_observation(name, source.observation[name][ended], out, None)
            _zero_dead(out, source.alive[name][ended])
            target[ended] = out
            if not batch.autoreset:
                now.observation[name][ended] = out
        if final.state is not None:
            out = now.state[ended]
            self._change_state(source.state[ended], out)
            final.state[ended] = out
            if not batch.autoreset:
                now.state[ended] = out


class TransformObservation(ObservationWrapper):
    """Applies a function to observations, and maybe one to the state.

    Functions are called with the arrays of all instances and agents at once, and must not change them::

        TransformObservation(env, function=lambda x: np.clip(x, -10, 10), state_function=lambda x: np.clip(x, -10, 10))

    Args:
        env: environment to wrap.
        function: takes observations ``[n, A, *shape]`` and returns ``[n, A, *new_shape]``; one for all groups, or one
            a group.
        space: the new observation space of an agent; one for all groups, or one a group. ``None`` keeps the old one.
        state_function: takes states ``[n, S]`` float32 and returns ``[n, S']`` float32; ``None`` keeps the state.

    Raises:
        ValueError: if a group has no function or no space, or what a function returns does not fit the space. A
            function is tried at once, on observations of zeros, which is also what it gets for agents that are not
            alive.
    """

    def __init__(
        self,
        env: MultiAgentEnv | VectorEnv,
        *,
        function: Function | Mapping[str, Function],
        space: spaces.Box | Mapping[str, spaces.Box] | None = None,
        state_function: Function | None = None,
    ) -> None:
        groups = env.spec.groups
        old_spaces = {name: group.observation_space for name, group in groups.items()}
        self._functions = _for_each_group("function", function, groups)
        self._state_function = state_function
        new_spaces = _for_each_group("space", old_spaces if space is None else space, groups)
        state_size = env.spec.state_size
        if state_function is not None:
            state_size = np.shape(state_function(np.zeros((1, state_size), np.float32)))[-1]
        spec = replace(_with_spaces(env.spec, new_spaces), state_size=state_size)
        changes = ("observation",) if state_function is None else ("observation", "state")
        super().__init__(env, spec=spec, changes=changes)
        for name, group in groups.items():
            agents, new = (1, group.num_agents), spec.groups[name].observation_space
            zeros = np.zeros((*agents, *group.observation_shape), group.observation_space.dtype)
            self._change_observation(name, zeros, np.empty((*agents, *new.shape), new.dtype), None)
        if state_function is not None:
            self._change_state(np.zeros((1, env.spec.state_size), np.float32), np.empty((1, state_size), np.float32))

    def _change_observation(self, group: str, x: np.ndarray, out: np.ndarray, starts: Rows | None) -> None:
        repair = "give the space that it really returns, or convert its result"
        _apply(self._functions[group], x, out, what=f"function of {group!r}", repair=repair)

    def _change_state(self, x: np.ndarray, out: np.ndarray) -> None:
        _apply(self._state_function, x, out, what="state_function", repair="convert its result")


class NormalizeObservation(StatisticsWrapper, ObservationWrapper):
    """Normalises observations, and the state, by running means and variances: ``(x - mean) / sqrt(var + epsilon)``.

    There is one mean and one variance for each feature of a group, pooled over its agents; the state has its own.
    Statistics are of decision points: of the agents that are alive when they are about to act, starts of episodes
    included. True successors of episodes that ended (``final``) are normalised by the statistics of the moment they
    are reached, and do not count. The result is float32.

    Wrap the vector environment and not its instances, so that all share one set of statistics. Wrappers that add IDs
    or other 0-1 features go outside.

    Args:
        env: environment to wrap.
        normalize_state: normalise the state as well.
        epsilon: added to the variance.
        update_running_statistics: whether statistics follow the data; an attribute of the same name switches it.

    Raises:
        ValueError: if ``epsilon`` is not positive.
    """

    def __init__(
        self,
        env: MultiAgentEnv | VectorEnv,
        *,
        normalize_state: bool = True,
        epsilon: float = 1e-8,
        update_running_statistics: bool = True,
    ) -> None:
        new_spaces = {
            name: spaces.Box(-np.inf, np.inf, group.observation_shape, np.float32)
            for name, group in env.spec.groups.items()
        }
        shapes = {name: group.observation_shape for name, group in env.spec.groups.items()}
        if normalize_state:
            shapes[_STATE] = (env.spec.state_size,)
        super().__init__(
            env,
            spec=_with_spaces(env.spec, new_spaces),
            changes=("observation", "state") if normalize_state else ("observation",),
            statistics={name: RunningStatistics(shape) for name, shape in shapes.items()},
            epsilon=epsilon,
            update_running_statistics=update_running_statistics,
        )

    def _learn(self, source: Observations[np.ndarray], rows: Rows) -> None:
        if not self.update_running_statistics:
            return
        for name, statistics in self.statistics.items():
            if name == _STATE:
                statistics.update(source.state[rows])
            else:
                statistics.update(source.observation[name][rows], source.alive[name][rows])

    def _change_observation(self, group: str, x: np.ndarray, out: np.ndarray, starts: Rows | None) -> None:
        self.statistics[group].normalise(x, out, epsilon=self.epsilon)

    def _change_state(self, x: np.ndarray, out: np.ndarray) -> None:
        self.statistics[_STATE].normalise(x, out, epsilon=self.epsilon)


class AddAgentID(ObservationWrapper):
    """Appends to each observation a one-hot vector that tells which of all agents of the environment it belongs to.

    The state stays as it is.

    Args:
        env: environment to wrap.

    Raises:
        ValueError: if observations have more than one axis, such as images.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv) -> None:
        num_agents, first = env.spec.num_agents, 0
        self._ids, new_spaces = {}, {}
        for name, group in env.spec.groups.items():
            old = group.observation_space
            if len(old.shape) != 1:
                raise ValueError(
                    f"AddAgentID needs observations with one axis, but those of {name!r} have shape {old.shape}: "
                    "flatten them with TransformObservation"
                )
            low = np.concatenate((old.low, np.zeros(num_agents, old.dtype)))
            high = np.concatenate((old.high, np.ones(num_agents, old.dtype)))
            new_spaces[name] = spaces.Box(low, high, dtype=old.dtype)
            self._ids[name] = np.eye(num_agents, dtype=old.dtype)[first : first + group.num_agents]
            first += group.num_agents
        super().__init__(env, spec=_with_spaces(env.spec, new_spaces), changes=("observation",))

    def _change_observation(self, group: str, x: np.ndarray, out: np.ndarray, starts: Rows | None) -> None:
        size = x.shape[-1]
        out[..., :size] = x
        out[..., size:] = self._ids[group]


class StackObservations(ObservationWrapper):
    """Puts the last ``stack_size`` observations of each agent behind one another along the last axis, the oldest first.

    Vectors ``[F]`` become ``[stack_size * F]``, images ``[H, W, C]`` become ``[H, W, stack_size * C]``. The state stays
    as it is. An agent that is not alive sees 0, and if it comes back, its past is 0.

    Args:
        env: environment to wrap.
        stack_size: number of observations.
        padding: what stands for the time before an episode: ``"first"`` repeats its first observation, ``"zero"``.

    Raises:
        ValueError: if ``stack_size`` is less than 1, ``padding`` is unknown, or an observation has no axis.
    """

    def __init__(
        self,
        env: MultiAgentEnv | VectorEnv,
        *,
        stack_size: int,
        padding: Literal["first", "zero"] = "first",
    ) -> None:
        if stack_size < 1:
            raise ValueError(f"stack_size must be at least 1, got {stack_size}")
        if padding not in _PADDINGS:
            raise ValueError(f"padding must be one of {_PADDINGS}, got {padding!r}")
        new_spaces = {}
        for name, group in env.spec.groups.items():
            old = group.observation_space
            if not old.shape:
                raise ValueError(f"StackObservations needs observations with an axis, those of {name!r} have none")
            low, high = np.tile(old.low, stack_size), np.tile(old.high, stack_size)
            if padding == "zero":
                low, high = np.minimum(low, 0), np.maximum(high, 0)
            new_spaces[name] = spaces.Box(low, high, dtype=old.dtype)
        self.stack_size = stack_size
        self.padding = padding
        super().__init__(env, spec=_with_spaces(env.spec, new_spaces), changes=("observation",))

    def _change_observation(self, group: str, x: np.ndarray, out: np.ndarray, starts: Rows | None) -> None:
        size = x.shape[-1]
        out[..., :-size] = out[..., size:]
        out[..., -size:] = x
        if starts is None:
            return
        if self.padding == "first":
            out[starts] = np.tile(x[starts], self.stack_size)
        else:
            out[starts, ..., :-size] = 0


class SelectFeatures(ObservationWrapper):
    """Keeps some features of the observations and hides the others, so that agents need memory, say.

    The state stays as it is. ::

        SelectFeatures(env, features=[0, 2])  # of CartPole: where cart and pole are, but not how fast

    Args:
        env: environment to wrap.
        features: indices along the last axis, in the order in which they are to appear.

    Raises:
        ValueError: if there is none, one appears twice, or a group does not have it.
    """

    def __init__(self, env: MultiAgentEnv | VectorEnv, *, features: Sequence[int]) -> None:
        self.features = list(features)
        if not self.features or len(set(self.features)) < len(self.features):
            raise ValueError(f"features must be different indices, and at least one, got {self.features}")
        new_spaces = {}
        for name, group in env.spec.groups.items():
            old = group.observation_space
            size = old.shape[-1] if old.shape else 0
            if not all(0 <= feature < size for feature in self.features):
                raise ValueError(
                    f"features={self.features} must be from 0 to {size - 1} in observations of {name!r}, "
                    f"whose shape is {old.shape}"
                )
            new_spaces[name] = spaces.Box(old.low[..., self.features], old.high[..., self.features], dtype=old.dtype)
        super().__init__(env, spec=_with_spaces(env.spec, new_spaces), changes=("observation",))

    def _change_observation(self, group: str, x: np.ndarray, out: np.ndarray, starts: Rows | None) -> None:
        np.take(x, self.features, axis=-1, out=out)


_STATE = "state"  # no group has this name
_PADDINGS = get_args(Literal["first", "zero"])


def _zero_dead(out: np.ndarray, alive: np.ndarray) -> None:
    if not alive.all():
        out[~alive] = 0


def _with_spaces(spec: EnvSpec, observation_spaces: Mapping[str, spaces.Box]) -> EnvSpec:
    groups = {name: replace(group, observation_space=observation_spaces[name]) for name, group in spec.groups.items()}
    return replace(spec, groups=groups)


def _for_each_group(what: str, value: object, groups: Collection[str]) -> dict[str, object]:
    """Returns one value a group; ``value`` is one for all or has one for each."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(groups, value)
    if value.keys() != set(groups):
        raise ValueError(f"{what} needs the groups {list(groups)}, got {list(value)}")
    return dict(value)


def _apply(function: Function, x: np.ndarray, out: np.ndarray, *, what: str, repair: str) -> None:
    x = x.view()
    x.flags.writeable = False  # it may be the memory of the environment inside
    values = np.asarray(function(x))
    if values.shape != out.shape or values.dtype != out.dtype:
        raise ValueError(
            f"{what} must return {out.dtype} of shape {out.shape} for input of shape {x.shape}, got {values.dtype} "
            f"of shape {values.shape}; {repair}"
        )
    out[...] = values
