"""Level-based foraging as a vector environment."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from marl_lightning.envs.base import Observations
from marl_lightning.envs.native.lbf import kernel
from marl_lightning.envs.native.lbf.kernel import Constants, Outcome, State, View
from marl_lightning.envs.native.lbf.layout import GROUP, Layout
from marl_lightning.envs.native.lbf.options import LBFOptions
from marl_lightning.envs.native.lbf.render import draw_field
from marl_lightning.envs.native.lbf.scenarios import parse
from marl_lightning.envs.native.vector import NativeVectorEnv


class LBFVectorEnv(NativeVectorEnv):
    """Many instances of one game, stepped together by compiled kernels that write into preallocated memory.

    Agents ``agent_0`` … of the group ``"agents"`` are the players. Their actions are none, north, south, west, east and
    load. Given equal states and actions, everything is equal to lbforaging, except that an episode whose time is up is
    *truncated*; it is *terminated* only when no food is left. An action that is not legal counts as none.

    Start states have the distribution of a new environment of the package. (In the package a player cannot start where
    it or a player placed after it stood at the end of the last episode; here, episodes do not depend on earlier ones.)

    An observation is float32 ``[3 * F + 3 * P]``: row, column and level of the foods in sight, in the order of their
    cells, then of the player itself, then of the other players in sight. Positions are relative to the upper left cell
    in sight, and what is not seen is ``(-1, -1, 0)``. Without ``observe_agent_levels`` players have two entries. Grid
    observations are float32 ``[3, 2 * sight + 1, 2 * sight + 1]`` around the player: levels of players (1 without
    ``observe_agent_levels``), levels of foods, and 1 where a cell of the field is free.

    The state is float32 ``[3 * F + 3 * P]``: row, column and level of the foods in the field, in the order of their
    cells, ``(-1, -1, 0)`` for those that were eaten or never placed, then of all players in their own order.

    Pictures are uint8 ``[32 * size, 32 * size, 3]``, north up. Players are blue squares and foods red discs, each with
    its level.

    Args:
        scenario: a name such as ``"Foraging-2s-8x8-2p-2f-coop-v3"``, see
            :mod:`~marl_lightning.envs.native.lbf.scenarios`.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``, and behaves as the first instance of an environment with that
            seed would.
        num_threads: threads that step the instances, at most one an instance, which pays off for many instances and
            free cores. ``None`` takes one for every 256 instances, at most as many as torch uses. Results do not
            depend on it.
        **options: fields of :class:`~marl_lightning.envs.native.lbf.options.LBFOptions`.

    Attributes:
        options: the switches.
        layout: sizes and level bounds.

    Raises:
        ValueError: if the name is unknown or a number is out of range.
    """

    _instances_per_thread = 256
    _saved_fields = State._fields[: State._fields.index("target")]

    def __init__(
        self,
        *,
        scenario: str,
        num_envs: int,
        seed: int = 0,
        num_threads: int | None = None,
        **options: Any,
    ) -> None:
        self.options = LBFOptions(**options)
        self.layout = Layout(parse(scenario), self.options)
        super().__init__(
            spec=self.layout.spec(can_checkpoint=True, metadata={"backend": "embedded"}),
            num_envs=num_envs,
            seed=seed,
            num_threads=num_threads,
            arguments={"scenario": scenario, **asdict(self.options)},
        )
        self._constants = _make_constants(self.layout)
        self._state = _allocate_state(num_envs, self.layout)
        self._actions = self._action_arrays[GROUP]
        arrays = self._arrays
        self._now, self._final = _make_view(arrays.observations), _make_view(arrays.final)
        self._outcome = Outcome(
            reward=arrays.reward[GROUP], terminated=arrays.terminated, truncated=arrays.truncated, **arrays.info
        )

    def _step_instances(self, first: int, last: int) -> None:
        kernel.step_instances(
            first, last, self._actions, self._state, self._constants, self._now, self._final, self._outcome
        )

    def _reset_instances(self, mask: np.ndarray) -> None:
        kernel.reset_instances(mask, self._state, self._constants, self._now)

    def _observe_instances(self) -> None:
        kernel.observe_instances(self._state, self._constants, self._now)

    def _render_instance(self, index: int) -> np.ndarray:
        return draw_field(self._constants.size, self._state.players[index], self._state.foods[index])


def _make_constants(layout: Layout) -> Constants:
    scenario, options = layout.scenario, layout.options
    return Constants(
        size=scenario.size,
        num_players=scenario.num_players,
        num_foods=scenario.num_foods,
        sight=layout.sight,
        limit=options.episode_limit,
        force_coop=scenario.coop,
        grid_observation=options.grid_observation,
        observe_agent_levels=options.observe_agent_levels,
        normalize_reward=options.normalize_reward,
        obs_instead_of_state=options.obs_instead_of_state,
        penalty=np.float32(options.penalty),
        player_levels=layout.player_levels,
        food_levels=layout.food_levels,
    )


def _make_view(observations: Observations[np.ndarray]) -> View:
    observations.alive[GROUP][...] = True  # nobody leaves this game
    observation = observations.observation[GROUP]
    return View(
        observation=observation.reshape(*observation.shape[:2], -1),
        action_mask=observations.action_mask[GROUP],
        state=observations.state,
    )


def _allocate_state(num_envs: int, layout: Layout) -> State:
    num_players, num_foods = layout.scenario.num_players, layout.scenario.num_foods
    return State(
        seed=np.zeros(num_envs, np.int64),
        episode=np.zeros(num_envs, np.int64),
        time=np.zeros(num_envs, np.int64),
        spawned=np.zeros(num_envs, np.int64),
        players=np.zeros((num_envs, num_players, 3), np.int64),
        foods=np.zeros((num_envs, num_foods, 3), np.int64),
        target=np.zeros((num_envs, num_players, 2), np.int64),
        loading=np.zeros((num_envs, num_players), np.bool_),
    )
