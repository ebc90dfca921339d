"""What can be chosen in level-based foraging beside the name of the game, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Levels = int | Sequence[int]
"""One bound for all, or one for each player or food; several are dealt out in random order at every reset."""


@dataclass(frozen=True, kw_only=True)
class LBFOptions:
    """Everything that can be chosen beside the scenario. Names, meanings and defaults are those of lbforaging.

    Args:
        sight: how many cells far a player sees in each direction; ``None`` leaves it to the scenario.
        penalty: subtracted from the reward of every player that tries to load a food and fails for lack of levels.
        min_player_level: least level of a player.
        max_player_level: greatest level of a player.
        min_food_level: least level of a food. Not used in cooperative scenarios, where all foods have the greatest.
        max_food_level: greatest level of a food; ``None`` is the sum of the three least levels of the players.
        grid_observation: observations are pictures of the surroundings instead of lists of what is seen.
        observe_agent_levels: observations contain the levels of the players.
        normalize_reward: divides rewards such that they sum up to 1 if all foods are loaded.
        obs_instead_of_state: the state is the concatenation of the observations.
        episode_limit: env steps after which an episode is truncated.

    Raises:
        ValueError: if a number is out of range.
    """

    sight: int | None = None
    penalty: float = 0.0
    min_player_level: Levels = 1
    max_player_level: Levels = 2
    min_food_level: Levels = 1
    max_food_level: Levels | None = None
    grid_observation: bool = False
    observe_agent_levels: bool = True
    normalize_reward: bool = True
    obs_instead_of_state: bool = False
    episode_limit: int = 50

    def __post_init__(self) -> None:
        for name in ("min_player_level", "max_player_level", "min_food_level", "max_food_level"):
            levels = getattr(self, name)
            if levels is not None and not isinstance(levels, int):
                # Sequences from configuration files become tuples, which can be compared and saved.
                object.__setattr__(self, name, tuple(int(level) for level in levels))
        if self.sight is not None and self.sight < 1:
            raise ValueError(f"sight must be at least 1, got {self.sight}")
        if self.episode_limit < 1:
            raise ValueError(f"episode_limit must be at least 1, got {self.episode_limit}")
