"""Level-based foraging as played by the package lbforaging itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.native.lbf.layout import DEPENDENT, GROUP, NUM_ACTIONS, Layout
from marl_lightning.envs.native.lbf.options import LBFOptions
from marl_lightning.envs.native.lbf.render import draw_field
from marl_lightning.envs.native.lbf.scenarios import parse
from marl_lightning.envs.validation import action_arrays, check_legal

if TYPE_CHECKING:
    from lbforaging.foraging import ForagingEnv


class LBFAdapter(MultiAgentEnv):
    """One instance of the package's game, described as :class:`~marl_lightning.envs.native.lbf.env.LBFVectorEnv` is.

    The package reports its time limit as termination; here it truncates, and an episode terminates only when no food
    is left. Rewards are individual. In the package the start of an episode depends on where players stood at the end of
    the last one, even with a seed; here it does not. Games cannot be saved.

    Args:
        scenario: a name such as ``"Foraging-2s-8x8-2p-2f-coop-v3"``.
        **options: fields of :class:`~marl_lightning.envs.native.lbf.options.LBFOptions`.

    Raises:
        ImportError: if lbforaging is not installed.
        ValueError: if the name is unknown or a number is out of range.
    """

    def __init__(self, *, scenario: str, **options: Any) -> None:
        self._layout = Layout(parse(scenario), LBFOptions(**options))
        self.spec = self._layout.spec(can_checkpoint=False, metadata={"backend": "lbforaging"})
        self._env = _make_package_env(self._layout)
        self._over = True

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        for player in self._env.players:
            player.position = None  # otherwise nobody could start where a player stood that is yet to be placed
        observations, _ = self._env.reset(seed=seed)
        self._over = False
        return self._observe(observations)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        check_legal(
            self.spec,
            arrays,
            action_mask={GROUP: self._action_mask()},
            alive={GROUP: np.ones(self._layout.scenario.num_players, np.bool_)},
        )
        observations, rewards, self._over, _, _ = self._env.step(arrays[GROUP].tolist())
        left = int(np.count_nonzero(self._env.field))
        return Step(
            observations=self._observe(observations),
            reward={GROUP: np.array(rewards, np.float32)},
            terminated=left == 0,
            truncated=bool(self._over) and left > 0,
            info={"food_left": float(left)},
        )

    def render(self) -> np.ndarray:
        """Returns the current picture as uint8 ``[32 * size, 32 * size, 3]``, drawn as that of the native game."""
        return draw_field(self._layout.scenario.size, self._players(), self._foods())

    def _players(self) -> np.ndarray:
        """Returns rows, columns and levels of the players, int64 ``[P, 3]``."""
        return np.array([(*player.position, player.level) for player in self._env.players], np.int64)

    def _foods(self) -> np.ndarray:
        """Returns rows, columns and levels of the foods in the field in the order of their cells, int64 ``[n, 3]``."""
        rows, columns = np.nonzero(self._env.field)
        return np.stack([rows, columns, self._env.field[rows, columns]], axis=1)

    def _action_mask(self) -> np.ndarray:
        mask = np.zeros((self._layout.scenario.num_players, NUM_ACTIONS), np.bool_)
        for i, player in enumerate(self._env.players):
            mask[i, [action.value for action in self._env._valid_actions[player]]] = True
        return mask

    def _observe(self, observations: tuple[np.ndarray, ...]) -> Observations[np.ndarray]:
        stacked = np.stack(observations)
        if self._layout.options.obs_instead_of_state:
            state = stacked.flatten()
        else:
            foods = self._foods()
            missing = np.tile([-1, -1, 0], (self._layout.scenario.num_foods - len(foods), 1))
            state = np.concatenate([foods, missing, self._players()]).astype(np.float32).ravel()
        return Observations(
            observation={GROUP: stacked},
            action_mask={GROUP: self._action_mask()},
            alive={GROUP: np.ones(len(stacked), np.bool_)},
            state=state,
        )


def _make_package_env(layout: Layout) -> ForagingEnv:
    try:
        from lbforaging.foraging import ForagingEnv
    except ImportError as error:
        raise ImportError('level-based foraging needs: pip install "marl-lightning[lbf]"') from error
    scenario, options = layout.scenario, layout.options
    env = ForagingEnv(
        players=scenario.num_players,
        min_player_level=layout.player_levels[:, 0],
        max_player_level=layout.player_levels[:, 1],
        min_food_level=layout.food_levels[:, 0],
        max_food_level=None if (layout.food_levels[:, 1] == DEPENDENT).all() else layout.food_levels[:, 1],
        field_size=(scenario.size, scenario.size),
        max_num_food=scenario.num_foods,
        sight=layout.sight,
        max_episode_steps=options.episode_limit,
        force_coop=scenario.coop,
        normalize_reward=options.normalize_reward,
        observe_agent_levels=options.observe_agent_levels,
        penalty=options.penalty,
    )
    # The package cannot build its space of grids with current versions of gymnasium, but it can play with them if the
    # observations, which it checks at every step, are in some space.
    env._grid_observation = options.grid_observation
    env.observation_space = spaces.Tuple([layout.observation_space()] * scenario.num_players)
    return env
