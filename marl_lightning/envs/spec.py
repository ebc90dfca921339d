"""What an environment looks like from outside: agents, groups, spaces, state and per-step information."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod

from gymnasium import spaces


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Agents with equal observation and action spaces, stacked along one axis of length ``num_agents``.

    Args:
        agents: names of the agents, in the order of the stacked axis.
        observation_space: space of one agent's observation; its dtype is the dtype of the data.
        action_space: space of one agent's action: ``Discrete``, ``MultiDiscrete`` with one axis (several choices that
            are made at once), both starting at 0, or a bounded ``Box`` with one axis.

    Raises:
        ValueError: if the group is empty, names repeat, or a space is of a kind that no policy here can use.
    """

    agents: tuple[str, ...]
    observation_space: spaces.Box
    action_space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box

    def __post_init__(self) -> None:
        if not self.agents or len(set(self.agents)) != len(self.agents):
            raise ValueError(f"a group needs at least one agent and unique names, got {self.agents}")
        if not isinstance(self.observation_space, spaces.Box):
            raise ValueError(
                f"observation_space must be a gymnasium Box, got {self.observation_space}; "
                "flatten other spaces with gymnasium.spaces.utils.flatten_space"
            )
        _check_action_space(self.action_space)

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return self.observation_space.shape

    @cached_property
    def observation_size(self) -> int:
        """Number of entries of one agent's observation."""
        return prod(self.observation_space.shape)

    @property
    def is_discrete(self) -> bool:
        """Whether actions are chosen from finite sets, so that there are masks: ``Discrete`` or ``MultiDiscrete``."""
        return not isinstance(self.action_space, spaces.Box)

    @cached_property
    def action_parts(self) -> tuple[int, ...]:
        """Numbers of choices of the parts of an action: ``(n,)``, or ``nvec``, or ``()`` if continuous."""
        if isinstance(self.action_space, spaces.MultiDiscrete):
            return tuple(int(n) for n in self.action_space.nvec)
        return (int(self.action_space.n),) if self.is_discrete else ()

    @cached_property
    def action_offsets(self) -> tuple[int, ...]:
        """Where each part begins on the last axis of ``action_mask``, which holds the parts one after another."""
        return tuple(accumulate(self.action_parts, initial=0))[: len(self.action_parts)]

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one agent's action: ``()`` for ``Discrete``, ``(P,)`` with ``P`` parts, ``(d,)`` if continuous."""
        return self.action_space.shape

    @cached_property
    def action_size(self) -> int:
        """Number of choices of all parts together if discrete, number of action dimensions if continuous."""
        return sum(self.action_parts) if self.is_discrete else self.action_space.shape[0]


def _check_action_space(space: spaces.Space) -> None:
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.Box):
        raise ValueError(f"action_space must be Discrete, MultiDiscrete or a Box with one axis, got {space}")
    if isinstance(space, spaces.Discrete):
        if space.start != 0:
            raise ValueError(f"action_space must start at 0, got {space}")
    elif len(space.shape) != 1 or not space.shape[0]:
        raise ValueError(f"a {type(space).__name__} action_space must have one axis that is not empty, got {space}")
    elif isinstance(space, spaces.MultiDiscrete):
        if (space.start != 0).any():
            raise ValueError(f"action_space must start at 0 in every part, got {space}")
    elif not space.is_bounded():
        raise ValueError(f"a Box action_space needs finite bounds, got {space}")


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Everything that networks, collectors and buffers need to know about an environment.

    Args:
        name: registered name, such as ``"smac/3m"``.
        groups: group name to :class:`GroupSpec`.
        state_size: entries of the flat global state; games without one give the concatenated observations.
        episode_limit: env steps after which an episode is truncated, ``None`` if the game has no limit.
        info_keys: names of the numbers that every step reports per instance, such as ``"battle_won"``.
        shared_reward: all agents of a group get the same reward in every step, the dead ones too; otherwise an agent
            that was not alive before a step gets 0.
        can_checkpoint: whether ``state_dict`` restores the environment exactly.
        metadata: plain facts for logs and summaries, such as ``{"backend": "embedded", "physics": "sc2"}``.
    """

    name: str
    groups: Mapping[str, GroupSpec]
    state_size: int
    episode_limit: int | None = None
    info_keys: tuple[str, ...] = ()
    shared_reward: bool = False
    can_checkpoint: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("an environment needs at least one group")
        if "next" in self.groups or "state" in self.groups:
            raise ValueError(f"'next' and 'state' are reserved and cannot name a group, got {list(self.groups)}")
        names = self.agents
        if len(set(names)) != len(names):
            raise ValueError(f"agent names must be unique over all groups, got {names}")

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all agents, group after group."""
        return tuple(agent for group in self.groups.values() for agent in group.agents)

    @property
    def num_agents(self) -> int:
        return len(self.agents)
