"""What an environment looks like from outside: agents, groups, spaces, state and per-step information."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from gymnasium import spaces


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Agents with equal observation and action spaces, stacked along one axis of length ``num_agents``.

    Args:
        agents: names of the agents, in the order of the stacked axis.
        observation_space: space of one agent's observation; its dtype is the dtype of the data.
        action_space: space of one agent's action, ``Discrete`` (starting at 0) or a bounded ``Box`` with one axis.

    Raises:
        ValueError: if the group is empty, names repeat, or a space is of a kind that no policy here can use.
    """

    agents: tuple[str, ...]
    observation_space: spaces.Box
    action_space: spaces.Discrete | spaces.Box

    def __post_init__(self) -> None:
        if not self.agents or len(set(self.agents)) != len(self.agents):
            raise ValueError(f"a group needs at least one agent and unique names, got {self.agents}")
        if not isinstance(self.observation_space, spaces.Box):
            raise ValueError(
                f"observation_space must be a gymnasium Box, got {self.observation_space}; "
                "flatten other spaces with gymnasium.spaces.utils.flatten_space"
            )
        if isinstance(self.action_space, spaces.Discrete):
            if self.action_space.start != 0:
                raise ValueError(f"action_space must start at 0, got {self.action_space}")
        elif not (isinstance(self.action_space, spaces.Box) and len(self.action_space.shape) == 1):
            raise ValueError(f"action_space must be Discrete or a Box with one axis, got {self.action_space}")
        elif not self.action_space.is_bounded():
            raise ValueError(f"a Box action_space needs finite bounds, got {self.action_space}")

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
        return isinstance(self.action_space, spaces.Discrete)

    @property
    def action_size(self) -> int:
        """Number of actions if discrete, number of action dimensions if continuous."""
        return int(self.action_space.n) if self.is_discrete else self.action_space.shape[0]


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
