"""Sizes, level bounds and the description of a game, derived from its scenario and the options. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.native.lbf.options import LBFOptions, Levels
from marl_lightning.envs.native.lbf.scenarios import Scenario
from marl_lightning.envs.spec import EnvSpec, GroupSpec

GROUP = "agents"
"""Name of the only group."""

NUM_ACTIONS = 6
"""None, north, south, west, east, load."""

INFO_KEYS = ("food_left",)
"""Numbers that every step reports: how many foods are still in the field."""

DEPENDENT = 0
"""Stands for the greatest level of a food if it is the sum of the three least levels of the players."""


class Layout:
    """Sizes and bounds of everything that a scenario shows under some options.

    Args:
        scenario: the game.
        options: the switches.

    Attributes:
        sight: how many cells far a player sees in each direction.
        player_levels: ``[P, 2]`` int64, least and greatest levels.
        food_levels: ``[F, 2]`` int64, least and greatest levels; the latter may be :data:`DEPENDENT`.

    Raises:
        ValueError: if level bounds are out of range, contradict each other, or are not as many as players or foods.
    """

    def __init__(self, scenario: Scenario, options: LBFOptions) -> None:
        self.scenario = scenario
        self.options = options
        self.sight = scenario.sight if options.sight is None else options.sight
        self.player_levels = _bounds("player", options.min_player_level, options.max_player_level, scenario.num_players)
        self.food_levels = _bounds("food", options.min_food_level, options.max_food_level, scenario.num_foods)
        least_sum = np.sort(self.player_levels[:, 0])[:3].sum()
        if options.max_food_level is None and not scenario.coop and (self.food_levels[:, 0] > least_sum).any():
            raise ValueError(
                f"min_food_level {options.min_food_level} can exceed the greatest level of a food, "
                f"which is the sum of the three least levels of the players, at least {least_sum}"
            )

    @property
    def player_size(self) -> int:
        """Entries of one player in an observation."""
        return 3 if self.options.observe_agent_levels else 2

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """``(3, 2 * sight + 1, 2 * sight + 1)`` for grids, else ``(3 * F + player_size * P,)``."""
        if self.options.grid_observation:
            return (3, 2 * self.sight + 1, 2 * self.sight + 1)
        return (3 * self.scenario.num_foods + self.player_size * self.scenario.num_players,)

    @property
    def state_size(self) -> int:
        """Entries of the global state."""
        if self.options.obs_instead_of_state:
            return self.scenario.num_players * int(np.prod(self.observation_shape))
        return 3 * (self.scenario.num_foods + self.scenario.num_players)

    def observation_space(self) -> spaces.Box:
        """Returns the space of one player's observation."""
        greatest_player = self.player_levels[:, 1].max()
        greatest_food = self.food_levels[:, 1].max()
        if greatest_food == DEPENDENT:
            greatest_food = np.sort(self.player_levels[:, 1])[:3].sum()
        if self.options.grid_observation:
            high = np.ones(self.observation_shape, np.float32)
            high[0] = greatest_player if self.options.observe_agent_levels else 1
            high[1] = greatest_food
            return spaces.Box(np.zeros_like(high), high, dtype=np.float32)
        last, scenario = self.scenario.size - 1, self.scenario
        low = [-1, -1, 0] * scenario.num_foods + [-1, -1, 0][: self.player_size] * scenario.num_players
        food, player = [last, last, greatest_food], [last, last, greatest_player][: self.player_size]
        high = food * scenario.num_foods + player * scenario.num_players
        return spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32)

    def spec(self, *, can_checkpoint: bool, metadata: Mapping[str, str]) -> EnvSpec:
        """Returns the description of one instance."""
        group = GroupSpec(
            agents=tuple(f"agent_{i}" for i in range(self.scenario.num_players)),
            observation_space=self.observation_space(),
            action_space=spaces.Discrete(NUM_ACTIONS),
        )
        return EnvSpec(
            name=f"lbf/{self.scenario.name}",
            groups={GROUP: group},
            state_size=self.state_size,
            episode_limit=self.options.episode_limit,
            info_keys=INFO_KEYS,
            can_checkpoint=can_checkpoint,
            metadata=metadata,
        )


def _bounds(what: str, least: Levels, greatest: Levels | None, count: int) -> np.ndarray:
    """Returns least and greatest levels as int64 ``[count, 2]``, the latter ``DEPENDENT`` if ``greatest`` is None."""
    columns = []
    for name, levels in ((f"min_{what}_level", least), (f"max_{what}_level", greatest)):
        column = np.array(DEPENDENT if levels is None else levels, np.int64)
        if column.shape not in ((), (count,)):
            raise ValueError(f"{name} must be a number or {count} of them, got {levels}")
        columns.append(np.broadcast_to(column, count))
    low, high = columns
    if (low < 1).any() or (greatest is not None and (low > high).any()):
        raise ValueError(f"levels need 1 <= min_{what}_level <= max_{what}_level, got {least} and {greatest}")
    return np.stack(columns, axis=1)
