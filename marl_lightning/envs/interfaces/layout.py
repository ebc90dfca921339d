"""How the groups of an environment are laid out along one axis of agents. Needs numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import MultiAgentEnv, Observations
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.wrappers import AggregateReward
from marl_lightning.envs.wrappers.base import Rows
from marl_lightning.envs.wrappers.observation import ObservationWrapper

REWARD_AGGREGATIONS = ("sum", "mean", "none", "first")


class FlatGame(ObservationWrapper):
    """A game in which all agents observe vectors of one length, and earn what ``reward_aggr`` says.

    Observations are flattened, and followed by zeros up to the length of the longest. Groups of different dtypes get
    one that holds them all.

    Args:
        env: one instance.
        reward_aggr: one of :data:`REWARD_AGGREGATIONS`; told in ``spec.metadata`` too.

    Raises:
        ValueError: if ``reward_aggr`` is unknown, or some groups have discrete actions and others continuous ones.
    """

    def __init__(self, env: MultiAgentEnv, *, reward_aggr: str) -> None:
        if reward_aggr not in REWARD_AGGREGATIONS:
            raise ValueError(f"reward_aggr must be one of {REWARD_AGGREGATIONS}, got {reward_aggr!r}")
        if reward_aggr != "none":
            env = AggregateReward(env, how=reward_aggr)
        groups = env.spec.groups
        if len({group.is_discrete for group in groups.values()}) > 1:
            raise ValueError(
                f"{env.spec.name} has groups with discrete and with continuous actions, which do not fit into one "
                f"array; use the environment itself, with its groups {list(groups)}"
            )
        size = max(group.observation_size for group in groups.values())
        dtype = np.result_type(*(group.observation_space.dtype for group in groups.values()))
        flat = {name: _flat_space(group.observation_space, size, dtype) for name, group in groups.items()}
        spec = replace(
            env.spec,
            groups={name: replace(group, observation_space=flat[name]) for name, group in groups.items()},
            metadata={**env.spec.metadata, "reward_aggr": reward_aggr},
        )
        is_flat = all(group.observation_space == flat[name] for name, group in groups.items())
        super().__init__(env, spec=spec, changes=() if is_flat else ("observation",))

    def _change_observation(self, group: str, x: np.ndarray, out: np.ndarray, starts: Rows | None) -> None:
        flat = x.reshape(*x.shape[:2], -1)
        out[..., : flat.shape[-1]] = flat
        out[..., flat.shape[-1] :] = 0


class Layout:
    """Translates between the dictionaries of groups and arrays with one axis for the agents of all groups.

    Arrays have leading axes ``[]`` for one instance and ``[E]`` for several. ``A`` is the number of agents, ``O`` the
    length of an observation, ``K`` the number of actions of the agent that has most.

    Args:
        spec: of a :class:`FlatGame`, or of wrappers around one.

    Attributes:
        agents: names of the agents, in the order of the axis.
        observation_size: ``O``.
        state_size: length of the state.
        action_size: ``K``: choices, those of all parts together, or dimensions of continuous actions.
        action_shape: shape of an agent's action: ``()``, ``(P,)`` if it has several parts, ``(K,)`` if continuous.
        is_shared: whether there is one reward for all agents.

    Raises:
        ValueError: if a wrapper has made the observations of the groups differ in length.
    """

    def __init__(self, spec: EnvSpec) -> None:
        groups = spec.groups.values()
        sizes = {name: group.observation_shape for name, group in spec.groups.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"wrappers must leave the observations of all groups equally long, got {sizes}")
        self.agents = spec.agents
        self.observation_size = next(iter(groups)).observation_size
        self.state_size = spec.state_size
        self.action_size = max(group.action_size for group in groups)
        self.is_shared = spec.metadata["reward_aggr"] != "none"
        self._groups = spec.groups
        self._is_discrete = next(iter(groups)).is_discrete
        if self._is_discrete:
            several = any(group.action_shape for group in groups)
            self.action_shape = (max(len(group.action_parts) for group in groups),) if several else ()
        else:
            self.action_shape = (self.action_size,)
            self._low, self._high, self._dimensions = self._bounds(spec)

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    def observations(self, observations: Observations[np.ndarray]) -> np.ndarray:
        """Returns a copy ``[..., A, O]``."""
        return np.concatenate([observations.observation[name] for name in self._groups], axis=-2)

    def agent_mask(self, observations: Observations[np.ndarray]) -> np.ndarray:
        """Returns a copy ``[..., A]`` bool: who is alive."""
        return np.concatenate([observations.alive[name] for name in self._groups], axis=-1)

    def available_actions(self, observations: Observations[np.ndarray]) -> np.ndarray:
        """Returns a copy ``[..., A, K]`` bool: legal choices, or dimensions of continuous actions; padding is False."""
        shape = (*observations.state.shape[:-1], self.num_agents, self.action_size)
        if not self._is_discrete:
            return np.broadcast_to(self._dimensions, shape).copy()
        available = np.zeros(shape, np.bool_)
        for name, group, rows in self._rows():
            available[..., rows, : group.action_size] = observations.action_mask[name]
        return available

    def reward(self, reward: Mapping[str, np.ndarray], alive: np.ndarray) -> np.ndarray:
        """Returns a copy, float32 ``[...]`` of the one reward or ``[..., A]`` of those of the agents.

        Args:
            reward: per group ``[..., A]``.
            alive: ``[..., A]`` bool, as before the step. Others get 0, also in games that give all agents the same.
        """
        if self.is_shared:
            return next(iter(reward.values()))[..., 0].copy()
        return np.concatenate([reward[name] for name in self._groups], axis=-1) * alive

    def actions(self, actions: Any, leading: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Returns the actions of the groups, without padding, from ``[..., A, *action_shape]``.

        Raises:
            ValueError: if the shape is wrong.
        """
        array = np.asarray(actions) if self._is_discrete else np.asarray(actions, np.float32)
        shape = (*leading, self.num_agents, *self.action_shape)
        if array.shape != shape:
            raise ValueError(f"actions must have shape {shape}, got {array.shape}")
        if not self.action_shape:
            return {name: array[..., rows] for name, _, rows in self._rows()}
        return {
            name: array[..., rows, : group.action_shape[0]] if group.action_shape else array[..., rows, 0]
            for name, group, rows in self._rows()
        }

    def sample(self, available: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns random actions ``[..., A, *action_shape]``, uniform over what is available; padding is 0.

        Args:
            available: as returned by :meth:`available_actions`.
            rng: generator to draw from.
        """
        draws = rng.random(available.shape)
        if not self._is_discrete:
            return np.where(available, self._low + draws * (self._high - self._low), 0.0).astype(np.float32)
        draws[~available] = -1.0
        actions = np.zeros((*available.shape[:-1], *(self.action_shape or (1,))), np.int64)
        for _, group, rows in self._rows():
            for part, (first, number) in enumerate(zip(group.action_offsets, group.action_parts, strict=True)):
                actions[..., rows, part] = draws[..., rows, first : first + number].argmax(axis=-1)
        return actions if self.action_shape else actions[..., 0]

    def _rows(self) -> Iterator[tuple[str, GroupSpec, slice]]:
        """Yields the groups with their places on the axis of agents."""
        first = 0
        for name, group in self._groups.items():
            yield name, group, slice(first, first + group.num_agents)
            first += group.num_agents

    def _bounds(self, spec: EnvSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns least and greatest continuous actions and which dimensions are no padding, all ``[A, K]``."""
        low, high = np.zeros((2, self.num_agents, self.action_size))
        dimensions = np.zeros((self.num_agents, self.action_size), np.bool_)
        for _, group, rows in self._rows():
            low[rows, : group.action_size] = group.action_space.low
            high[rows, : group.action_size] = group.action_space.high
            dimensions[rows, : group.action_size] = True
        if "action_sizes" in spec.metadata:  # the game itself has padded actions
            sizes = np.array([int(size) for size in spec.metadata["action_sizes"].split(",")])
            dimensions &= np.arange(self.action_size) < sizes[:, None]
        return low, high, dimensions


def _flat_space(space: spaces.Box, size: int, dtype: np.dtype) -> spaces.Box:
    padding = np.zeros(size - space.low.size, dtype)
    low, high = (np.concatenate([bound.ravel(), padding]).astype(dtype) for bound in (space.low, space.high))
    return spaces.Box(low, high, dtype=dtype.type)
